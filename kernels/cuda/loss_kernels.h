// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/gpu.h"

namespace tandem::TANDEM_GPU {

/// Rows of logits in device memory, at any alignment of an element: [rows, width], of which the first `columns` columns count.
struct LogitRows {
  void* logits = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0, width = 0, columns = 0;
};

enum class Gradient : std::uint8_t { none, in_place };

/// losses[row] = logsumexp - logit of the target in double, 0 where the target is kIgnoredTarget; with Gradient::in_place the
/// logits become scale * (softmax - onehot), or 0 there. columns is width. A row is read once where a block's shared memory
/// (`shared_limit` bytes) holds it, else twice; it is written once. What a row gives depends neither on its address nor on other
/// rows.
void launch_cross_entropy(const LogitRows& rows, const std::int32_t* targets, Gradient gradient, double scale, double* losses,
                          int shared_limit, StreamHandle stream);
/// total[0] = the sum of losses[0 .. rows): runs of ceil(rows / threads) rows in order, then the runs in a fixed order: another
/// order than row after row, so equal to it but for the rounding of sums of doubles.
void launch_add_losses(const double* losses, std::int64_t rows, double* total, StreamHandle stream);

/// statistics[row] = {largest logit, sum of exp(logit - largest), logit of the target or 0 where that is negative}; {-inf, 0,
/// ...} of no columns, and of columns that are all -inf.
void launch_softmax_statistics(const LogitRows& rows, const std::int32_t* targets, void* statistics, int shared_limit,
                               StreamHandle stream);
/// logits = scale * (exp(logit - logsumexp[row]) - onehot) in the first `columns` columns of rows with valid[row] != 0, else 0.
void launch_softmax_gradient(const LogitRows& rows, const std::int32_t* targets, const std::uint8_t* valid, const void* logsumexp,
                             double scale, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU
