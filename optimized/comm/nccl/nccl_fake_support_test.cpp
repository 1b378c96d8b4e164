// SPDX-License-Identifier: Apache-2.0
// The functions of the NCCL of nccl_fake_test_support.h.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>

#include "core/error.h"
#include "optimized/comm/nccl/nccl_fake_clique_test_support.h"
#include "optimized/comm/nccl/nccl_fake_test_support.h"

namespace tandem::nccl_test {

struct FakeNccl::State {
  FakeFaults faults;
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Clique>> by_id;
  int ids = 0;
  FakeCounts counts;
  std::vector<std::shared_ptr<ncclComm>> comms;  // until the end, so that a late call finds them
};

namespace {

FakeNccl::State* the_state = nullptr;

struct Launch {
  ncclComm* comm = nullptr;
  Memory* lane = nullptr;
  std::vector<FakeCall> calls;
};
thread_local int group_depth = 0;
thread_local std::vector<Launch> group_launches;

}  // namespace
}  // namespace tandem::nccl_test

struct ncclComm {
  std::shared_ptr<tandem::nccl_test::Clique> clique;
  int rank = 0;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::map<std::string, int> made;  // calls of each kind so far
  int launches = 0;
  int polls = 0;
  std::vector<tandem::nccl_test::Launch> taken;  // not in the stream yet
  ncclComm_t* split_place = nullptr;
  int split_number = -1;
  bool finalizing = false;
};

