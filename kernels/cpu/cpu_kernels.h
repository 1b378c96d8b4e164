// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/attention_call.h"
#include "kernels/common_kernels.h"
#include "kernels/cpu/cpu_products.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/simd/vector_ops.h"
#include "kernels/cpu/storage.h"
#include "kernels/cpu/worker_pool.h"
#include "kernels/operand_checks.h"

namespace tandem::cpu {

/// What the factory found; all pointers set.
struct CpuParts {
  const VectorTables* tables = nullptr;
  std::unique_ptr<MatrixLibrary> single_library;
  std::unique_ptr<MatrixLibrary> double_library;
  bool bf16_products = false;   ///< bf16 operands go to single_library as they are, else converted to fp32
  DType products = DType::f32;  ///< CpuKernelsOptions::products
  KernelsInfo info;
};

/// Kernels on the CPU: checks shapes, deals the work to threads in pieces that depend on shapes alone, and calls the loops of the
/// instruction set found and the matrix library. kernels.h states each operation.
class CpuKernels final : public CommonKernels {
 public:
  CpuKernels(CpuParts parts, int threads, const PitfallSet& pitfalls);

  [[nodiscard]] KernelsInfo info() const override { return parts_.info; }

  void embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                         TensorView wpe, TensorView out) override;
  void embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                          TensorView dwte, TensorView dwpe) override;

  void layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                          TensorView rstd) override;
  void layer_norm_backward_input(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                 TensorView dresidual, TensorView dx) override;
  void layer_norm_backward_weight(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                                  TensorView dbias) override;

  void attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                        TensorView value_cache, TensorView out) override;

  void gelu_forward(TensorView x, TensorView y) override;
  void gelu_backward(TensorView dy, TensorView x, TensorView dx) override;

  void dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) override;
  void dropout_backward(const DropoutSpec& dropout, TensorView dout, TensorView dx) override;

  double cross_entropy_forward_backward(TensorView logits, std::span<const std::int32_t> targets, double scale) override;
  double cross_entropy_forward(TensorView logits, std::span<const std::int32_t> targets) override;
  void cross_entropy_statistics(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                TensorView statistics) override;
  void cross_entropy_gradient(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                              std::span<const std::uint8_t> valid, TensorView logsumexp, double scale) override;

  void gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) override;
  void add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) override;
  void scatter_add_rows(std::span<const std::int32_t> ids, TensorView x, TensorView table) override;
  void combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) override;
  void combine_rows_backward(std::span<const std::int32_t> slots, TensorView gates, TensorView dout, TensorView y,
                             TensorView dgates, TensorView dy) override;

  void add_bias(TensorView bias, TensorView x) override;
  void bias_backward(TensorView dy, TensorView dbias) override;

  void adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
             TensorView stored) override;
  void sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient, TensorView parameter,
           TensorView stored) override;
  void convert(TensorView from, TensorView to) override;
  double quantize_fp8(TensorView from, Fp8Format format, double scale, TensorView to) override;
  double squared_norm(TensorView x) override;

  void fill(TensorView x, double value) override;
  void scale(TensorView x, double factor) override;
  void add(TensorView x, TensorView y) override;

 private:
  template <class Real>
  [[nodiscard]] const VectorOps<Real>& ops() const;
  template <class Real>
  [[nodiscard]] const MatrixLibrary& library() const;

  /// The product, block by block.
  void multiply(const ProductCall& call) override;
  template <class Real>
  void multiply_plain(const ProductCall& call);

  [[nodiscard]] Pieces pieces(int thread) const { return {*parts_.tables, scratch_, thread}; }
  /// body(pieces, first, count) for chunks of [0, elements), none across a multiple of `grain`: of kWidenedElements where a
  /// tensor of this dtype is widened, else of `grain`. Up to four pieces of a chunk fit the scratch.
  template <class Body>
  void for_each_chunk(DType dtype, std::int64_t elements, std::int64_t grain, Body body);
  [[nodiscard]] const HalfOps& half_ops(DType dtype) const { return cpu::half_ops(*parts_.tables, dtype); }
  /// table[ids[t]] += x[t] in order of t, x 16 bits wide; negative ids are left out.
  void add_widened_rows(std::span<const std::int32_t> ids, const TensorView& x, const TensorView& table, std::int64_t width);

  void apply_dropout(const DropoutSpec& dropout, const TensorView& x, const TensorView& residual, const TensorView& out);
  void attention(const AttentionCall& call, const DropoutSpec& dropout) override;
  template <class Real>
  void attention_head(const AttentionCall& call, std::int64_t item, const AttentionHead<Real>& head);
  void decode_widened(int heads, std::int64_t head_size, std::int64_t length, const TensorView& qkv, const TensorView& key_cache,
                      const TensorView& value_cache, const TensorView& out);
  double cross_entropy(TensorView logits, std::span<const std::int32_t> targets, const double* scale);

  CpuParts parts_;
  WorkerPool pool_;
  ThreadScratch scratch_;
};

template <>
inline const VectorOps<float>& CpuKernels::ops<float>() const {
  return parts_.tables->f32;
}
template <>
inline const VectorOps<double>& CpuKernels::ops<double>() const {
  return parts_.tables->f64;
}
template <>
inline const MatrixLibrary& CpuKernels::library<float>() const {
  return *parts_.single_library;
}
template <>
inline const MatrixLibrary& CpuKernels::library<double>() const {
  return *parts_.double_library;
}

/// Calls f(Real{}) with the type of the tensor's elements; throws ContractError where that is not fp32 or fp64.
template <class F>
void with_real(const TensorView& tensor, F f) {
  if (tensor.dtype() == DType::f32) {
    f(float{});
  } else {
    TANDEM_CHECK(tensor.dtype() == DType::f64, "CPU kernels compute in fp32 and fp64");
    f(double{});
  }
}

/// The same with the type that kernels compute in: float for 16 bits too.
template <class F>
void with_arithmetic(const TensorView& tensor, F f) {
  if (is_16bit(tensor.dtype())) {
    f(float{});
  } else {
    with_real(tensor, f);
  }
}

template <class Body>
void CpuKernels::for_each_chunk(DType dtype, std::int64_t elements, std::int64_t grain, Body body) {
  const std::int64_t step = chunk_items(dtype, grain, 1);
  if (is_16bit(dtype)) scratch_.reserve(Pieces::bytes(4, step));
  pool_.run_pieces(elements, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
    for_chunks(begin, end, step, [&](std::int64_t first, std::int64_t count) { body(pieces(thread), first, count); });
  });
}

template <class Real>
[[nodiscard]] Real* data_of(const TensorView& tensor) {
  return static_cast<Real*>(tensor.data());
}

/// The mask of a dropout as plain numbers.
[[nodiscard]] MaskKey mask_key(const DropoutSpec& dropout);

}  // namespace tandem::cpu
