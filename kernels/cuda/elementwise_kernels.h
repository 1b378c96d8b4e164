// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/gpu.h"

/// Launchers of elementwise.cu: one pass over memory each, `count` elements (0 launches nothing). Tensors of one dtype unless
/// said.
namespace tandem::TANDEM_GPU {

enum class GeluForm : std::uint8_t { tanh, erf };  ///< erf: Pitfall::gelu_with_erf
void launch_gelu_forward(DType dtype, GeluForm form, const void* x, void* y, std::int64_t count, StreamHandle stream);
/// dx may be dy.
void launch_gelu_backward(DType dtype, GeluForm form, const void* dy, const void* x, void* dx, std::int64_t count,
                          StreamHandle stream);

/// y += x, y of dtype `y_dtype`: x's, or fp32.
void launch_add(DType x_dtype, const void* x, DType y_dtype, void* y, std::int64_t count, StreamHandle stream);
/// out = a + b; out may be one of them.
void launch_sum(DType dtype, const void* a, const void* b, void* out, std::int64_t count, StreamHandle stream);
/// x *= factor
void launch_scale(DType dtype, void* x, double factor, std::int64_t count, StreamHandle stream);
void launch_fill(DType dtype, void* x, double value, std::int64_t count, StreamHandle stream);
/// x[t] += bias. x [tokens, width]
void launch_add_bias(DType dtype, const void* bias, void* x, std::int64_t tokens, std::int64_t width, StreamHandle stream);

/// to <- from rounded once; dtypes differ.
void launch_convert(DType from_dtype, const void* from, DType to_dtype, void* to, std::int64_t count, StreamHandle stream);
/// to <- fp8(scale from) / scale, and the largest |from| into *largest. `partial` is room for quantize_partials(count) floats.
/// from: fp32, bf16, fp16; to: fp32, bf16.
[[nodiscard]] std::int64_t quantize_partials(std::int64_t count);
void launch_quantize_fp8(DType from_dtype, const void* from, Fp8Format format, double scale, DType to_dtype, void* to,
                         std::int64_t count, float* partial, double* largest, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU
