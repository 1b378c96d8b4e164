// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reference/attention.h"
#include "reference/experts.h"
#include "reference/gpt.h"

namespace tandem::reference {

/// What every part of a model's pass shares. Borrows everything for the length of the pass.
template <class Real>
struct PassContext {
  const GptConfig& model;
  const NamedTensors<Real>& parameters;
  const Batch& batch;
  const Pass<Real>& pass;

  [[nodiscard]] std::int64_t tokens() const noexcept { return batch.rows * batch.sequence; }
  [[nodiscard]] std::size_t count(std::int64_t width) const noexcept { return static_cast<std::size_t>(tokens() * width); }
  [[nodiscard]] RowPlacement placement() const noexcept { return {batch.row_ids, batch.sequence, model.sequence}; }
  [[nodiscard]] std::span<const Real> parameter(std::string_view name) const { return tensor(parameters, name); }
  /// The mask of this step at (layer, site); no dropout where the pass has none.
  [[nodiscard]] Dropout dropout(double probability, DropoutSite site, int layer) const {
    if (!pass.dropout) return {};
    return {probability, {pass.dropout->seed, pass.dropout->step, static_cast<std::uint32_t>(layer), site}};
  }
  [[nodiscard]] ExpertLayer expert_layer() const {
    const std::int64_t global_rows = pass.global_rows > 0 ? pass.global_rows : batch.rows;
    ExpertLayer layer = reference::expert_layer(model, batch.sequence, global_rows);
    layer.rounding = pass.rounding;
    layer.loss_scale = pass.loss_scale;
    return layer;
  }
  void trace(std::string_view name, std::span<const Real> values) const {
    if (pass.trace) pass.trace(name, values);
  }
  /// What a product that never is in fp8 reads of an operand.
  [[nodiscard]] std::vector<Real> operand(std::span<const Real> values) const {
    return rounded_copy(pass.rounding.products, values);
  }
  /// A tensor is stored: its values are rounded to what the pass stores.
  void rest(std::span<Real> values) const { round_all(pass.rounding.storage, values); }
  void rest(std::string_view name, std::span<Real> values) const {
    rest(values);
    trace(name, values);
  }
};

/// Output and statistics of one layer norm.
template <class Real>
struct NormActivations {
  std::vector<Real> out;                ///< [tokens, hidden]
  std::vector<Real> mean;               ///< [tokens]
  std::vector<Real> reciprocal_stddev;  ///< [tokens]
};

/// The layer norm whose parameters are `name`.weight and `name`.bias.
template <class Real>
[[nodiscard]] NormActivations<Real> norm_forward(const PassContext<Real>& context, const std::string& name,
                                                 std::span<const Real> x);
/// Returns dx, not rounded: it is added to a residual's gradient before it rests. Adds to the gradients of `name`.
template <class Real>
[[nodiscard]] std::vector<Real> norm_backward(const PassContext<Real>& context, const std::string& name, std::span<const Real> x,
                                              const NormActivations<Real>& kept, std::span<const Real> dy,
                                              NamedTensors<Real>& gradients);

/// Everything that the backward pass of one transformer block reads; nothing is recomputed but dropout masks.
template <class Real>
struct BlockActivations {
  std::vector<Real> input;          ///< [tokens, hidden]
  NormActivations<Real> norm_1;     ///< of input
  std::vector<Real> qkv;            ///< [tokens, 3 hidden]
  std::vector<Real> probabilities;  ///< [rows, heads, sequence, sequence]
  std::vector<Real> attention;      ///< [tokens, hidden], before c_proj
  std::vector<Real> middle;         ///< [tokens, hidden], after the first residual
  NormActivations<Real> norm_2;     ///< of middle
  std::vector<Real> mlp_in;         ///< [tokens, mlp_width], before GELU; empty with experts
  std::vector<Real> mlp_out;        ///< [tokens, mlp_width], after GELU; empty with experts
  ExpertActivations<Real> experts;  ///< with experts
};

/// The block up to its MLP: middle = input + dropout(c_proj(attention(c_attn(ln_1(input))))) and norm_2 = ln_2(middle).
template <class Real>
void block_attention_forward(const PassContext<Real>& context, int layer, const std::vector<Real>& input,
                             BlockActivations<Real>& kept);
/// The block after its MLP, whose output is `branch`: returns middle + dropout(branch).
template <class Real>
[[nodiscard]] std::vector<Real> block_output(const PassContext<Real>& context, int layer, const BlockActivations<Real>& kept,
                                             std::vector<Real> branch);
/// Backward of block_output: the gradient of `branch`. That of middle by this path is dh itself.
template <class Real>
[[nodiscard]] std::vector<Real> block_output_backward(const PassContext<Real>& context, int layer, const std::vector<Real>& dh);
/// Backward of block_attention_forward: `dh` is the gradient of middle by the residual path before and that of the input after.
template <class Real>
void block_attention_backward(const PassContext<Real>& context, int layer, const BlockActivations<Real>& kept,
                              std::span<const Real> dnorm_2, std::vector<Real>& dh, NamedTensors<Real>& gradients);

/// middle = input + dropout(c_proj(attention(c_attn(ln_1(input)))));  out = middle + dropout(mlp(ln_2(middle))).
/// `h` [tokens, hidden] is the input before and the output after.
template <class Real>
void block_forward(const PassContext<Real>& context, int layer, std::vector<Real>& h, BlockActivations<Real>& kept);

/// `dh` [tokens, hidden] is the gradient of the block's output before and that of its input after.
template <class Real>
void block_backward(const PassContext<Real>& context, int layer, const BlockActivations<Real>& kept, std::vector<Real>& dh,
                    NamedTensors<Real>& gradients);

}  // namespace tandem::reference
