// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/tensor.h"
#include "kernels/cpu/simd/vector_ops.h"
#include "kernels/cpu/worker_pool.h"

namespace tandem::cpu {

/// The loops of a 16-bit dtype.
[[nodiscard]] inline const HalfOps& half_ops(const VectorTables& tables, DType dtype) {
  return dtype == DType::bf16 ? tables.bf16 : tables.f16;
}

/// to <- from, `count` elements of fp32 (copied), bf16 or fp16 (exactly). Memory may not overlap.
void widen(const VectorTables& tables, const void* from, DType dtype, float* to, std::int64_t count);
/// to <- from rounded to nearest even, NaN stays NaN: the bits of core/dtype.h. Memory may not overlap.
void narrow(const VectorTables& tables, const float* from, DType dtype, void* to, std::int64_t count);

/// Address of an element of a tensor.
[[nodiscard]] inline void* element(const TensorView& tensor, std::int64_t index) {
  return static_cast<std::byte*>(tensor.data()) + index * static_cast<std::int64_t>(size_bytes(tensor.dtype()));
}

/// The bits of a 16-bit tensor from an element on.
[[nodiscard]] inline std::uint16_t* halves(const TensorView& tensor, std::int64_t first) {
  return static_cast<std::uint16_t*>(tensor.data()) + first;
}

/// Pieces of tensors in the type that a loop computes in: the tensor's own memory where it has that type; where it is 16 bits
/// wide, a widened copy in the thread's scratch, small enough to stay in a near cache, so that only 16 bits an element come from
/// and go to memory. store() rounds the copies of what was written into their tensors.
///
///   Pieces pieces(tables, scratch, thread);
///   const float* x = pieces.read<float>(input, begin, count);
///   loop(x, pieces.write<float>(output, begin, count), count);
///   pieces.store();
///
/// An input that is read before the output is stored may be the same memory as that output.
class Pieces {
 public:
  Pieces(const VectorTables& tables, const ThreadScratch& scratch, int thread)
      : tables_(&tables), begin_(scratch.of<float>(thread)), end_(begin_ + scratch.size_bytes() / sizeof(float)) {}

  /// Scratch for `count` pieces of `elements` each.
  [[nodiscard]] static std::size_t bytes(std::int64_t count, std::int64_t elements) {
    return static_cast<std::size_t>(count * padded(elements)) * sizeof(float);
  }
  /// Pieces in the scratch that these ones leave: these stay as they are.
  [[nodiscard]] Pieces nested() const {
    Pieces inner = *this;
    inner.num_outputs_ = 0;
    return inner;
  }

  /// Null of an empty view.
  template <class Real>
  [[nodiscard]] const Real* read(const TensorView& tensor, std::int64_t first, std::int64_t count) {
    if (!tensor) return nullptr;
    if constexpr (std::is_same_v<Real, float>) {
      if (is_16bit(tensor.dtype())) {
        float* copy = take(count);
        widen(*tables_, element(tensor, first), tensor.dtype(), copy, count);
        return copy;
      }
    }
    return static_cast<Real*>(tensor.data()) + first;
  }
  /// To be overwritten.
  template <class Real>
  [[nodiscard]] Real* write(const TensorView& tensor, std::int64_t first, std::int64_t count) {
    if constexpr (std::is_same_v<Real, float>) {
      if (is_16bit(tensor.dtype())) {
        float* copy = take(count);
        remember({tensor, first, count, copy});
        return copy;
      }
    }
    return static_cast<Real*>(tensor.data()) + first;
  }
  /// To be read and overwritten.
  template <class Real>
  [[nodiscard]] Real* update(const TensorView& tensor, std::int64_t first, std::int64_t count) {
    Real* piece = write<Real>(tensor, first, count);
    if constexpr (std::is_same_v<Real, float>) {
      if (is_16bit(tensor.dtype())) widen(*tables_, element(tensor, first), tensor.dtype(), piece, count);
    }
    return piece;
  }
  void store();
  /// Scratch that is no copy of a tensor.
  [[nodiscard]] float* take(std::int64_t count);

 private:
  struct Output {
    TensorView tensor;
    std::int64_t first = 0, count = 0;
    const float* copy = nullptr;
  };
  [[nodiscard]] static std::int64_t padded(std::int64_t count) { return (count + 15) / 16 * 16; }  // 64 bytes
  void remember(const Output& output);

  const VectorTables* tables_;
  float* begin_;
  float* end_;
  std::array<Output, 3> outputs_;
  int num_outputs_ = 0;
};

/// Elements that a 16-bit loop widens at a time: a few such pieces fit the first-level cache.
inline constexpr std::int64_t kWidenedElements = 1024;

/// Items of `width` elements that are widened at a time; all of `count` where nothing is widened.
[[nodiscard]] inline std::int64_t chunk_items(DType dtype, std::int64_t count, std::int64_t width) {
  return is_16bit(dtype) ? std::max<std::int64_t>(1, kWidenedElements / std::max<std::int64_t>(1, width)) : count;
}

/// body(first, count) for chunks of `step` items that cover [begin, end).
template <class Body>
void for_chunks(std::int64_t begin, std::int64_t end, std::int64_t step, Body body) {
  for (std::int64_t first = begin; first < end; first += step) body(first, std::min(step, end - first));
}

}  // namespace tandem::cpu
