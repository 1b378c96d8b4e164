// SPDX-License-Identifier: Apache-2.0
// Layer norm, dropout and sums over tokens: checks and launches.
#include <fmt/format.h>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elementwise_kernels.h"
#include "kernels/cuda/norm_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {
namespace {

NormForward forward_of(const TensorView& x, const TensorView& weight, const TensorView& bias, double epsilon, const TensorView& y,
                       const TensorView& mean, const TensorView& rstd, const PitfallSet& pitfalls) {
  // Another framework's default: shows only where the variance of a row is small.
  const double used_epsilon = pitfalls.on(Pitfall::layer_norm_small_epsilon) ? 1e-6 : epsilon;
  return {x.data(), weight.data(), bias.data(), used_epsilon, y.data(), mean.data(), rstd.data()};
}

void check_dropout(const DropoutSpec& dropout, const TensorView& x, const TensorView& residual, const TensorView& out) {
  const std::int64_t count = x.num_elements();
  TANDEM_CHECK(out.dtype() == x.dtype() && out.num_elements() == count);
  TANDEM_CHECK(!residual || (residual.dtype() == x.dtype() && residual.num_elements() == count));
  if (count == 0 || dropout.probability <= 0) return;
  const auto rows = static_cast<std::int64_t>(dropout.row_ids.size());
  TANDEM_CHECK(rows > 0 && count % rows == 0, fmt::format("{} elements in {} rows", count, rows));
  TANDEM_CHECK(count / rows <= dropout.row_elements,
               fmt::format("{} of {} mask elements per row", count / rows, dropout.row_elements));
}

/// Without a mask (probability 0) the operand is one row and mask.row_ids is null.
DropoutCall dropout_call(const DropoutSpec& dropout, const MaskRows& mask, const TensorView& x, const TensorView& residual,
                         const TensorView& out) {
  const bool masked = mask.row_ids != nullptr;
  bool whole_blocks = true;
  for (const std::int64_t id : dropout.row_ids) whole_blocks = whole_blocks && (!masked || id * dropout.row_elements % 4 == 0);
  const std::int64_t rows = masked ? static_cast<std::int64_t>(dropout.row_ids.size()) : 1;
  return {x.dtype(), mask, rows, x.num_elements() / rows, whole_blocks, x.data(), residual.data(), out.data()};
}

MaskRows mask_rows(const DropoutSpec& dropout, const std::int64_t* row_ids) {
  return {dropout.key, dropout_threshold(dropout.probability), 1.0 / (1.0 - dropout.probability), row_ids, dropout.row_elements};
}

}  // namespace

void CudaKernels::layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y,
                                     TensorView mean, TensorView rstd) {
  const TokenRows size = check_layer_norm(x, weight, bias, y, mean, rstd);
  launch_layer_norm_forward(size, forward_of(x, weight, bias, epsilon, y, mean, rstd, pitfalls_), stream());
}

void CudaKernels::layer_norm_backward_input(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                            TensorView dresidual, TensorView dx) {
  const TokenRows size = check_layer_norm_input(dy, x, weight, mean, rstd, dresidual, dx);
  launch_layer_norm_backward_input(
      size, {dy.data(), x.data(), weight.data(), mean.data(), rstd.data(), dresidual.data(), dx.data()}, stream());
}

void CudaKernels::layer_norm_backward_weight(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                                             TensorView dbias) {
  const TokenRows size = check_layer_norm_weight(dy, x, mean, rstd, dweight, dbias);
  if (size.tokens == 0) return;
  const Temporary partial =
      temporary(column_partials(size.tokens, size.width) * static_cast<std::int64_t>(size_bytes(wide(size.dtype))));
  launch_layer_norm_backward_weight(
      size, {dy.data(), x.data(), mean.data(), rstd.data(), dweight.dtype(), dweight.data(), dbias.data()}, partial.data(),
      stream());
}

void CudaKernels::dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) {
  check_dropout(dropout, x, residual, out);
  const std::int64_t count = x.num_elements();
  if (count == 0) return;
  if (dropout.probability > 0) {
    launch_dropout(dropout_call(dropout, mask_rows(dropout, upload(dropout.row_ids)), x, residual, out), stream());
  } else if (residual) {
    launch_sum(x.dtype(), x.data(), residual.data(), out.data(), count, stream());
  } else if (x.data() != out.data()) {
    memory_.copy(x.data(), out.data(), x.size_bytes());
  }
}

void CudaKernels::dropout_backward(const DropoutSpec& dropout, TensorView dout, TensorView dx) {
  dropout_residual_forward(dropout, dout, {}, dx);
}

void CudaKernels::dropout_residual_norm_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out,
                                                TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                                                TensorView rstd) {
  check_dropout(dropout, x, residual, out);
  const TokenRows size = check_layer_norm(out, weight, bias, y, mean, rstd);
  TANDEM_CHECK(size.tokens == 0 || x.dtype() == size.dtype);
  if (size.tokens == 0) return;
  const bool masked = dropout.probability > 0;
  const MaskRows mask = masked ? mask_rows(dropout, upload(dropout.row_ids)) : MaskRows{};
  const DropoutCall call = dropout_call(dropout, mask, x, residual, out);
  const NormForward norm = forward_of(out, weight, bias, epsilon, y, mean, rstd, pitfalls_);
  if (call.per_row % size.width == 0 && launch_dropout_norm(call, size, norm, stream())) return;
  dropout_residual_forward(dropout, x, residual, out);
  launch_layer_norm_forward(size, norm, stream());
}

void CudaKernels::add_bias(TensorView bias, TensorView x) {
  const std::int64_t width = bias.num_elements(), tokens = rows_of(x, "x", width);
  if (tokens == 0) return;
  expect(x, "x", bias.dtype(), {tokens, width});
  launch_add_bias(x.dtype(), bias.data(), x.data(), tokens, width, stream());
}

void CudaKernels::bias_backward(TensorView dy, TensorView dbias) {
  const std::int64_t width = dbias.num_elements(), tokens = rows_of(dy, "dy", width);
  if (tokens == 0) return;
  expect_accumulator(dbias, "dbias", dy.dtype());
  const Temporary partial = temporary(column_partials(tokens, width) * static_cast<std::int64_t>(size_bytes(wide(dy.dtype()))));
  launch_column_sum({dy.dtype(), tokens, width}, dy.data(), dbias.dtype(), dbias.data(), partial.data(), stream());
}

}  // namespace tandem::TANDEM_GPU
