// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kernels/memory.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/nccl/nccl_rank.h"

/// An NCCL within this process, whose ranks are threads, over lanes that are threads too. It keeps the promises of the real one
/// that matter here: calls return before their work is done, in two steps (first ncclInProgress, and the kernel is not in the
/// stream yet); kernels wait in their stream for those of the other ranks, for good where these do not come; calls of a group are
/// one kernel; a communicator that aborts frees its own streams only.
namespace tandem::nccl_test {

struct FakeFaults {
  int polls_before_launch = 2;  ///< of ncclCommGetAsyncError, before a call's work is in the stream
  int rank_without_init = -1;   ///< its communicators fail when they come into being
  int rank_with_error = -1;     ///< from its `error_after`-th launch on it has this asynchronous error
  int error_after = 0;
  ncclResult_t error = ncclSystemError;
  bool carries_out_mismatches = false;  ///< calls of different sizes: as much as both have; else they wait for good
};

/// What was called, of all ranks.
struct FakeCounts {
  int inits = 0, splits = 0, aborts = 0, destroys = 0, registered = 0, deregistered = 0;
};

/// One at a time; while it lives, functions() work on it.
class FakeNccl {
 public:
  explicit FakeNccl(FakeFaults faults = {});
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;
  ~FakeNccl();

  [[nodiscard]] static std::shared_ptr<const NcclFunctions> functions();
  [[nodiscard]] FakeCounts counts() const;
  struct State;
  [[nodiscard]] State& state() noexcept { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

/// The memory of an emulated device, shared by its lanes: of the emulated GPU where this build has one, else of the host.
class FakeDevice {
 public:
  explicit FakeDevice(std::unique_ptr<Memory> memory);  ///< null: the host's
  [[nodiscard]] std::unique_ptr<Memory> make_inner_lane();
  [[nodiscard]] void* reserve(std::int64_t size_bytes);
  void give_back(void* address, std::int64_t size_bytes);
  [[nodiscard]] bool holds(const void* address) const;

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<Memory> memory_;
  std::set<std::pair<const std::byte*, const std::byte*>> reserved_;
};

/// A lane that works asynchronously: a thread carries out what is issued.
[[nodiscard]] std::unique_ptr<Memory> make_fake_lane(const std::shared_ptr<FakeDevice>& device);
/// Appends work to such a lane.
void enqueue(Memory& lane, std::function<void(Memory& inner)> work);

struct FakeWorldOptions {
  int ranks = 1;
  std::chrono::milliseconds deadline{10000};
  std::uint64_t generation = 1;
  bool emulated_gpu = false;
};
/// Runs the body on threads as run_world() does on processes; its communicator computes on `lane`, which is set. Rethrows the
/// exception of the rank that the world failed of.
void run_fake_world(const FakeWorldOptions& options, const std::function<void(Communicator&, Memory& lane)>& body);

}  // namespace tandem::nccl_test
