// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tandem::cpu {

/// A dropout mask as plain numbers (core/rng.h, DropoutKey): element e is kept where word e % 4 of the Philox block e / 4 is at
/// least `threshold`.
struct MaskKey {
  std::uint32_t seed_low, seed_high, step, layer_site, threshold;
};

/// One (row, head) of attention of a run of queries on a run of keys. Element (token, channel) of q lies at
/// [token * q_stride + channel], of k, v, dq, dk, dv likewise, of out and dout at [token * out_stride + channel]; logsumexp is
/// [queries]. Query i is at position query_begin + i, key j at key_begin + j.
template <class Real>
struct AttentionHead {
  std::int64_t queries, keys, query_begin, key_begin, head_size;
  std::int64_t q_stride, k_stride, v_stride, out_stride;
  const std::int32_t* document_starts;  ///< [queries] positions, or null: all zero
  const Real *q, *k, *v;
  Real *out, *logsumexp;  ///< written by forward, read by backward
  /// false: these are all keys, and results are overwritten. true: forward merges them into out and logsumexp of earlier keys,
  /// backward adds to dq, dk, dv.
  bool accumulate;
  Real scale;                        ///< 1 / sqrt(head_size)
  const MaskKey* mask;               ///< null: no dropout
  std::uint64_t mask_first_element;  ///< of query 0 and key 0
  std::int64_t mask_row_elements;    ///< from one query to the next
  Real keep_scale;                   ///< 1 / (1 - probability)
  const Real* dout;                  ///< backward only, as dq, dk, dv
  Real *dq, *dk, *dv;
  std::int64_t dq_stride, dk_stride, dv_stride;
  Real* scratch;  ///< attention_scratch() elements, 64-byte aligned
};

/// Constants of one AdamW step. p <- p * decay - rate * m / (sqrt(v * second_correction) + epsilon).
template <class Real>
struct AdamWConstants {
  Real gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, rate, second_correction, epsilon;
};

/// The loops of all operations, on a part of their work, for one instruction set: kernels.h has the equations. All
/// single-threaded and without allocation; pointers need only the alignment of Real. A range of columns [c0, c1) or of elements
/// lets the caller deal the work to threads such that no sum depends on how many there are.
template <class Real>
struct VectorOps {
  using Index = std::int64_t;

  void (*embedding_forward)(const std::int32_t* ids, const std::int32_t* positions, const Real* wte, const Real* wpe, Real* out,
                            Index tokens, Index hidden);
  void (*embedding_backward)(const std::int32_t* ids, const std::int32_t* positions, const Real* dout, Real* dwte, Real* dwpe,
                             Index tokens, Index hidden, Index c0, Index c1);

  void (*layer_norm_forward)(const Real* x, const Real* weight, const Real* bias, Real epsilon, Index tokens, Index hidden,
                             Real* y, Real* mean, Real* rstd);
  void (*layer_norm_backward_input)(const Real* dy, const Real* x, const Real* weight, const Real* mean, const Real* rstd,
                                    const Real* dresidual, Index tokens, Index hidden, Real* dx);
  void (*layer_norm_backward_weight)(const Real* dy, const Real* x, const Real* mean, const Real* rstd, Index tokens,
                                     Index hidden, Index c0, Index c1, Real* dweight, Real* dbias);

  /// y[r, c] += bias[c]; y has `stride` elements from row to row.
  void (*bias_add)(Real* y, Index stride, const Real* bias, Index rows, Index columns);
  /// y_pre += bias, y = gelu(y_pre).
  void (*bias_gelu)(Real* y_pre, Real* y, Index stride, const Real* bias, Index rows, Index columns);
  /// sum[c] += sum over rows of x[row, c], for c in [c0, c1).
  void (*column_sum)(const Real* x, Index rows, Index stride, Index c0, Index c1, Real* sum);

  void (*gelu_forward)(const Real* x, Real* y, Index count);
  void (*gelu_backward)(const Real* dy, const Real* x, Real* dx, Index count);
  /// out = residual (may be null) + kept(x) * keep_scale, the mask starting at global element `first`.
  void (*dropout)(const MaskKey& mask, std::uint64_t first, Real keep_scale, const Real* x, const Real* residual, Real* out,
                  Index count);

  /// Loss of one row: logsumexp - logits[target].
  double (*cross_entropy)(const Real* logits, Index vocabulary, std::int32_t target);
  /// The same, and logits become scale * (softmax - onehot).
  double (*cross_entropy_gradient)(Real* logits, Index vocabulary, std::int32_t target, Real scale);
  /// statistics[0] = largest logit, statistics[1] = sum of e^(logit - largest); -infinity and 0 of none.
  void (*softmax_statistics)(const Real* logits, Index columns, Real* statistics);
  /// logits = scale * e^(logits - logsumexp).
  void (*softmax_scaled)(Real* logits, Index columns, Real logsumexp, Real scale);

