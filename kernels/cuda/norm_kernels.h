// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/rng.h"
#include "kernels/cuda/gpu.h"
#include "kernels/operand_checks.h"

/// Launchers of norm.cu, dropout.cu and columns.cu. Matrices are [tokens, hidden] of `dtype`, statistics [tokens] of wide(dtype);
/// no tokens or no columns launch nothing.
namespace tandem::TANDEM_GPU {

/// y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + epsilon), both over the columns of a token.
struct NormForward {
  const void* x;
  const void *weight, *bias;
  double epsilon;
  void *y, *mean, *rstd;  ///< mean and rstd [tokens], for the backward pass
};
void launch_layer_norm_forward(const TokenRows& size, const NormForward& norm, StreamHandle stream);

struct NormBackwardInput {
  const void *dy, *x, *weight, *mean, *rstd;
  const void* dresidual;  ///< null: none
  void* dx;
};
void launch_layer_norm_backward_input(const TokenRows& size, const NormBackwardInput& norm, StreamHandle stream);

/// A mask as kernels take it: row r of an operand has the elements from row_ids[r] * row_elements on of the global mask.
struct MaskRows {
  DropoutKey key;
  std::uint32_t threshold = 0;
  double keep_scale = 1;                  ///< 1 / (1 - probability)
  const std::int64_t* row_ids = nullptr;  ///< on the device
  std::int64_t row_elements = 0;
};

/// out = residual + dropout(x), elementwise, the mask's rows being the operand's `rows`, of `per_row` elements each.
struct DropoutCall {
  DType dtype;
  MaskRows mask;
  std::int64_t rows, per_row;
  bool whole_blocks;  ///< each row begins with a whole Philox block: at a multiple of four elements
  const void* x;
  const void* residual;  ///< null: zero
  void* out;             ///< may be x or residual
};
void launch_dropout(const DropoutCall& call, StreamHandle stream);

/// Both: `norm` of what `dropout` gives, in one pass. norm.x is dropout.out. False, and nothing launched, where these sizes or
/// addresses need the two launches.
[[nodiscard]] bool launch_dropout_norm(const DropoutCall& dropout, const TokenRows& size, const NormForward& norm,
                                       StreamHandle stream);

/// Sums over tokens in two steps, through `partial`: room for column_partials() numbers of the wide type.
[[nodiscard]] std::int64_t column_partials(std::int64_t tokens, std::int64_t columns);
/// dweight += sum dy xhat, dbias += sum dy; both of dtype `sums`.
struct NormBackwardWeight {
  const void *dy, *x, *mean, *rstd;
  DType sums;
  void *dweight, *dbias;
};
void launch_layer_norm_backward_weight(const TokenRows& size, const NormBackwardWeight& norm, void* partial, StreamHandle stream);
/// dbias += sum over tokens of dy.
void launch_column_sum(const TokenRows& size, const void* dy, DType sums, void* dbias, void* partial, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU
