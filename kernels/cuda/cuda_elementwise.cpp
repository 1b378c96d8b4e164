// SPDX-License-Identifier: Apache-2.0
// GELU, conversions and vector operations: checks and launches.
#include <cmath>

#include <fmt/format.h>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elementwise_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {
namespace {

bool is_floating(DType dtype) { return is_16bit(dtype) || dtype == DType::f32 || dtype == DType::f64; }

std::string describe(const TensorView& tensor) {
  return fmt::format("{} of {}", to_string(tensor.shape()), name(tensor.dtype()));
}

}  // namespace

void CudaKernels::gelu_forward(TensorView x, TensorView y) {
  TANDEM_CHECK(x.dtype() == y.dtype() && x.num_elements() == y.num_elements());
  const GeluForm form = pitfalls_.on(Pitfall::gelu_with_erf) ? GeluForm::erf : GeluForm::tanh;
  launch_gelu_forward(x.dtype(), form, x.data(), y.data(), x.num_elements(), stream());
}

void CudaKernels::gelu_backward(TensorView dy, TensorView x, TensorView dx) {
  TANDEM_CHECK(dy.dtype() == x.dtype() && dy.num_elements() == x.num_elements());
  TANDEM_CHECK(dx.dtype() == x.dtype() && dx.num_elements() == x.num_elements());
  const GeluForm form = pitfalls_.on(Pitfall::gelu_with_erf) ? GeluForm::erf : GeluForm::tanh;
  launch_gelu_backward(x.dtype(), form, dy.data(), x.data(), dx.data(), x.num_elements(), stream());
}

void CudaKernels::convert(TensorView from, TensorView to) {
  const std::int64_t count = from.num_elements();
  TANDEM_CHECK(to.num_elements() == count && is_floating(from.dtype()) && is_floating(to.dtype()),
               fmt::format("{} does not become {}", describe(from), describe(to)));
  if (from.dtype() != to.dtype()) {
    launch_convert(from.dtype(), from.data(), to.dtype(), to.data(), count, stream());
  } else if (count > 0 && from.data() != to.data()) {
    memory_.copy(from.data(), to.data(), from.size_bytes());
  }
}

double CudaKernels::quantize_fp8(TensorView from, Fp8Format format, double scale, TensorView to) {
  const std::int64_t count = from.num_elements();
  const auto is_narrow = [](DType dtype) { return dtype == DType::f32 || is_16bit(dtype); };
  TANDEM_CHECK(to.num_elements() == count && is_narrow(from.dtype()) && (to.dtype() == DType::f32 || to.dtype() == DType::bf16),
               fmt::format("{} is not quantised to {}", describe(from), describe(to)));
  int exponent = 0;
  TANDEM_CHECK(scale > 0 && std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5 && std::abs(exponent) < 126,
               fmt::format("fp8 scale {} is no power of two that fp32 holds", scale));
  if (count == 0) return 0;
  const Temporary largest = temporary(sizeof(double));
  const Temporary partial = temporary(quantize_partials(count) * static_cast<std::int64_t>(sizeof(float)));
  launch_quantize_fp8(from.dtype(), from.data(), format, scale, to.dtype(), to.data(), count, partial.as<float>(),
                      largest.as<double>(), stream());
  return read_double(largest.data());
}

void CudaKernels::fill(TensorView x, double value) { launch_fill(x.dtype(), x.data(), value, x.num_elements(), stream()); }

void CudaKernels::scale(TensorView x, double factor) { launch_scale(x.dtype(), x.data(), factor, x.num_elements(), stream()); }

void CudaKernels::add(TensorView x, TensorView y) {
  TANDEM_CHECK(x.num_elements() == y.num_elements(), fmt::format("x is {}, y {}", to_string(x.shape()), to_string(y.shape())));
  expect_accumulator(y, "y", x.dtype());
  launch_add(x.dtype(), x.data(), y.dtype(), y.data(), x.num_elements(), stream());
}

}  // namespace tandem::TANDEM_GPU
