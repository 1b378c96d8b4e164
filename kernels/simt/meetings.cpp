// SPDX-License-Identifier: Apache-2.0
// Where lanes meet: who waits for whom, what they hand over, and what is wrong about it.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/simt/runner.h"
#include "kernels/simt/sanitizers.h"

// This file is built without -fsanitize=thread, like block.cpp.
namespace tandem::simt_gpu {

/// Lets go on who has met whom it waits for.
void Runner::release() {
  bool moved = false;
  for (unsigned first = 0; first < size_; first += kLanesOfWarp) moved |= release_warp(first);
  if (moved) return;
  if (!held_.empty()) return order_.swap(held_);
  release_block();
  hold_back_warps();
}

bool Runner::have_met(unsigned first, const BlockThread& lane) const {
  for (unsigned rest = lane.mask; rest != 0; rest &= rest - 1) {
    const unsigned number = first + static_cast<unsigned>(__builtin_ctz(rest));
    const bool absent = number >= size_;
    if (absent || lanes_[number].state == BlockThread::State::left) {
      throw GpuError(fmt::format("emulated GPU: {}: the mask {:#x} of a warp operation names lane {}, which {}", where(lane),
                                 lane.mask, number % kLanesOfWarp, absent ? "the block does not have" : "has left the kernel"));
    }
    const BlockThread& other = lanes_[number];
    if (other.state != BlockThread::State::at_warp || other.mask != lane.mask || other.line != lane.line ||
        other.together != lane.together || std::strcmp(other.file, lane.file) != 0) {
      return false;
    }
  }
  return true;
}

bool Runner::release_warp(unsigned first) {
  bool moved = false;
  const unsigned end = std::min(first + kLanesOfWarp, size_);
  for (unsigned i = first; i < end; ++i) {
    BlockThread& lane = lanes_[i];
    if (lane.state != BlockThread::State::at_warp || !have_met(first, lane)) continue;
    const unsigned mask = lane.mask;
    if (lane.together != nullptr) lane.together(&lanes_[first], mask);
    unsigned least = ~0U, most = 0;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      const BlockThread& met = lanes_[first + static_cast<unsigned>(__builtin_ctz(rest))];
      least = std::min(least, met.meetings);
      most = std::max(most, met.meetings);
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
      BlockThread& met = lanes_[first + static_cast<unsigned>(__builtin_ctz(rest))];
      met.uneven = least != most;
      met.meetings = most + 1;
      met.state = BlockThread::State::ready;
      order_.push_back(met.number);
    }
    moved = true;
  }
  return moved;
}

void Runner::release_block() {
  const BlockThread* first = nullptr;
  votes_ = 0;
  for (unsigned i = 0; i < size_; ++i) {
    const BlockThread& lane = lanes_[i];
    if (lane.state == BlockThread::State::left) continue;
    if (lane.state != BlockThread::State::at_block) fail_meeting();
    if (first == nullptr) first = &lane;
    if (lane.line != first->line || std::strcmp(lane.file, first->file) != 0) fail_meeting();
    votes_ += lane.vote ? 1 : 0;
  }
  if (left_ > 0) {
    throw GpuError(fmt::format("emulated GPU: {} waits in __syncthreads, but {} of {} threads have left the kernel",
                               where(*first), left_, size_));
  }
  ++barriers_;
  for (unsigned i = 0; i < size_; ++i) {
    lanes_[i].state = BlockThread::State::ready;
    order_.push_back(i);
  }
}

