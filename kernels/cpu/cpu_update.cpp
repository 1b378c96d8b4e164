// SPDX-License-Identifier: Apache-2.0
// Optimizer steps, conversions, and the vector operations around them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "kernels/cpu/cpu_kernels.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 14;      // elements that a thread takes at once
constexpr std::int64_t kNormBlock = 1 << 14;  // elements whose squares are summed by themselves

bool is_floating(DType dtype) { return is_16bit(dtype) || dtype == DType::f32 || dtype == DType::f64; }

template <class Real>
AdamWConstants<Real> adamw_constants(const AdamWStep& step) {
  const auto n = static_cast<double>(step.step_index);
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
  return c;
}

/// The fp32 number that rounds to the same 16-bit number as `value`: cut off, with the last bit set where something was cut off.
/// Rounding to fp32 first could make a tie of what is none.
float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

}  // namespace

void CpuKernels::adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
                       TensorView stored) {
  const std::int64_t count = parameter.num_elements();
  for (const auto& [tensor, operand] : {std::pair{m, "m"}, {v, "v"}}) expect_count(tensor, operand, parameter.dtype(), count);
  expect_gradient_and_stored(gradient, parameter, stored);
  TANDEM_CHECK(step.step_index >= 1, fmt::format("AdamW step {} (the first is 1)", step.step_index));
  const bool mixed = stored || is_16bit(gradient.dtype());
  const std::int64_t chunk = mixed ? kWidenedElements : kGrain;
  scratch_.reserve(Pieces::bytes(1, kWidenedElements));
  with_real(parameter, [&]<class Real>(Real) {
    const AdamWConstants<Real> c = adamw_constants<Real>(step);
    // sqrt(v) + epsilon against sqrt(v + epsilon): the latter caps the step of rarely updated parameters near 1 / sqrt(epsilon).
    const auto update =
        pitfalls_.on(Pitfall::adam_epsilon_inside_root) ? ops<Real>().adamw_epsilon_inside_root : ops<Real>().adamw;
    pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int thread) {
      for_chunks(begin, end, chunk, [&](std::int64_t first, std::int64_t elements) {
        const Real* g = pieces(thread).read<Real>(gradient, first, elements);
        Real* p = data_of<Real>(parameter) + first;
        update(c, g, p, data_of<Real>(m) + first, data_of<Real>(v) + first, elements);
        if constexpr (std::is_same_v<Real, float>) {
          if (stored) narrow(*parts_.tables, p, stored.dtype(), element(stored, first), elements);
        }
      });
    });
  });
}

void CpuKernels::sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient, TensorView parameter,
                     TensorView stored) {
  const std::int64_t count = parameter.num_elements();
  expect_gradient_and_stored(gradient, parameter, stored);
  const bool mixed = stored || is_16bit(gradient.dtype()) || is_16bit(parameter.dtype());
  const std::int64_t chunk = mixed ? kWidenedElements : kGrain;
  scratch_.reserve(Pieces::bytes(2, kWidenedElements));
  with_arithmetic(parameter, [&]<class Real>(Real) {
    const auto decay = static_cast<Real>(1.0 - learning_rate * weight_decay);
    const auto rate = static_cast<Real>(learning_rate * gradient_scale);
    pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int thread) {
      for_chunks(begin, end, chunk, [&](std::int64_t first, std::int64_t elements) {
        Pieces piece = pieces(thread);
        const Real* g = piece.read<Real>(gradient, first, elements);
        Real* p = piece.update<Real>(parameter, first, elements);
        ops<Real>().sgd(decay, rate, g, p, elements);
        if constexpr (std::is_same_v<Real, float>) {
          if (stored) narrow(*parts_.tables, p, stored.dtype(), element(stored, first), elements);
        }
        piece.store();
      });
    });
  });
}

void CpuKernels::convert(TensorView from, TensorView to) {
  const std::int64_t count = from.num_elements();
  TANDEM_CHECK(to.num_elements() == count && is_floating(from.dtype()) && is_floating(to.dtype()),
               fmt::format("{} of {} does not become {} of {}", to_string(from.shape()), name(from.dtype()),
                           to_string(to.shape()), name(to.dtype())));
  scratch_.reserve(Pieces::bytes(1, kWidenedElements));
  pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int thread) {
    if (from.dtype() == to.dtype()) {
      const auto size = static_cast<std::size_t>(end - begin) * size_bytes(to.dtype());
      std::memmove(element(to, begin), element(from, begin), size);
      return;
    }
    for_chunks(begin, end, kWidenedElements, [&](std::int64_t first, std::int64_t elements) {
      Pieces piece = pieces(thread);
      if (from.dtype() == DType::f64) {
        const double* source = data_of<double>(from) + first;
        float* target = piece.write<float>(to, first, elements);
        const bool narrower = is_16bit(to.dtype());
        for (std::int64_t i = 0; i < elements; ++i)
          target[i] = narrower ? round_to_odd(source[i]) : static_cast<float>(source[i]);
      } else if (to.dtype() == DType::f64) {
        const float* source = piece.read<float>(from, first, elements);
        std::copy_n(source, elements, data_of<double>(to) + first);
      } else if (to.dtype() == DType::f32) {
        widen(*parts_.tables, element(from, first), from.dtype(), data_of<float>(to) + first, elements);
      } else {
        const float* source = piece.read<float>(from, first, elements);
        narrow(*parts_.tables, source, to.dtype(), element(to, first), elements);
      }
      piece.store();
    });
  });
}

