// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <boost/context/fiber.hpp>

namespace tandem::simt_gpu {

/// A stack of this thread of the process, and where its code goes on; main() is the thread's own.
class Fibre {
 public:
  boost::context::fiber fibre;  ///< empty while it runs
  const void* bottom = nullptr;
  std::size_t size_bytes = 0;
  void* fake_stack = nullptr;  ///< of the address sanitizer
};

/// The stacks on which one thread's lanes run. A guard page ends each. Kept until the end, when all must be idle.
class Stacks {
 public:
  /// What a stack runs from its first switch on: returns only when ending() holds and it is switched to.
  using Entry = void (*)(void* owner, Fibre& worker);
  Stacks(Entry entry, void* owner);
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks();

  [[nodiscard]] Fibre& main() noexcept { return main_; }
  [[nodiscard]] bool ending() const noexcept { return ending_; }
  [[nodiscard]] Fibre& take_idle();
  void set_idle(Fibre& worker) { idle_.push_back(&worker); }
  void set_all_idle();
  /// From the stack that runs; returns when somebody switches back to it.
  void switch_to(Fibre& from, Fibre& to);

 private:
  void arrived(boost::context::fiber&& came_from, void* fake_stack);

  Entry entry_;
  void* owner_;
  Fibre main_;
  std::vector<std::unique_ptr<Fibre>> workers_;
  std::vector<Fibre*> idle_;
  Fibre* leaving_ = nullptr;
  bool ending_ = false;
};

}  // namespace tandem::simt_gpu
