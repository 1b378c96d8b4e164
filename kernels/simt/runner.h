// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "kernels/simt/block.h"
#include "kernels/simt/stacks.h"

namespace tandem::simt_gpu {

inline constexpr unsigned kLanesOfWarp = 32, kMostThreads = 1024;

/// Thrown out of a meeting that will not take place.
struct Cancelled {};

/// Runs blocks on the thread of the process that owns it; one a thread, kept for its stacks.
class Runner {
 public:
  Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  ~Runner();
  void run(const GridSpec& spec, void (*body)(const void*), const void* closure);
  // Called by lanes.
  int meet_block(BlockThread& lane);
  void meet_warp(BlockThread& lane);
  [[nodiscard]] std::string where(const BlockThread& lane) const;

 private:
  struct Tag {
    std::int64_t carrier;
  };

  void prepare(const GridSpec& spec);
  void check_canary(std::size_t shared_bytes) const;
  void run_block();
  void give_way(BlockThread& lane, BlockThread::State state);
  void run_lanes_on(Fibre& worker);
  void run_lane(BlockThread& lane);
  [[nodiscard]] BlockThread* next();
  void cancel(std::exception_ptr error);
  void go_to(Fibre& from, BlockThread* lane);
  void shuffle(std::vector<unsigned>& order);
  void hold_back_warps();
  // Who may go on; in meetings.cpp.
  void release();
  [[nodiscard]] bool release_warp(unsigned first);
  [[nodiscard]] bool have_met(unsigned first, const BlockThread& lane) const;
  void release_block();
  [[noreturn]] void fail_meeting() const;

  Stacks stacks_;
  BlockView view_;
  std::unique_ptr<BlockThread[]> lanes_;
  unsigned size_ = 0, left_ = 0;
  int votes_ = 0;                // of the block's last meeting
  std::vector<unsigned> order_;  // of this turn
  std::vector<unsigned> held_;   // whole warps that go on once nobody else can
  std::size_t cursor_ = 0;
  std::uint64_t random_ = 0;
  bool shuffled_ = false;
  void (*body_)(const void*) = nullptr;
  const void* closure_ = nullptr;
  std::exception_ptr error_;
  std::unique_ptr<std::byte, void (*)(void*)> dynamic_{nullptr, std::free};

  // Addresses that carry the order of CUDA's synchronisation to the thread sanitizer. Two for barriers, in turn: a fast lane's
  // next arrival must not order a slow lane's past.
  void* sanitizer_main_ = nullptr;
  Tag start_{}, end_{};
  std::uint64_t barriers_ = 0;
  Tag barrier_[2] = {};
  std::vector<std::array<Tag, 4>> warp_tags_;
};
/// Of the calling thread.
[[nodiscard]] Runner& runner();

}  // namespace tandem::simt_gpu
