// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/simt/runner.h"
#include "kernels/simt/sanitizers.h"
#include "kernels/simt/shared_variables.h"

// This file is built without -fsanitize=thread: its own bookkeeping is no memory traffic of kernels.
namespace tandem::simt_gpu {
namespace {

constexpr unsigned kNoSynchronisation = 1;  // of __tsan_switch_to_fiber: a switch orders nothing
constexpr std::size_t kCanaryBytes = 128;
constexpr int kPoison = 0xFF, kCanary = 0xA5;

std::uint64_t mixed(std::uint64_t& state) {  // splitmix64
  std::uint64_t z = state += 0x9E3779B97F4A7C15ULL;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
  return z ^ z >> 31;
}

thread_local Runner t_runner;

}  // namespace

Runner& runner() { return t_runner; }

Runner::Runner()
    : stacks_([](void* self, Fibre& worker) { static_cast<Runner*>(self)->run_lanes_on(worker); }, this),
      lanes_(std::make_unique<BlockThread[]>(kMostThreads)),
      warp_tags_(kMostThreads / kLanesOfWarp) {
  order_.reserve(kMostThreads);  // see Stacks
  held_.reserve(kMostThreads);
}

Runner::~Runner() {
  for (unsigned i = 0; i < kMostThreads; ++i) {
    if (lanes_[i].sanitizer_fibre != nullptr) __tsan_destroy_fiber(lanes_[i].sanitizer_fibre);
  }
}

void Runner::shuffle(std::vector<unsigned>& order) {
  if (!shuffled_) return;
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[(mixed(random_) >> 32) * i >> 32]);
}

// Of those whose turn it is. Nothing but barriers keeps warps together: one may be at its next barrier before another has left
// the last, and what it writes on its way there must not be what the other still reads.
void Runner::hold_back_warps() {
  if (!shuffled_) return;
  const std::uint64_t held = mixed(random_) & mixed(random_);  // of every warp with probability 1/4
  const auto is_held = [held](unsigned lane) { return (held >> (lane / kLanesOfWarp) & 1U) != 0; };
  const auto first = std::partition(order_.begin(), order_.end(), [&](unsigned lane) { return !is_held(lane); });
  if (first == order_.begin()) return;
  for (auto lane = first; lane != order_.end(); ++lane) held_.push_back(*lane);  // no memmove, which a sanitizer watches
  order_.erase(first, order_.end());
}

void Runner::prepare(const GridSpec& spec) {
  view_.grid = spec.grid;
  view_.block = spec.block;
  size_ = spec.block.x * spec.block.y * spec.block.z;
  for (unsigned i = 0; i < size_; ++i) {
    lanes_[i].number = i;
    lanes_[i].index = {i % spec.block.x, i / spec.block.x % spec.block.y, i / (spec.block.x * spec.block.y)};
    if (under_thread_sanitizer() && lanes_[i].sanitizer_fibre == nullptr) lanes_[i].sanitizer_fibre = __tsan_create_fiber(0);
  }
  if (under_thread_sanitizer()) sanitizer_main_ = __tsan_get_current_fiber();
  random_ = spec.seed;
  shuffled_ = spec.seed != 0;
  const std::size_t size_bytes = (spec.shared_bytes + 127) / 128 * 128;
  dynamic_.reset(static_cast<std::byte*>(std::aligned_alloc(1024, (size_bytes + kCanaryBytes + 1023) / 1024 * 1024)));
  view_.dynamic_shared = dynamic_.get();
  if (under_address_sanitizer()) __asan_poison_memory_region(dynamic_.get() + spec.shared_bytes, kCanaryBytes);
}

