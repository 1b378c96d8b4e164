// SPDX-License-Identifier: Apache-2.0
// The loss: checks and launches.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/loss_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {
namespace {

LogitRows logit_rows(const TensorView& logits, std::int64_t tokens) {
  const std::int64_t width = logits.num_elements() / tokens;
  expect(logits, "logits", logits.dtype(), {tokens, width});
  return {.logits = logits.data(), .dtype = logits.dtype(), .rows = tokens, .width = width, .columns = width};
}

}  // namespace

void CudaKernels::cross_entropy(TensorView logits, std::span<const std::int32_t> targets, const double* scale, double* total) {
  const auto tokens = static_cast<std::int64_t>(targets.size());
  const LogitRows rows = logit_rows(logits, tokens);
  expect_targets(targets, rows.width);
  const Temporary losses = temporary(tokens * static_cast<std::int64_t>(sizeof(double)));
  launch_cross_entropy(rows, upload(targets), scale != nullptr ? Gradient::in_place : Gradient::none,
                       scale != nullptr ? *scale : 0.0, losses.as<double>(), device_.shared_bytes_per_block, stream());
  launch_add_losses(losses.as<double>(), tokens, total, stream());
}

double CudaKernels::cross_entropy_forward_backward(TensorView logits, std::span<const std::int32_t> targets, double scale) {
  if (targets.empty()) return 0;
  const Temporary total = temporary(sizeof(double));
  cross_entropy(logits, targets, &scale, total.as<double>());
  return read_double(total.data());
}

void CudaKernels::cross_entropy_deferred(TensorView logits, std::span<const std::int32_t> targets, double scale, double& sum) {
  if (targets.empty()) return;
  const Temporary total = temporary(sizeof(double));
  cross_entropy(logits, targets, &scale, total.as<double>());
  add_later(total.as<double>(), sum);
}

double CudaKernels::cross_entropy_forward(TensorView logits, std::span<const std::int32_t> targets) {
  if (targets.empty()) return 0;
  const Temporary total = temporary(sizeof(double));
  cross_entropy(logits, targets, nullptr, total.as<double>());
  return read_double(total.data());
}

void CudaKernels::cross_entropy_statistics(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                           TensorView statistics) {
  const auto tokens = static_cast<std::int64_t>(targets.size());
  if (tokens == 0) return;
  LogitRows rows = logit_rows(logits, tokens);
  expect(statistics, "statistics", wide(logits.dtype()), {tokens, 3});
  expect_columns(columns, rows.width, targets);
  rows.columns = columns;
  launch_softmax_statistics(rows, upload(targets), statistics.data(), device_.shared_bytes_per_block, stream());
}

void CudaKernels::cross_entropy_gradient(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                         std::span<const std::uint8_t> valid, TensorView logsumexp, double scale) {
  const auto tokens = static_cast<std::int64_t>(targets.size());
  TANDEM_CHECK(valid.size() == targets.size());
  if (tokens == 0) return;
  LogitRows rows = logit_rows(logits, tokens);
  expect_count(logsumexp, "logsumexp", wide(logits.dtype()), tokens);
  expect_columns(columns, rows.width, targets);
  rows.columns = columns;
  launch_softmax_gradient(rows, upload(targets), upload(valid), logsumexp.data(), scale, stream());
}

}  // namespace tandem::TANDEM_GPU
