// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <vector>

namespace tandem::cpu {

/// body(item, thread) for items [0, count) on up to `threads` threads, thread in [0, threads); one after the other on the calling
/// thread where the build has no OpenMP. Who does which item varies: the result must not depend on it. The first exception of a
/// body is thrown again here.
template <class Body>
void parallel_for(int threads, std::int64_t count, Body body) {
#if defined(_OPENMP)
  if (threads > 1 && count > 1) {
    std::exception_ptr failure;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (std::int64_t item = 0; item < count; ++item) {
      try {
        body(item, omp_get_thread_num());
      } catch (...) {
#pragma omp critical(tandem_parallel_for_failure)
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    return;
  }
#endif
  (void)threads;
  for (std::int64_t item = 0; item < count; ++item) body(item, 0);
}

/// body(begin, end, thread) for pieces of `grain` elements that cover [0, count).
template <class Body>
void parallel_pieces(int threads, std::int64_t count, std::int64_t grain, Body body) {
  parallel_for(threads, (count + grain - 1) / grain, [&](std::int64_t piece, int thread) {
    const std::int64_t begin = piece * grain;
    body(begin, count - begin < grain ? count : begin + grain, thread);
  });
}

/// Work space of each thread, 64-byte aligned, kept from call to call and grown when a call needs more: it holds tiles, not
/// tensors.
class ThreadScratch {
 public:
  explicit ThreadScratch(int threads) : blocks_(static_cast<std::size_t>(threads)) {}

  /// Makes sure, outside of parallel regions, that every thread has this many bytes.
  void reserve(std::size_t size_bytes) {
    if (size_bytes <= size_bytes_) return;
    for (auto& block : blocks_) block.reset(static_cast<std::byte*>(::operator new(size_bytes, kAlignment)));
    size_bytes_ = size_bytes;
  }
  template <class Real>
  [[nodiscard]] Real* of(int thread) const {
    return reinterpret_cast<Real*>(blocks_[static_cast<std::size_t>(thread)].get());
  }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* block) const { ::operator delete(block, kAlignment); }
  };
  std::vector<std::unique_ptr<std::byte, Free>> blocks_;
  std::size_t size_bytes_ = 0;
};

}  // namespace tandem::cpu