  /// Of each of the ids, negative ones left out, that row of the table.
  void (*add_gathered_rows)(const std::int32_t* ids, const Real* table, Real* out, Index tokens, Index width);
  /// table[ids[t]] += x[t] in the columns [c0, c1).
  void (*scatter_add_rows)(const std::int32_t* ids, const Real* x, Real* table, Index tokens, Index width, Index c0, Index c1);
  /// out[t] = sum over choices k of gates[t, k] * y[slots[t, k]].
  void (*combine_rows)(const std::int32_t* slots, const Real* gates, const Real* y, Real* out, Index tokens, Index choices,
                       Index width);
  void (*combine_rows_backward)(const std::int32_t* slots, const Real* gates, const Real* dout, const Real* y, Real* dgates,
                                Real* dy, Index tokens, Index choices, Index width);

  void (*adamw)(const AdamWConstants<Real>& c, const Real* gradient, Real* parameter, Real* m, Real* v, Index count);
  /// The same with epsilon inside the root: Pitfall::adam_epsilon_inside_root.
  void (*adamw_epsilon_inside_root)(const AdamWConstants<Real>& c, const Real* gradient, Real* parameter, Real* m, Real* v,
                                    Index count);
  void (*sgd)(Real decay, Real rate, const Real* gradient, Real* parameter, Index count);
  double (*squared_norm)(const Real* x, Index count);
  void (*fill)(Real* x, Real value, Index count);
  void (*scale)(Real* x, Real factor, Index count);
  void (*add)(const Real* x, Real* y, Index count);
  /// out = a + b; out may be a or b.
  void (*sum)(const Real* a, const Real* b, Real* out, Index count);

  Index (*attention_scratch)(Index keys, Index head_size);
  void (*attention_forward)(const AttentionHead<Real>& head);
  void (*attention_backward)(const AttentionHead<Real>& head);
  /// gradient = scale * probability * (gradient - sum of gradient * probability).
  void (*softmax_gradient)(const Real* probability, Real scale, Real* gradient, Index count);
  /// One query against `length` keys and values, `stride` elements apart. weights: scratch [length].
  void (*attention_decode)(const Real* q, const Real* keys, const Real* values, Index length, Index stride, Index head_size,
                           Real scale, Real* weights, Real* out);

  /// C [m, n] (+)= A B. A is read at a[i * a_row + p * a_column], B at b[p * b_row + j * b_column], C at c[i * c_row + j].
  void (*gemm)(Index m, Index n, Index k, const Real* a, Index a_row, Index a_column, const Real* b, Index b_row, Index b_column,
               Real* c, Index c_row, bool accumulate);

  /// exp(x), for its test.
  void (*exponential)(const Real* x, Real* y, Index count);
};

/// Loops on tensors of one 16-bit dtype (bit patterns): the arithmetic of the loop of the same name in VectorOps<float>, with the
/// same bits, each output rounded once. Conversions have the bits of core/dtype.h for every input. What is not const may be an
/// input, element by element.
struct HalfOps {
  using Index = std::int64_t;
  using Half = std::uint16_t;

  void (*widen)(const Half* from, float* to, Index count);
  void (*narrow)(const float* from, Half* to, Index count);
  void (*gelu_forward)(const Half* x, Half* y, Index count);
  void (*gelu_backward)(const Half* dy, const Half* x, Half* dx, Index count);
  void (*scale)(Half* x, float factor, Index count);
  void (*sum)(const Half* a, const Half* b, Half* out, Index count);
  /// y += x.
  void (*add_to_single)(const Half* x, float* y, Index count);
  double (*squared_norm)(const Half* x, Index count);

  /// scratch: `hidden` elements.
  void (*layer_norm_forward)(const Half* x, const float* weight, const float* bias, float epsilon, Index tokens, Index hidden,
                             Half* y, float* mean, float* rstd, float* scratch);
  /// scratch: 2 * `hidden` elements.
  void (*layer_norm_backward_input)(const Half* dy, const Half* x, const float* weight, const float* mean, const float* rstd,
                                    const Half* dresidual, Index tokens, Index hidden, Half* dx, float* scratch);
  /// dweight and dbias hold the columns [c0, c1) alone.
  void (*layer_norm_backward_weight)(const Half* dy, const Half* x, const float* mean, const float* rstd, Index tokens,
                                     Index hidden, Index c0, Index c1, float* dweight, float* dbias);
  /// sum holds the columns [c0, c1) alone.
  void (*column_sum)(const Half* x, Index rows, Index stride, Index c0, Index c1, float* sum);
  /// scratch: `vocabulary` elements.
  double (*cross_entropy_gradient)(Half* logits, Index vocabulary, std::int32_t target, float scale, float* scratch);
};

struct VectorTables {
  using Index = std::int64_t;

  VectorOps<float> f32;
  VectorOps<double> f64;
  HalfOps bf16, f16;
  /// to = fp8(from * scale) * inverse_scale, saturating, NaN stays NaN; `to` may be `from`. Returns the largest |from| of those
  /// that are numbers.
  float (*quantize_e4m3)(const float* from, float scale, float inverse_scale, float* to, Index count);
  float (*quantize_e5m2)(const float* from, float scale, float inverse_scale, float* to, Index count);
};

/// The tables of each instruction set that this build has. Calling into one that the machine lacks is an illegal instruction:
/// ask supported_instruction_sets() first.
[[nodiscard]] const VectorTables& baseline_tables();
#if defined(__x86_64__)
[[nodiscard]] const VectorTables& avx2_tables();
[[nodiscard]] const VectorTables& avx512_tables();
#endif

}  // namespace tandem::cpu
