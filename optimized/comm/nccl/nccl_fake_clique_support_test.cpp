// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_fake_clique_test_support.h"

#include <algorithm>

#include "core/dtype.h"
#include "kernels/cpu/sum_in_order.h"

namespace tandem::nccl_test {
namespace {

DType dtype_of_nccl(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: return DType::f64;
    case ncclFloat32: return DType::f32;
    case ncclFloat16: return DType::f16;
    case ncclBfloat16: return DType::bf16;
    case ncclInt64: return DType::i64;
    case ncclInt32: return DType::i32;
    case ncclInt8: return DType::i8;
    default: return DType::u8;
  }
}

bool is_message(FakeKind kind) { return kind == FakeKind::send || kind == FakeKind::recv; }

std::size_t input_count(const FakeCall& call, int rank, int ranks) {
  switch (call.kind) {
    case FakeKind::reduce_scatter: return call.count * static_cast<std::size_t>(ranks);
    case FakeKind::recv: return 0;
    case FakeKind::broadcast: return rank == call.peer ? call.count : 0;
    default: return call.count;
  }
}

Bytes summed(const Meeting& meeting, DType dtype, std::size_t begin, std::size_t count) {
  const std::size_t width = size_bytes(dtype);
  std::vector<const std::byte*> sources;
  for (const auto& [rank, entry] : meeting.arrived) sources.push_back(entry.second.data() + begin * width);
  Bytes result(count * width);
  std::byte* const destinations[] = {result.data()};
  if (count > 0) sum_in_order(dtype, sources, destinations, static_cast<std::int64_t>(count));
  return result;
}

// What the rank gets of the meeting.
Bytes result_of(const Meeting& meeting, const FakeCall& call, int rank) {
  const DType dtype = dtype_of_nccl(call.type);
  std::size_t count = call.count;
  for (const auto& [other, entry] : meeting.arrived) count = std::min(count, entry.first.count);
  switch (call.kind) {
    case FakeKind::all_reduce: return summed(meeting, dtype, 0, count);
    case FakeKind::reduce: return rank == call.peer ? summed(meeting, dtype, 0, count) : Bytes{};
    case FakeKind::reduce_scatter: return summed(meeting, dtype, static_cast<std::size_t>(rank) * count, count);
    case FakeKind::all_gather: {
      Bytes all;
      for (const auto& [other, entry] : meeting.arrived) all.insert(all.end(), entry.second.begin(), entry.second.end());
      return all;
    }
    case FakeKind::broadcast:
      return rank == call.peer && call.input == call.output ? Bytes{} : meeting.arrived.at(call.peer).second;
    case FakeKind::recv: return meeting.arrived.at(call.peer).second;
    case FakeKind::send: break;
  }
  return {};
}

bool all_match(const Meeting& meeting) {
  const FakeCall& first = meeting.arrived.begin()->second.first;
  return std::all_of(meeting.arrived.begin(), meeting.arrived.end(), [&](const auto& entry) {
    const FakeCall& call = entry.second.first;
    const bool same_kind = call.kind == first.kind || (is_message(call.kind) && is_message(first.kind));
    return same_kind && call.count == first.count && call.type == first.type &&
           (is_message(call.kind) || call.peer == first.peer);
  });
}

// Among those that have arrived; a rank may send to itself.
int place_of(const FakeCall& call, int rank, int ranks) { return call.kind == FakeKind::recv ? ranks + rank : rank; }

}  // namespace

void run_launch(Memory& inner, const std::vector<std::pair<std::string, FakeCall>>& calls, Clique& clique, int rank,
                const std::atomic<bool>& aborted, bool carries_out_mismatches) {
  std::vector<Bytes> inputs;
  for (const auto& [key, call] : calls) {
    Bytes input(input_count(call, rank, clique.ranks) * size_bytes(dtype_of_nccl(call.type)));
    if (!input.empty()) inner.read(call.input, input.data(), std::ssize(input));
    inputs.push_back(std::move(input));
  }
  std::unique_lock lock(clique.mutex);
  for (std::size_t i = 0; i < calls.size(); ++i)
    clique.meetings[calls[i].first].arrived[place_of(calls[i].second, rank, clique.ranks)] = {calls[i].second,
                                                                                              std::move(inputs[i])};
  clique.changed.notify_all();
  for (const auto& [key, call] : calls) {
    Meeting& meeting = clique.meetings[key];
    const std::size_t expected = is_message(call.kind) ? 2 : static_cast<std::size_t>(clique.ranks);
    clique.changed.wait(lock, [&] {
      return aborted.load() || (meeting.arrived.size() == expected && (carries_out_mismatches || all_match(meeting)));
    });
    if (aborted.load()) return;
    const Bytes result = result_of(meeting, call, rank);
    if (!result.empty()) {
      inner.write(result.data(), call.output, std::ssize(result));
      inner.synchronize();
    }
    ++meeting.left;
    clique.changed.notify_all();
  }
  // A send is done when the receiver has the bytes.
  for (const auto& [key, call] : calls) {
    if (call.kind == FakeKind::send) {
      clique.changed.wait(lock, [&, &meeting = clique.meetings[key]] { return aborted.load() || meeting.left == 2; });
    }
  }
}

}  // namespace tandem::nccl_test
