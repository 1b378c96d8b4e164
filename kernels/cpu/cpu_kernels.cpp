// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

namespace tandem::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;      // elements of an elementwise operation that a thread takes at once
constexpr std::int64_t kNormBlock = 1 << 14;  // elements whose squares are summed by themselves

void expect_tokens(std::span<const std::int32_t> ids, std::int64_t extent, std::string_view what) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    TANDEM_CHECK(ids[i] >= 0 && ids[i] < extent, fmt::format("{} {} at {} is outside [0, {})", what, ids[i], i, extent));
  }
}

}  // namespace

void expect(const TensorView& tensor, std::string_view operand, DType dtype, std::initializer_list<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  const bool fits = tensor.dtype() == dtype && tensor.num_dims() > 0 && tensor.num_elements() == count &&
                    (count == 0 || tensor.dim(tensor.num_dims() - 1) == *(shape.end() - 1));
  TANDEM_CHECK(fits || (count == 0 && tensor.num_elements() == 0),
               fmt::format("{} is {} of {}, expected {} of {}", operand, to_string(tensor.shape()), name(tensor.dtype()),
                           to_string(Shape(shape)), name(dtype)));
}

std::int64_t rows_of(const TensorView& tensor, std::string_view operand, std::int64_t last) {
  if (tensor.num_elements() == 0) return 0;
  TANDEM_CHECK(tensor.num_dims() > 0 && tensor.dim(tensor.num_dims() - 1) == last,
               fmt::format("{} is {}, its last extent should be {}", operand, to_string(tensor.shape()), last));
  return tensor.num_elements() / last;
}

MaskKey mask_key(const DropoutSpec& dropout) {
  const DropoutKey& key = dropout.key;
  return {static_cast<std::uint32_t>(key.seed), static_cast<std::uint32_t>(key.seed >> 32), key.step,
          key.layer * 8 + static_cast<std::uint32_t>(key.site), dropout_threshold(dropout.probability)};
}

CpuKernels::CpuKernels(CpuParts parts, int threads, const PitfallSet& pitfalls)
    : parts_(std::move(parts)), pool_(threads), pitfalls_(pitfalls), scratch_(threads) {}

void CpuKernels::embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                                   TensorView wpe, TensorView out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  const std::int64_t hidden = wte.dim(1);
  TANDEM_CHECK(positions.size() == ids.size());
  expect(wpe, "wpe", wte.dtype(), {wpe.dim(0), hidden});
  expect(out, "out", wte.dtype(), {tokens, hidden});
  expect_tokens(ids, wte.dim(0), "token id");
  expect_tokens(positions, wpe.dim(0), "position");
  with_real(wte, [&]<class Real>(Real) {
    pool_.run_pieces(tokens, std::max<std::int64_t>(1, kGrain / hidden), [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().embedding_forward(ids.data() + begin, positions.data() + begin, data_of<Real>(wte), data_of<Real>(wpe),
                                    data_of<Real>(out) + begin * hidden, end - begin, hidden);
    });
  });
}

void CpuKernels::embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                                    TensorView dwte, TensorView dwpe) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  const std::int64_t hidden = dwte.dim(1);
  TANDEM_CHECK(positions.size() == ids.size());
  expect(dwpe, "dwpe", dwte.dtype(), {dwpe.dim(0), hidden});
  expect(dout, "dout", dwte.dtype(), {tokens, hidden});
  expect_tokens(ids, dwte.dim(0), "token id");
  expect_tokens(positions, dwpe.dim(0), "position");
  // Threads share the columns: each sees all tokens, in order, whatever the number of threads.
  constexpr std::int64_t kColumns = 128;
  with_real(dwte, [&]<class Real>(Real) {
    pool_.run_pieces(hidden, kColumns, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().embedding_backward(ids.data(), positions.data(), data_of<Real>(dout), data_of<Real>(dwte), data_of<Real>(dwpe),
                                     tokens, hidden, begin, end);
    });
  });
}

