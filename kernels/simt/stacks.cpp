// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/stacks.h"

#include <utility>

#include <boost/context/protected_fixedsize_stack.hpp>

#include "kernels/simt/sanitizers.h"

// This file is built without -fsanitize=thread, like block.cpp.
namespace tandem::simt_gpu {
namespace {

constexpr std::size_t kMostStacks = 1024;
constexpr std::size_t kStackBytes = 128 << 10, kSanitizedStackBytes = 512 << 10;  // the sanitizers write their reports on it

}  // namespace

Stacks::Stacks(Entry entry, void* owner) : entry_(entry), owner_(owner) {
  // What lanes share must not move to other memory under the thread sanitizer's eyes.
  workers_.reserve(kMostStacks);
  idle_.reserve(kMostStacks);
}

Stacks::~Stacks() {
  ending_ = true;
  for (Fibre* const worker : idle_) switch_to(main_, *worker);
  // A lane is a thread to the sanitizer, and nothing orders its last steps before this. Where the linker took a copy of a
  // library's inline function that is watched, it has seen them.
  const UnwatchedWrites unwatched;
  workers_.clear();
}

void Stacks::set_all_idle() {
  idle_.clear();
  for (const auto& worker : workers_) idle_.push_back(worker.get());
}

Fibre& Stacks::take_idle() {
  if (idle_.empty()) {
    const bool sanitized = under_thread_sanitizer() || under_address_sanitizer();
    boost::context::protected_fixedsize_stack stacks(sanitized ? kSanitizedStackBytes : kStackBytes);
    const boost::context::stack_context stack = stacks.allocate();
    Fibre& worker = *workers_.emplace_back(std::make_unique<Fibre>());
    worker.size_bytes = stack.size;
    worker.bottom = static_cast<const char*>(stack.sp) - stack.size;
    worker.fibre = boost::context::fiber(std::allocator_arg, boost::context::preallocated(stack.sp, stack.size, stack), stacks,
                                         [this, &worker](boost::context::fiber&& came_from) {
                                           arrived(std::move(came_from), nullptr);
                                           entry_(owner_, worker);
                                           leaving_ = &worker;
                                           if (__sanitizer_start_switch_fiber != nullptr)
                                             __sanitizer_start_switch_fiber(nullptr, main_.bottom, main_.size_bytes);
                                           return std::move(main_.fibre);
                                         });
    idle_.push_back(&worker);
  }
  Fibre& worker = *idle_.back();
  idle_.pop_back();
  return worker;
}

void Stacks::switch_to(Fibre& from, Fibre& to) {
  if (__sanitizer_start_switch_fiber != nullptr) __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size_bytes);
  leaving_ = &from;
  boost::context::fiber came_from = std::move(to.fibre).resume();
  arrived(std::move(came_from), from.fake_stack);
}

/// On a stack that has just been switched to; who left keeps where it goes on.
void Stacks::arrived(boost::context::fiber&& came_from, void* fake_stack) {
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(fake_stack, &leaving_->bottom, &leaving_->size_bytes);
  }
  leaving_->fibre = std::move(came_from);
}

}  // namespace tandem::simt_gpu