/// Nobody can go on: names two lanes that wait for different things.
void Runner::fail_meeting() const {
  const BlockThread *one = nullptr, *other = nullptr;
  for (unsigned i = 0; i < size_; ++i) {
    const BlockThread& lane = lanes_[i];
    if (lane.state == BlockThread::State::left) continue;
    if (one == nullptr) one = &lane;
    const bool same = lane.state == one->state && lane.line == one->line && lane.mask == one->mask;
    if (!same && other == nullptr) other = &lane;
  }
  const auto what = [](const BlockThread& lane) {
    return lane.state == BlockThread::State::at_block ? std::string("__syncthreads")
                                                      : fmt::format("a warp operation with mask {:#x}", lane.mask);
  };
  throw GpuError(fmt::format("emulated GPU: divergent threads: {} waits in {}, {} in {}", where(*one), what(*one), where(*other),
                             what(*other)));
}

std::string Runner::where(const BlockThread& lane) const {
  return fmt::format("thread ({}, {}, {}) of block ({}, {}, {}) at {}:{}", lane.index.x, lane.index.y, lane.index.z,
                     view_.index.x, view_.index.y, view_.index.z, lane.file, lane.line);
}

int Runner::meet_block(BlockThread& lane) {
  Tag* const tag = &barrier_[barriers_ % 2];
  ordered_before(tag);
  give_way(lane, BlockThread::State::at_block);
  ordered_after(tag);
  return votes_;
}

void Runner::meet_warp(BlockThread& lane) {
  std::array<Tag, 4>& tags = warp_tags_[lane.number / kLanesOfWarp];
  const unsigned tag = lane.meetings % 4;
  ordered_before(&tags[tag]);
  give_way(lane, BlockThread::State::at_warp);
  if (!lane.uneven) return ordered_after(&tags[tag]);
  for (Tag& each : tags) ordered_after(&each);
}

int meet_block(bool vote, const char* file, int line) {
  BlockThread& lane = *current_lane;
  lane.vote = vote;
  lane.file = file;
  lane.line = line;
  return runner().meet_block(lane);
}

void meet_warp(unsigned mask, Together together, const char* file, int line) {
  BlockThread& lane = *current_lane;
  lane.mask = mask;
  lane.together = together;
  lane.file = file;
  lane.line = line;
  if ((mask >> (lane.number % kLanesOfWarp) & 1U) == 0)
    fail_lane("the mask of a warp operation leaves out its caller", file, line);
  runner().meet_warp(lane);
}

std::uint64_t exchange(unsigned mask, std::uint64_t bits, int source, const char* file, int line) {
  BlockThread& lane = *current_lane;
  std::memcpy(lane.give, &bits, sizeof bits);
  lane.source = source;
  if (source < 0 || source >= static_cast<int>(kLanesOfWarp) || (mask >> static_cast<unsigned>(source) & 1U) == 0) {
    fail_lane("a shuffle reads a lane that its mask leaves out", file, line);
  }
  const Together together = [](BlockThread* lanes, unsigned met) {
    for (; met != 0; met &= met - 1) {
      BlockThread& to = lanes[__builtin_ctz(met)];
      std::memcpy(to.take, lanes[to.source].give, sizeof bits);
    }
  };
  meet_warp(mask, together, file, line);
  std::memcpy(&bits, lane.take, sizeof bits);
  return bits;
}

unsigned ballot(unsigned mask, bool vote, const char* file, int line) {
  BlockThread& lane = *current_lane;
  lane.vote = vote;
  const Together together = [](BlockThread* lanes, unsigned met) {
    std::uint32_t votes = 0;
    for (unsigned rest = met; rest != 0; rest &= rest - 1) {
      const int i = __builtin_ctz(rest);
      votes |= static_cast<std::uint32_t>(lanes[i].vote) << i;
    }
    for (unsigned rest = met; rest != 0; rest &= rest - 1) lanes[__builtin_ctz(rest)].take[0] = votes;
  };
  meet_warp(mask, together, file, line);
  return lane.take[0];
}

void fail_lane(const char* what, const char* file, int line) {
  BlockThread& lane = *current_lane;
  lane.file = file;
  lane.line = line;
  throw GpuError(fmt::format("emulated GPU: {}: {}", runner().where(lane), what));
}

}  // namespace tandem::simt_gpu