double CpuKernels::quantize_fp8(TensorView from, Fp8Format format, double scale, TensorView to) {
  const std::int64_t count = from.num_elements();
  const auto is_narrow = [](DType dtype) { return dtype == DType::f32 || is_16bit(dtype); };
  TANDEM_CHECK(to.num_elements() == count && is_narrow(from.dtype()) && (to.dtype() == DType::f32 || to.dtype() == DType::bf16),
               fmt::format("{} of {} is not quantised to {} of {}", to_string(from.shape()), name(from.dtype()),
                           to_string(to.shape()), name(to.dtype())));
  int exponent = 0;
  TANDEM_CHECK(scale > 0 && std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5 && std::abs(exponent) < 126,
               fmt::format("fp8 scale {} is no power of two that fp32 holds", scale));
  const auto quantize = format == Fp8Format::e4m3 ? parts_.tables->quantize_e4m3 : parts_.tables->quantize_e5m2;
  const auto factor = static_cast<float>(scale), inverse = static_cast<float>(1.0 / scale);
  std::vector<float> largest(static_cast<std::size_t>((count + kGrain - 1) / kGrain), 0.0F);
  scratch_.reserve(Pieces::bytes(2, kWidenedElements));
  pool_.run_pieces(count, kGrain, [&](std::int64_t begin, std::int64_t end, int thread) {
    float& most = largest[static_cast<std::size_t>(begin / kGrain)];
    for_chunks(begin, end, kWidenedElements, [&](std::int64_t first, std::int64_t elements) {
      Pieces piece = pieces(thread);
      const float* source = piece.read<float>(from, first, elements);
      most = std::max(most, quantize(source, factor, inverse, piece.write<float>(to, first, elements), elements));
      piece.store();
    });
  });
  return largest.empty() ? 0.0 : static_cast<double>(*std::max_element(largest.begin(), largest.end()));
}

double CpuKernels::squared_norm(TensorView x) {
  const std::int64_t count = x.num_elements();
  std::vector<double> parts(static_cast<std::size_t>((count + kNormBlock - 1) / kNormBlock));
  pool_.run((count + kNormBlock - 1) / kNormBlock, [&](std::int64_t block, int) {
    const std::int64_t first = block * kNormBlock, elements = std::min(kNormBlock, count - first);
    double& part = parts[static_cast<std::size_t>(block)];
    if (is_16bit(x.dtype())) {
      part = half_ops(x.dtype()).squared_norm(halves(x, first), elements);
    } else {
      with_real(x, [&]<class Real>(Real) { part = ops<Real>().squared_norm(data_of<Real>(x) + first, elements); });
    }
  });
  double total = 0;
  for (const double part : parts) total += part;
  return total;
}

void CpuKernels::fill(TensorView x, double value) {
  if (is_16bit(x.dtype())) {
    const float wide_value = round_to_odd(value);
    std::uint16_t bits = 0;
    narrow(*parts_.tables, &wide_value, x.dtype(), &bits, 1);
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      std::fill(data_of<std::uint16_t>(x) + begin, data_of<std::uint16_t>(x) + end, bits);
    });
    return;
  }
  with_real(x, [&]<class Real>(Real) {
    pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
      ops<Real>().fill(data_of<Real>(x) + begin, static_cast<Real>(value), end - begin);
    });
  });
}

void CpuKernels::scale(TensorView x, double factor) {
  pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    if (is_16bit(x.dtype())) {
      half_ops(x.dtype()).scale(halves(x, begin), static_cast<float>(factor), end - begin);
    } else {
      with_real(x,
                [&]<class Real>(Real) { ops<Real>().scale(data_of<Real>(x) + begin, static_cast<Real>(factor), end - begin); });
    }
  });
}

void CpuKernels::add(TensorView x, TensorView y) {
  TANDEM_CHECK(x.num_elements() == y.num_elements(), fmt::format("x is {}, y {}", to_string(x.shape()), to_string(y.shape())));
  expect_accumulator(y, "y", x.dtype());
  pool_.run_pieces(x.num_elements(), kGrain, [&](std::int64_t begin, std::int64_t end, int) {
    const std::int64_t count = end - begin;
    if (is_16bit(y.dtype())) {
      half_ops(y.dtype()).sum(halves(y, begin), halves(x, begin), halves(y, begin), count);
    } else if (is_16bit(x.dtype())) {
      half_ops(x.dtype()).add_to_single(halves(x, begin), data_of<float>(y) + begin, count);
    } else {
      with_real(x, [&]<class Real>(Real) { ops<Real>().add(data_of<Real>(x) + begin, data_of<Real>(y) + begin, count); });
    }
  });
}

}  // namespace tandem::cpu
