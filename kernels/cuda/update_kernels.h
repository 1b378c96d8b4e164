// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/gpu.h"

namespace tandem::TANDEM_GPU {

/// Elements of a tensor that one block of the launches below takes. A launch covers tensors one behind the other: the blocks of a
/// tensor are numbered from its first_block on, and the first tensor's first_block is 0.
inline constexpr std::int64_t kUpdateBlock = 1 << 13;
inline constexpr std::int64_t kNormBlock = 1 << 14;
[[nodiscard]] inline std::int64_t blocks_of(std::int64_t count, std::int64_t block) { return (count + block - 1) / block; }

enum class Epsilon : std::uint8_t { outside_root, inside_root };

/// One tensor of launch_adamw(); what kernels.h states, with the step's numbers as the kernel wants them. All pointers at any
/// alignment of an element.
struct AdamWEntry {
  const void* gradient = nullptr;
  void* parameter = nullptr;
  void* m = nullptr;
  void* v = nullptr;
  void* stored = nullptr;                   ///< may be null
  std::int64_t count = 0, first_block = 0;  ///< elements; the first of its blocks among those of all entries
  DType gradient_dtype = DType::f32, stored_dtype = DType::bf16;
  double gradient_scale = 1, beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  double decay = 1;              ///< 1 - lr wd
  double rate = 0;               ///< lr / (1 - beta1^n)
  double second_correction = 1;  ///< 1 / (1 - beta2^n)
  double epsilon = 0;
};
/// `entries` [num_entries] on the device; `blocks` over all of them. All parameters are of `dtype`, fp32 or fp64.
void launch_adamw(DType dtype, const AdamWEntry* entries, int num_entries, std::int64_t blocks, Epsilon epsilon,
                  StreamHandle stream);

struct SgdArguments {
  const void* gradient = nullptr;
  void* parameter = nullptr;
  void* stored = nullptr;  ///< may be null
  std::int64_t count = 0;
  DType gradient_dtype = DType::f32, stored_dtype = DType::bf16;
  double decay = 1, rate = 0;
};
void launch_sgd(DType dtype, const SgdArguments& arguments, StreamHandle stream);

struct NormEntry {
  const void* data = nullptr;
  std::int64_t count = 0, first_block = 0;  ///< elements; the first of its blocks among those of all entries
  DType dtype = DType::f32;
};
/// parts[block] = the sum of squares of the block's elements in double: thread t of 256 adds those of its elements in order, the
/// threads' sums in a fixed order. The order depends on neither address nor dtype.
void launch_squares(const NormEntry* entries, int num_entries, std::int64_t blocks, double* parts, StreamHandle stream);
/// norms[entry] = the sum of the parts of its blocks, in a fixed order.
void launch_add_squares(const NormEntry* entries, int num_entries, const double* parts, double* norms, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU
