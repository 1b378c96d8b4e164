// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/memory.h"

/// What happens in the streams of nccl_fake_test_support.h: where the calls of several ranks meet.
namespace tandem::nccl_test {

enum class FakeKind : std::uint8_t { all_reduce, reduce_scatter, reduce, all_gather, broadcast, send, recv };

// One call, as its rank made it.
struct FakeCall {
  FakeKind kind = FakeKind::all_reduce;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclUint8;
  int peer = -1;  // or root
};

using Bytes = std::vector<std::byte>;

// Where the calls of all ranks that belong together meet, in the order in which each rank made them.
struct Meeting {
  std::map<int, std::pair<FakeCall, Bytes>> arrived;  // with its input
  int left = 0;
};

struct Clique {
  explicit Clique(int size) : ranks(size) {}
  const int ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, Meeting> meetings;
  int joined = 0, finalized = 0;
  // Of the n-th split: colour and key of every rank that has come.
  std::vector<std::map<int, std::pair<int, int>>> splits;
  std::map<std::string, std::shared_ptr<Clique>> parts;
};

/// The calls of one launch, each with the name of its meeting. The thread of the lane waits here for the other ranks, until it is
/// aborted.
void run_launch(Memory& inner, const std::vector<std::pair<std::string, FakeCall>>& calls, Clique& clique, int rank,
                const std::atomic<bool>& aborted, bool carries_out_mismatches);

}  // namespace tandem::nccl_test
