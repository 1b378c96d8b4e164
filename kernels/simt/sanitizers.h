// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// What the sanitizers' runtimes offer to code that switches stacks. Weak: null in a build without them.
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier)
__attribute__((weak)) void* __tsan_get_current_fiber(void);
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fibre);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fibre, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char* file, int line);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, std::size_t size_bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_bottom, std::size_t* old_size);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, std::size_t size_bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, std::size_t size_bytes);
// NOLINTEND(bugprone-reserved-identifier)
}

namespace tandem::simt_gpu {

[[nodiscard]] inline bool under_thread_sanitizer() noexcept { return __tsan_create_fiber != nullptr; }
[[nodiscard]] inline bool under_address_sanitizer() noexcept { return __asan_poison_memory_region != nullptr; }

/// What comes before ordered_before() on one thread comes before what follows a later ordered_after() of the same tag on another.
inline void ordered_before(void* tag) {
  if (under_thread_sanitizer()) __tsan_release(tag);
}
inline void ordered_after(void* tag) {
  if (under_thread_sanitizer()) __tsan_acquire(tag);
}

/// What is written and freed meanwhile is none of the thread sanitizer's business.
class UnwatchedWrites {
 public:
  UnwatchedWrites() {
    if (AnnotateIgnoreWritesBegin != nullptr) AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  UnwatchedWrites(const UnwatchedWrites&) = delete;
  UnwatchedWrites& operator=(const UnwatchedWrites&) = delete;
  ~UnwatchedWrites() {
    if (AnnotateIgnoreWritesEnd != nullptr) AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  }
};

}  // namespace tandem::simt_gpu
