// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

namespace tandem::cpu {

/// Memory for measuring: 2 MiB-aligned, huge pages where the system gives them, touched, filled with `value`. Measured code then
/// waits neither for first touches nor, with small pages, for address translation.
class HugeBuffer {
 public:
  HugeBuffer(std::size_t num_elements, float value) : num_elements_(num_elements) {
    const std::size_t size_bytes = (num_elements * sizeof(float) + kPage - 1) / kPage * kPage;
    memory_.reset(static_cast<float*>(std::aligned_alloc(kPage, size_bytes)));
    if (memory_ == nullptr) throw std::bad_alloc();
    madvise(memory_.get(), size_bytes, MADV_HUGEPAGE);
    for (float& element : span()) element = value;
  }
  [[nodiscard]] std::span<float> span() const { return {memory_.get(), num_elements_}; }
  [[nodiscard]] float* data() const { return memory_.get(); }

 private:
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::size_t num_elements_;
  std::unique_ptr<float, Free> memory_;
};

}  // namespace tandem::cpu