namespace tandem::nccl_test {
namespace {

std::string key_of(ncclComm& comm, const FakeCall& call) {
  std::string name = "collective";
  if (call.kind == FakeKind::send) name = std::to_string(comm.rank) + ">" + std::to_string(call.peer);
  if (call.kind == FakeKind::recv) name = std::to_string(call.peer) + "<" + std::to_string(comm.rank);
  const int number = comm.made[name]++;
  std::replace(name.begin(), name.end(), '<', '>');
  return name + " " + std::to_string(number);
}

void put_into_stream(ncclComm& comm) {
  for (Launch& launch : std::exchange(comm.taken, {})) {
    std::vector<std::pair<std::string, FakeCall>> calls;
    for (const FakeCall& call : launch.calls) calls.emplace_back(key_of(comm, call), call);
    enqueue(*launch.lane, [calls = std::move(calls), clique = comm.clique, rank = comm.rank, aborted = comm.aborted,
                           mode = the_state->faults.carries_out_mismatches](Memory& inner) {
      run_launch(inner, calls, *clique, rank, *aborted, mode);
    });
  }
}

ncclResult_t take(Launch launch) {
  ncclComm& comm = *launch.comm;
  ++comm.launches;
  comm.polls = 0;
  comm.taken.push_back(std::move(launch));
  if (the_state->faults.polls_before_launch > 0) return ncclInProgress;
  put_into_stream(comm);
  return ncclSuccess;
}

ncclResult_t call(ncclComm_t comm, cudaStream_t stream, const FakeCall& made) {
  auto* const lane = reinterpret_cast<Memory*>(stream);
  if (group_depth == 0) return take({comm, lane, {made}});
  for (Launch& launch : group_launches) {
    if (launch.comm != comm) continue;
    launch.calls.push_back(made);
    return ncclSuccess;
  }
  group_launches.push_back({comm, lane, {made}});
  return ncclSuccess;
}

ncclComm_t make_comm(std::shared_ptr<Clique> clique, int rank) {
  auto comm = std::make_shared<ncclComm>();
  comm->clique = std::move(clique);
  comm->rank = rank;
  const std::scoped_lock lock(the_state->mutex);
  the_state->comms.push_back(comm);
  return comm.get();
}

// Of a split that all ranks have come to: this rank's part.
ncclComm_t make_part(ncclComm& comm) {
  Clique& parent = *comm.clique;
  const auto& said = parent.splits[static_cast<std::size_t>(comm.split_number)];
  const int colour = said.at(comm.rank).first;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (const auto& [rank, entry] : said) {
    if (entry.first == colour) members.emplace_back(entry.second, rank);
  }
  std::sort(members.begin(), members.end());
  std::shared_ptr<Clique>& part = parent.parts[std::to_string(comm.split_number) + " " + std::to_string(colour)];
  if (!part) part = std::make_shared<Clique>(static_cast<int>(members.size()));
  {
    const std::scoped_lock lock(part->mutex);
    ++part->joined;
  }
  const auto own = std::find_if(members.begin(), members.end(), [&](const auto& member) { return member.second == comm.rank; });
  return make_comm(part, static_cast<int>(own - members.begin()));
}

ncclResult_t async_error(ncclComm_t comm, ncclResult_t* result) {
  const FakeFaults& faults = the_state->faults;
  Clique& clique = *comm->clique;
  {
    const std::scoped_lock lock(clique.mutex);
    *result = clique.joined < clique.ranks ? ncclInProgress : ncclSuccess;
    if (comm->rank == faults.rank_without_init) *result = ncclSystemError;
    if (comm->rank == faults.rank_with_error && comm->launches > faults.error_after) *result = faults.error;
    if (comm->finalizing && clique.finalized < clique.ranks) *result = ncclInProgress;
  }
  if (*result != ncclSuccess) return ncclSuccess;
  if (!comm->taken.empty()) {
    if (++comm->polls < faults.polls_before_launch)
      *result = ncclInProgress;
    else
      put_into_stream(*comm);
  }
  if (comm->split_place != nullptr) {
    const std::scoped_lock lock(clique.mutex);
    if (static_cast<int>(clique.splits[static_cast<std::size_t>(comm->split_number)].size()) < clique.ranks)
      *result = ncclInProgress;
    else
      *std::exchange(comm->split_place, nullptr) = make_part(*comm);
  }
  return ncclSuccess;
}

ncclResult_t init_rank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidArgument;
  std::shared_ptr<Clique> clique;
  {
    const std::scoped_lock lock(the_state->mutex);
    ++the_state->counts.inits;
    std::shared_ptr<Clique>& known = the_state->by_id[id.internal];
    if (!known) known = std::make_shared<Clique>(ranks);
    clique = known;
  }
  *comm = make_comm(clique, rank);
  const std::scoped_lock lock(clique->mutex);
  ++clique->joined;
  return ncclInProgress;
}

ncclResult_t split(ncclComm_t comm, int colour, int key, ncclComm_t* part, ncclConfig_t*) {
  if (colour < 0) return ncclInvalidArgument;
  {
    const std::scoped_lock lock(the_state->mutex);
    ++the_state->counts.splits;
  }
  const std::scoped_lock lock(comm->clique->mutex);
  const auto number = static_cast<std::size_t>(++comm->split_number);
  if (comm->clique->splits.size() <= number) comm->clique->splits.resize(number + 1);
  comm->clique->splits[number][comm->rank] = {colour, key};
  comm->split_place = part;
  return ncclInProgress;
}

ncclResult_t unique_id(ncclUniqueId* id) {
  const std::scoped_lock lock(the_state->mutex);
  std::memset(id->internal, 0, sizeof(id->internal));
  const std::string text = "id " + std::to_string(++the_state->ids);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t abort_comm(ncclComm_t comm) {
  {
    const std::scoped_lock lock(the_state->mutex);
    ++the_state->counts.aborts;
  }
  const std::scoped_lock lock(comm->clique->mutex);
  *comm->aborted = true;
  comm->taken.clear();
  comm->clique->changed.notify_all();
  return ncclSuccess;
}

ncclResult_t finalize(ncclComm_t comm) {
  const std::scoped_lock lock(comm->clique->mutex);
  if (comm->clique->joined < comm->clique->ranks) return ncclInvalidArgument;  // has not come into being
  comm->finalizing = true;
  ++comm->clique->finalized;
  return ncclInProgress;
}

ncclResult_t destroy(ncclComm_t) {
  const std::scoped_lock lock(the_state->mutex);
  ++the_state->counts.destroys;
  return ncclSuccess;
}

ncclResult_t group_start() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  if (--group_depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (Launch& launch : std::exchange(group_launches, {})) result = take(std::move(launch));
  return result;
}

NcclFunctions make_functions() {
  NcclFunctions f;
  f.get_version = [](int* version) { return *version = 22809, ncclSuccess; };
  f.error_string = [](ncclResult_t result) { return result == ncclRemoteError ? "remote error" : "fake system error"; };
  f.last_error = [](ncclComm_t) { return ""; };
  f.get_unique_id = unique_id;
  f.init_rank = init_rank;
  f.split = split;
  f.finalize = finalize;
  f.destroy = destroy;
  f.abort = abort_comm;
  f.async_error = async_error;
  f.register_buffer = [](ncclComm_t, void* buffer, std::size_t, void** handle) {
    const std::scoped_lock lock(the_state->mutex);
    ++the_state->counts.registered;
    return *handle = buffer, ncclSuccess;
  };
  f.deregister_buffer = [](ncclComm_t, void*) {
    const std::scoped_lock lock(the_state->mutex);
    ++the_state->counts.deregistered;
    return ncclSuccess;
  };
  f.group_start = group_start;
  f.group_end = group_end;
  f.all_reduce = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                    cudaStream_t stream) {
    return call(comm, stream, {FakeKind::all_reduce, in, out, count, type, -1});
  };
  f.reduce_scatter = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                        cudaStream_t stream) {
    return call(comm, stream, {FakeKind::reduce_scatter, in, out, count, type, -1});
  };
  f.reduce = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t, int root, ncclComm_t comm,
                cudaStream_t stream) {
    return call(comm, stream, {FakeKind::reduce, in, out, count, type, root});
  };
  f.all_gather = [](const void* in, void* out, std::size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, {FakeKind::all_gather, in, out, count, type, -1});
  };
  f.broadcast = [](const void* in, void* out, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                   cudaStream_t stream) {
    return call(comm, stream, {FakeKind::broadcast, in, out, count, type, root});
  };
  f.send = [](const void* in, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, {FakeKind::send, in, nullptr, count, type, peer});
  };
  f.recv = [](void* out, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return call(comm, stream, {FakeKind::recv, nullptr, out, count, type, peer});
  };
  return f;
}

}  // namespace

FakeNccl::FakeNccl(FakeFaults faults) : state_(std::make_unique<State>()) {
  state_->faults = faults;
  the_state = state_.get();
}

FakeNccl::~FakeNccl() { the_state = nullptr; }

std::shared_ptr<const NcclFunctions> FakeNccl::functions() {
  static const auto functions = std::make_shared<const NcclFunctions>(make_functions());
  return functions;
}

FakeCounts FakeNccl::counts() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->counts;
}

}  // namespace tandem::nccl_test