void CpuKernels::adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v) {
  const std::int64_t count = parameter.num_elements();
  for (const auto& [tensor, operand] : {std::pair{gradient, "gradient"}, {m, "m"}, {v, "v"}}) {
    TANDEM_CHECK(tensor.dtype() == parameter.dtype() && tensor.num_elements() == count,
                 fmt::format("{} is {}, the parameter {}", operand, to_string(tensor.shape()), to_string(parameter.shape())));
  }
  TANDEM_CHECK(step.step_index >= 1, fmt::format("AdamW step {} (the first is 1)", step.step_index));
  const auto n = static_cast<double>(step.step_index);
  with_real(parameter, [&]<class Real>(Real) {
    AdamWConstants<Real> c;
    c.gradient_scale = static_cast<Real>(step.gradient_scale);
    c.beta1 = static_cast<Real>(step.beta1);
    c.one_minus_beta1 = static_cast<Real>(1.0 - step.beta1);
    c.beta2 = static_cast<Real>(step.beta2);
    c.one_minus_beta2 = static_cast<Real>(1.0 - step.beta2);
    c.decay = static_cast<Real>(1.0 - step.learning_rate * step.weight_decay);
    c.rate = static_cast<Real>(step.learning_rate / (1.0 - std::pow(step.beta1, n)));
    c.second_correction = static_cast<Real>(1.0 / (1.0 - std::pow(step.beta2, n)));
    c.epsilon = static_cast<Real>(step.epsilon);
    // sqrt(v) + epsilon against sqrt(v + epsilon): the latter caps the step of rarely updated parameters near 1 / sqrt(epsilon).
    const auto update =
        pitfalls_.on(Pitfall::adam_epsilon_inside_root) ? ops<Real>().adamw_epsilon_inside_root : ops<Real>().adamw;
    pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      update(c, data_of<Real>(gradient) + begin, data_of<Real>(parameter) + begin, data_of<Real>(m) + begin,
             data_of<Real>(v) + begin, end - begin);
    });
  });
}

void CpuKernels::sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient,
                     TensorView parameter) {
  const std::int64_t count = parameter.num_elements();
  TANDEM_CHECK(gradient.dtype() == parameter.dtype() && gradient.num_elements() == count);
  with_real(parameter, [&]<class Real>(Real) {
    const auto decay = static_cast<Real>(1.0 - learning_rate * weight_decay);
    const auto rate = static_cast<Real>(learning_rate * gradient_scale);
    pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().sgd(decay, rate, data_of<Real>(gradient) + begin, data_of<Real>(parameter) + begin, end - begin);
    });
  });
}

double CpuKernels::squared_norm(TensorView x) {
  const std::int64_t count = x.num_elements();
  std::vector<double> parts(static_cast<std::size_t>((count + kNormBlock - 1) / kNormBlock));
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(count, kNormBlock, [&](std::int64_t begin, std::int64_t end, int) {
      parts[static_cast<std::size_t>(begin / kNormBlock)] = ops<Real>().squared_norm(data_of<Real>(x) + begin, end - begin);
    });
  });
  double total = 0;
  for (const double part : parts) total += part;
  return total;
}

void CpuKernels::fill(TensorView x, double value) {
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().fill(data_of<Real>(x) + begin, static_cast<Real>(value), end - begin);
    });
  });
}

void CpuKernels::scale(TensorView x, double factor) {
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().scale(data_of<Real>(x) + begin, static_cast<Real>(factor), end - begin);
    });
  });
}

void CpuKernels::add(TensorView x, TensorView y) {
  TANDEM_CHECK(x.dtype() == y.dtype() && x.num_elements() == y.num_elements(),
               fmt::format("x is {}, y {}", to_string(x.shape()), to_string(y.shape())));
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().add(data_of<Real>(x) + begin, data_of<Real>(y) + begin, end - begin);
    });
  });
}

}  // namespace tandem::cpu
