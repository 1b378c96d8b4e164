// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>

#include "core/pitfall.h"
#include "kernels/attention_call.h"
#include "kernels/kernels.h"

namespace tandem {

/// C [m, n] = op(A) op(B), or C += where `accumulate`. Row-major; lda, ldb, ldc are elements from row to row of A, B and C as
/// stored: op(A) is [m, k], stored so, or as [k, m] where transpose_a.
struct MatrixProduct {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;
  friend auto operator<=>(const MatrixProduct&, const MatrixProduct&) = default;
};

/// A product of tensors, and what happens to its result before it is stored.
struct ProductCall {
  MatrixProduct shape;
  TensorView a, b, c;
  TensorView bias;  ///< added to every row of c; may be empty
  TensorView gelu;  ///< becomes gelu(c); may be empty
};

/// What of Kernels is the same for every device: the checks of linear layers, heads and attention, and of which one product or
/// one tile of attention each of them is.
class CommonKernels : public Kernels {
 public:
  void linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) final;
  void linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) final;
  void linear_backward_input(TensorView dy, TensorView weight, TensorView dx) final;
  void linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) final;

  void head_forward(TensorView x, TensorView embedding, TensorView logits) final;
  void head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) final;
  void head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) final;

  void attention_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                         TensorView logsumexp) final;
  void attention_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                          TensorView out, TensorView logsumexp, TensorView dqkv) final;
  void attention_segment_forward(const AttentionSegment& segment, const DropoutSpec& dropout, const StridedRows& query,
                                 const StridedRows& key, const StridedRows& value, TensorView out, TensorView logsumexp) final;
  void attention_segment_backward(const AttentionSegment& segment, const DropoutSpec& dropout, TensorView dout,
                                  const StridedRows& query, const StridedRows& key, const StridedRows& value, TensorView out,
                                  TensorView logsumexp, const StridedRows& dquery, const StridedRows& dkey,
                                  const StridedRows& dvalue) final;
  void attention_materialized_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                                      TensorView probabilities) final;
  void attention_materialized_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                                       TensorView probabilities, TensorView dqkv) final;

 protected:
  explicit CommonKernels(const PitfallSet& pitfalls) : pitfalls_(pitfalls) {}

  /// Of checked shapes, not empty; dtypes are this call's to look at.
  virtual void multiply(const ProductCall& call) = 0;
  /// Not checked yet (check_attention()).
  virtual void attention(const AttentionCall& call, const DropoutSpec& dropout) = 0;

  PitfallSet pitfalls_;
};

}  // namespace tandem
