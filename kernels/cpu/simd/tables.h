// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cpu/simd/attention_loops.h"
#include "kernels/cpu/simd/elementwise_loops.h"
#include "kernels/cpu/simd/fp8_loops.h"
#include "kernels/cpu/simd/gemm_loops.h"
#include "kernels/cpu/simd/half_loops.h"
#include "kernels/cpu/simd/norm_loops.h"
#include "kernels/cpu/simd/random_loops.h"
#include "kernels/cpu/simd/row_loops.h"
#include "kernels/cpu/simd/training_loops.h"

namespace tandem::cpu {
namespace {

template <class Real>
constexpr VectorOps<Real> kOps = {
    .embedding_forward = embedding_forward<Real>,
    .embedding_backward = embedding_backward<Real>,
    .layer_norm_forward = layer_norm_forward<Real>,
    .layer_norm_backward_input = layer_norm_backward_input<Real>,
    .layer_norm_backward_weight = layer_norm_backward_weight<Real>,
    .bias_add = bias_add<Real>,
    .bias_gelu = bias_gelu<Real>,
    .column_sum = column_sum<Real>,
    .gelu_forward = gelu_forward<Real>,
    .gelu_backward = gelu_backward<Real>,
    .dropout = dropout<Real>,
    .cross_entropy = cross_entropy<Real>,
    .cross_entropy_gradient = cross_entropy_gradient<Real>,
    .softmax_statistics = softmax_statistics<Real>,
    .softmax_scaled = softmax_scaled<Real>,
    .add_gathered_rows = add_gathered_rows<Real>,
    .scatter_add_rows = scatter_add_rows<Real>,
    .combine_rows = combine_rows<Real>,
    .combine_rows_backward = combine_rows_backward<Real>,
    .adamw = adamw<Real>,
    .adamw_epsilon_inside_root = adamw_epsilon_inside_root<Real>,
    .sgd = sgd<Real>,
    .squared_norm = squared_norm<Real>,
    .fill = fill<Real>,
    .scale = scale<Real>,
    .add = add<Real>,
    .sum = sum<Real>,
    .attention_scratch = attention_scratch<Real>,
    .attention_forward = attention_forward<Real>,
    .attention_backward = attention_backward<Real>,
    .softmax_gradient = softmax_gradient<Real>,
    .attention_decode = attention_decode<Real>,
    .gemm = gemm<Real>,
    .exponential = exponential_all<Real>,
};

/// The table of the instruction set that the including file is compiled for.
constexpr VectorTables kTables = {
    .f32 = kOps<float>,
    .f64 = kOps<double>,
    .bf16 = kHalfOps<Bf16>,
    .f16 = kHalfOps<F16>,
    .quantize_e4m3 = quantize_e4m3,
    .quantize_e5m2 = quantize_e5m2,
};

}  // namespace
}  // namespace tandem::cpu