void Runner::run(const GridSpec& spec, void (*body)(const void*), const void* closure) {
  prepare(spec);
  body_ = body;
  closure_ = closure;
  std::vector<unsigned> blocks(std::size_t{spec.grid.x} * spec.grid.y * spec.grid.z);
  std::iota(blocks.begin(), blocks.end(), 0U);
  shuffle(blocks);
  current_block = &view_;
  SharedVariables& variables = shared_variables();
  variables.begin_grid();
  for (const unsigned block : blocks) {
    view_.index = {block % spec.grid.x, block / spec.grid.x % spec.grid.y, block / (spec.grid.x * spec.grid.y)};
    std::memset(dynamic_.get(), kPoison, spec.shared_bytes);
    if (!under_address_sanitizer()) std::memset(dynamic_.get() + spec.shared_bytes, kCanary, kCanaryBytes);
    run_block();
    if (error_ != nullptr) break;
    check_canary(spec.shared_bytes);
    variables.end_block();
  }
  variables.end_grid();
  current_block = nullptr;
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Behind dynamic shared memory. The address sanitizer watches it itself.
void Runner::check_canary(std::size_t shared_bytes) const {
  if (under_address_sanitizer()) return;
  for (std::size_t i = shared_bytes; i < shared_bytes + kCanaryBytes; ++i) {
    if (dynamic_.get()[i] == std::byte{kCanary}) continue;
    throw GpuError(fmt::format("emulated GPU: block ({}, {}, {}) wrote to byte {} of {} bytes of dynamic shared memory",
                               view_.index.x, view_.index.y, view_.index.z, i, shared_bytes));
  }
}

void Runner::run_block() {
  left_ = 0;
  cursor_ = 0;
  order_.resize(size_);
  std::iota(order_.begin(), order_.end(), 0U);
  shuffle(order_);
  held_.clear();
  hold_back_warps();
  for (unsigned i = 0; i < size_; ++i) {
    lanes_[i].state = BlockThread::State::fresh;
    lanes_[i].worker = nullptr;
    lanes_[i].meetings = 0;
  }
  ordered_before(&start_);
  go_to(stacks_.main(), next());
  ordered_after(&end_);
  stacks_.set_all_idle();
}

/// Runs on a stack of its own: lanes from their beginnings, as long as none of them waits; a lane that does keeps this stack.
void Runner::run_lanes_on(Fibre& worker) {
  while (!stacks_.ending()) {
    run_lane(*current_lane);
    // Under the thread sanitizer, lanes that nothing orders must not share a stack.
    BlockThread* lane = next();
    if (lane != nullptr && lane->worker == nullptr && !under_thread_sanitizer()) {
      lane->worker = &worker;
      current_lane = lane;
      continue;
    }
    if (!under_thread_sanitizer()) stacks_.set_idle(worker);
    go_to(worker, lane);
  }
}

void Runner::run_lane(BlockThread& lane) {
  ordered_after(&start_);
  std::exception_ptr error;
  try {
    body_(closure_);
  } catch (const Cancelled&) {
  } catch (...) {
    error = std::current_exception();
  }
  lane.copies.clear();
  lane.commits.clear();
  ordered_before(&end_);
  lane.state = BlockThread::State::left;
  ++left_;
  if (error != nullptr) cancel(std::move(error));
}

/// The lane whose turn it is; null when all have left.
BlockThread* Runner::next() {
  while (true) {
    if (cursor_ < order_.size()) return &lanes_[order_[cursor_++]];
    if (left_ == size_) return nullptr;
    order_.clear();
    cursor_ = 0;
    try {
      release();
    } catch (...) {
      cancel(std::current_exception());
    }
    shuffle(order_);
  }
}

/// The first error counts. Lanes that wait get a last turn, to unwind.
void Runner::cancel(std::exception_ptr error) {
  if (error_ != nullptr) return;
  error_ = std::move(error);
  order_.clear();
  held_.clear();
  cursor_ = 0;
  for (unsigned i = 0; i < size_; ++i) {
    BlockThread& lane = lanes_[i];
    if (lane.state == BlockThread::State::fresh) {
      lane.state = BlockThread::State::left;
      ++left_;
    } else if (lane.state != BlockThread::State::left) {
      order_.push_back(i);
    }
  }
}

/// Called by a lane: returns when it has its next turn.
void Runner::give_way(BlockThread& lane, BlockThread::State state) {
  if (error_ != nullptr) throw Cancelled{};
  lane.state = state;
  BlockThread* const following = next();
  if (following != &lane) go_to(*lane.worker, following);
  if (error_ != nullptr) throw Cancelled{};
}

/// From the stack `from` to the lane (to run()'s own stack if there is none); returns when somebody comes back to `from`.
void Runner::go_to(Fibre& from, BlockThread* lane) {
  if (lane != nullptr && lane->worker == nullptr) lane->worker = &stacks_.take_idle();
  if (under_thread_sanitizer()) {
    __tsan_switch_to_fiber(lane == nullptr ? sanitizer_main_ : lane->sanitizer_fibre, kNoSynchronisation);
  }
  current_lane = lane;
  stacks_.switch_to(from, lane == nullptr ? stacks_.main() : *lane->worker);
}

void run_grid(const GridSpec& spec, void (*body)(const void*), const void* closure) { runner().run(spec, body, closure); }

}  // namespace tandem::simt_gpu
