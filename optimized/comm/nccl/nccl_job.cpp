// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_job.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/native_stream.h"
#include "kernels/kernels.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/comm/nccl/nccl_world.h"
#include "optimized/comm/nccl/rendezvous.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kMeetingPatience{120000};
constexpr std::chrono::milliseconds kExchangePatience{60000};
constexpr std::chrono::milliseconds kLeavingPatience{60000};
// From this version on several ranks may share a GPU where NCCL is told; before, where it takes them to be on different hosts.
constexpr int kFirstThatShares = 23000;

std::unique_ptr<NcclJob>& the_job() {
  static std::unique_ptr<NcclJob> job;
  return job;
}

// What every process says, between worlds.
std::vector<std::string> exchange(JobControl& control, const Lifeline& lifeline, const std::string& own) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::optional<std::string>> said(static_cast<std::size_t>(lifeline.ranks()));
  said[static_cast<std::size_t>(lifeline.rank())] = own;
  JobControl::Hooks hooks;
  hooks.told = [&](int from, const std::string& letter) {
    const std::scoped_lock lock(mutex);
    said[static_cast<std::size_t>(from)] = letter;
    changed.notify_all();
  };
  control.watch(std::move(hooks));
  for (int rank = 0; rank < lifeline.ranks(); ++rank) {
    if (rank != lifeline.rank()) control.tell(rank, own);
  }
  std::unique_lock lock(mutex);
  const auto all_here = [&] { return std::all_of(said.begin(), said.end(), [](const auto& one) { return one.has_value(); }); };
  const bool came = changed.wait_for(lock, kExchangePatience, all_here);
  lock.unlock();
  control.watch({});
  control.require_whole();
  if (!came)
    throw TimeoutError(fmt::format("rank {}: the other processes of the job did not say which GPU they use", lifeline.rank()));
  std::vector<std::string> all;
  for (const auto& one : said) all.push_back(*one);
  return all;
}

// NCCL reads its environment when the first communicator is made.
void let_ranks_share_gpus(int version, int rank) {
  if (version >= kFirstThatShares) {
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  } else {
    ::setenv("NCCL_HOSTID", fmt::format("tandem-rank-{}", rank).c_str(), 1);
  }
}

}  // namespace

NcclJob& NcclJob::get() {
  if (const std::string why = why_no_nccl(); !why.empty()) throw InputError("--transport nccl: " + why);
  std::unique_ptr<NcclJob>& job = the_job();
  if (!job) job.reset(new NcclJob(read_job_environment([](const char* name) { return std::getenv(name); })));
  return *job;
}

NcclJob* NcclJob::joined() noexcept { return the_job().get(); }

NcclJob::NcclJob(const JobEnvironment& environment) {
  device_.nccl = open_nccl();
  if (environment.launcher == JobEnvironment::Launcher::mpi) {
    const JobConnection connection = mpi_connection();
    control_ = connection.control;
    lifeline_ = connection.lifeline;
  } else {
    meet_others(environment);
  }
  choose_device(environment);
}

void NcclJob::meet_others(const JobEnvironment& environment) {
  own_lifeline_ = std::make_unique<Lifeline>(environment.rank, environment.processes);
  own_control_ = std::make_unique<JobControl>(*own_lifeline_);
  lifeline_ = own_lifeline_.get();
  control_ = own_control_.get();
  const std::string line = own_lifeline_->here().to_line();
  RendezvousResult met{{line}, 0};
  if (environment.processes > 1) {
    met = meet({environment.host, environment.port, environment.rank, environment.processes, environment.generation, line,
                kMeetingPatience});
  }
  std::vector<ProcessAddress> addresses;
  for (const std::string& address : met.lines) addresses.push_back(ProcessAddress::from_line(address));
  own_lifeline_->connect(std::move(addresses), met.token, std::chrono::steady_clock::now() + 30s, *own_control_);
}

void NcclJob::choose_device(const JobEnvironment& environment) {
  const int ranks = lifeline_->ranks(), rank = lifeline_->rank();
  std::set<std::string> hosts;
  int place_here = 0;
  for (int other = 0; other < ranks; ++other) {
    hosts.insert(lifeline_->at(other).host);
    if (other < rank && lifeline_->at(other).host == lifeline_->here().host) ++place_here;
  }
  const std::vector<cuda_gpu::DeviceInfo> devices = cuda_gpu::devices();
  device_index_ = environment.local_rank.value_or(place_here) % static_cast<int>(devices.size());
  device_.new_lane = [index = device_index_] { return cuda_gpu::make_lane(index); };
  device_.native_stream = [](Memory& lane) { return static_cast<void*>(cuda_gpu::native_stream(lane)); };
  int version = 0;
  require_nccl(*device_.nccl, device_.nccl->get_version(&version), "ncclGetVersion", nullptr);
  description_ = fmt::format("NCCL {}, {} rank{} on {} host{}", version_text(version), ranks, ranks == 1 ? "" : "s", hosts.size(),
                             hosts.size() == 1 ? "" : "s");
  // By the bus, not by counting: a process may see only one of a host's GPUs (CUDA_VISIBLE_DEVICES), each another one.
  const std::string own = lifeline_->here().host + " " + devices[static_cast<std::size_t>(device_index_)].bus_id;
  const std::vector<std::string> all = exchange(*control_, *lifeline_, own);
  gpus_ = static_cast<int>(std::set<std::string>(all.begin(), all.end()).size());
  if (gpus_ == ranks) return;
  let_ranks_share_gpus(version, rank);
  description_ += "; ranks share GPUs: times mean nothing";
}

void NcclJob::leave(int exit_status) noexcept {
  if (own_control_) static_cast<void>(own_control_->leave(exit_status, kLeavingPatience));
}

}  // namespace tandem
