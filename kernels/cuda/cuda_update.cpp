// SPDX-License-Identifier: Apache-2.0
// Optimizer steps and norms: checks, tables of tensors, launches.
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/update_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {
namespace {

void check_adamw(const AdamWTensors& t) {
  const std::int64_t count = t.parameter.num_elements();
  TANDEM_CHECK(t.parameter.dtype() == DType::f32 || t.parameter.dtype() == DType::f64,
               fmt::format("AdamW updates fp32 and fp64, not {}", name(t.parameter.dtype())));
  expect_count(t.m, "m", t.parameter.dtype(), count);
  expect_count(t.v, "v", t.parameter.dtype(), count);
  expect_gradient_and_stored(t.gradient, t.parameter, t.stored);
  TANDEM_CHECK(t.step.step_index >= 1, fmt::format("AdamW step {} (the first is 1)", t.step.step_index));
}

AdamWEntry entry_of(const AdamWTensors& t, std::int64_t first_block) {
  const AdamWStep& step = t.step;
  const auto n = static_cast<double>(step.step_index);
  return {.gradient = t.gradient.data(),
          .parameter = t.parameter.data(),
          .m = t.m.data(),
          .v = t.v.data(),
          .stored = t.stored.data(),
          .count = t.parameter.num_elements(),
          .first_block = first_block,
          .gradient_dtype = t.gradient.dtype(),
          .stored_dtype = t.stored.dtype(),
          .gradient_scale = step.gradient_scale,
          .beta1 = step.beta1,
          .one_minus_beta1 = 1.0 - step.beta1,
          .beta2 = step.beta2,
          .one_minus_beta2 = 1.0 - step.beta2,
          .decay = 1.0 - step.learning_rate * step.weight_decay,
          .rate = step.learning_rate / (1.0 - std::pow(step.beta1, n)),
          .second_correction = 1.0 / (1.0 - std::pow(step.beta2, n)),
          .epsilon = step.epsilon};
}

bool is_floating(DType dtype) { return is_16bit(dtype) || dtype == DType::f32 || dtype == DType::f64; }

}  // namespace

void CudaKernels::adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
                        TensorView stored) {
  const AdamWTensors one = {step, gradient, parameter, m, v, stored};
  adamw_all({&one, 1});
}

void CudaKernels::adamw_all(std::span<const AdamWTensors> tensors) {
  for (const AdamWTensors& t : tensors) check_adamw(t);
  const Epsilon epsilon = pitfalls_.on(Pitfall::adam_epsilon_inside_root) ? Epsilon::inside_root : Epsilon::outside_root;
  for (const DType dtype : {DType::f32, DType::f64}) {
    std::vector<AdamWEntry> entries;
    std::int64_t blocks = 0;
    for (const AdamWTensors& t : tensors) {
      if (t.parameter.dtype() != dtype || t.parameter.num_elements() == 0) continue;
      entries.push_back(entry_of(t, blocks));
      blocks += blocks_of(t.parameter.num_elements(), kUpdateBlock);
    }
    if (entries.empty()) continue;
    launch_adamw(dtype, upload(std::span<const AdamWEntry>(entries)), static_cast<int>(entries.size()), blocks, epsilon,
                 stream());
  }
}

void CudaKernels::sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient, TensorView parameter,
                      TensorView stored) {
  expect_gradient_and_stored(gradient, parameter, stored);
  if (parameter.num_elements() == 0) return;
  launch_sgd(parameter.dtype(),
             {.gradient = gradient.data(),
              .parameter = parameter.data(),
              .stored = stored.data(),
              .count = parameter.num_elements(),
              .gradient_dtype = gradient.dtype(),
              .stored_dtype = stored.dtype(),
              .decay = 1.0 - learning_rate * weight_decay,
              .rate = learning_rate * gradient_scale},
             stream());
}

double CudaKernels::squared_norm(TensorView x) {
  double norm = 0;
  squared_norms({&x, 1}, {&norm, 1});
  return norm;
}

void CudaKernels::squared_norms(std::span<const TensorView> tensors, std::span<double> norms) {
  TANDEM_CHECK(tensors.size() == norms.size(), fmt::format("{} tensors, {} norms", tensors.size(), norms.size()));
  std::vector<NormEntry> entries;
  std::int64_t blocks = 0;
  for (const TensorView& x : tensors) {
    TANDEM_CHECK(is_floating(x.dtype()), fmt::format("the norm of {}", name(x.dtype())));
    entries.push_back({.data = x.data(), .count = x.num_elements(), .first_block = blocks, .dtype = x.dtype()});
    blocks += blocks_of(x.num_elements(), kNormBlock);
  }
  if (blocks == 0) {
    for (double& norm : norms) norm = 0;
    return;
  }
  const auto* const table = upload(std::span<const NormEntry>(entries));
  const auto count = static_cast<int>(entries.size());
  const Temporary parts = temporary(blocks * static_cast<std::int64_t>(sizeof(double)));
  const Temporary sums = temporary(static_cast<std::int64_t>(norms.size_bytes()));
  launch_squares(table, count, blocks, parts.as<double>(), stream());
  launch_add_squares(table, count, parts.as<double>(), sums.as<double>(), stream());
  memory_.read(sums.data(), norms.data(), static_cast<std::int64_t>(norms.size_bytes()));
}

}  // namespace tandem::TANDEM_GPU
