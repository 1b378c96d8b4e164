// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "kernels/kernels.h"

namespace tandem {

/// Kernels that do what others do: the base of those that have some operations of their own, an attention or an optimizer
/// (core/own_parts.h).
///
/// What Kernels itself makes of other operations (dropout_residual_norm_forward, cross_entropy_deferred, adamw_all,
/// squared_norms) is made of this object's here, so that an adamw() of one's own is what adamw_all() calls, and never left to the
/// inner ones. linear_gelu_forward is an operation of its own.
class ForwardingKernels : public Kernels {
 public:
  explicit ForwardingKernels(std::unique_ptr<Kernels> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] Memory& memory() noexcept override { return inner_->memory(); }
  [[nodiscard]] CompressionKernels* compression() noexcept override { return inner_->compression(); }
  void synchronize() override { inner_->synchronize(); }
  void begin_graph(std::uint64_t key) override { inner_->begin_graph(key); }
  void end_graph() override { inner_->end_graph(); }

  [[nodiscard]] KernelsInfo info() const override { return inner_->info(); }
  void embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                         TensorView wpe, TensorView out) override {
    inner_->embedding_forward(ids, positions, wte, wpe, out);
  }
  void embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                          TensorView dwte, TensorView dwpe) override {
    inner_->embedding_backward(ids, positions, dout, dwte, dwpe);
  }
  void layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                          TensorView rstd) override {
    inner_->layer_norm_forward(x, weight, bias, epsilon, y, mean, rstd);
  }
  void layer_norm_backward_input(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                 TensorView dresidual, TensorView dx) override {
    inner_->layer_norm_backward_input(dy, x, weight, mean, rstd, dresidual, dx);
  }
  void layer_norm_backward_weight(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                                  TensorView dbias) override {
    inner_->layer_norm_backward_weight(dy, x, mean, rstd, dweight, dbias);
  }
  void linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) override {
    inner_->linear_forward(x, weight, bias, y);
  }
  void linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) override {
    inner_->linear_gelu_forward(x, weight, bias, y_pre, y);
  }
  void linear_backward_input(TensorView dy, TensorView weight, TensorView dx) override {
    inner_->linear_backward_input(dy, weight, dx);
  }
  void linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) override {
    inner_->linear_backward_weight(x, dy, dweight, dbias);
  }
  void attention_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                         TensorView logsumexp) override {
    inner_->attention_forward(shape, dropout, qkv, out, logsumexp);
  }
  void attention_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                          TensorView out, TensorView logsumexp, TensorView dqkv) override {
    inner_->attention_backward(shape, dropout, dout, qkv, out, logsumexp, dqkv);
  }
  void attention_segment_forward(const AttentionSegment& segment, const DropoutSpec& dropout, const StridedRows& query,
                                 const StridedRows& key, const StridedRows& value, TensorView out,
                                 TensorView logsumexp) override {
    inner_->attention_segment_forward(segment, dropout, query, key, value, out, logsumexp);
  }
  void attention_segment_backward(const AttentionSegment& segment, const DropoutSpec& dropout, TensorView dout,
                                  const StridedRows& query, const StridedRows& key, const StridedRows& value, TensorView out,
                                  TensorView logsumexp, const StridedRows& dquery, const StridedRows& dkey,
                                  const StridedRows& dvalue) override {
    inner_->attention_segment_backward(segment, dropout, dout, query, key, value, out, logsumexp, dquery, dkey, dvalue);
  }
  void attention_materialized_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                                      TensorView probabilities) override {
    inner_->attention_materialized_forward(shape, dropout, qkv, out, probabilities);
  }
  void attention_materialized_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                                       TensorView probabilities, TensorView dqkv) override {
    inner_->attention_materialized_backward(shape, dropout, dout, qkv, probabilities, dqkv);
  }
  void attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                        TensorView value_cache, TensorView out) override {
    inner_->attention_decode(heads, head_size, length, qkv, key_cache, value_cache, out);
  }
  void gelu_forward(TensorView x, TensorView y) override { inner_->gelu_forward(x, y); }
  void gelu_backward(TensorView dy, TensorView x, TensorView dx) override { inner_->gelu_backward(dy, x, dx); }
  void dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) override {
    inner_->dropout_residual_forward(dropout, x, residual, out);
  }
  void dropout_backward(const DropoutSpec& dropout, TensorView dout, TensorView dx) override {
    inner_->dropout_backward(dropout, dout, dx);
  }
  [[nodiscard]] double cross_entropy_forward_backward(TensorView logits, std::span<const std::int32_t> targets,
                                                      double scale) override {
    return inner_->cross_entropy_forward_backward(logits, targets, scale);
  }
  [[nodiscard]] double cross_entropy_forward(TensorView logits, std::span<const std::int32_t> targets) override {
    return inner_->cross_entropy_forward(logits, targets);
  }
  void cross_entropy_statistics(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                TensorView statistics) override {
    inner_->cross_entropy_statistics(logits, columns, targets, statistics);
  }
  void cross_entropy_gradient(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                              std::span<const std::uint8_t> valid, TensorView logsumexp, double scale) override {
    inner_->cross_entropy_gradient(logits, columns, targets, valid, logsumexp, scale);
  }
  void gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) override {
    inner_->gather_rows(ids, table, out);
  }
  void add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) override {
    inner_->add_gathered_rows(ids, table, out);
  }
  void scatter_add_rows(std::span<const std::int32_t> ids, TensorView x, TensorView table) override {
    inner_->scatter_add_rows(ids, x, table);
  }
  void combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) override {
    inner_->combine_rows(slots, gates, y, out);
  }
  void combine_rows_backward(std::span<const std::int32_t> slots, TensorView gates, TensorView dout, TensorView y,
                             TensorView dgates, TensorView dy) override {
    inner_->combine_rows_backward(slots, gates, dout, y, dgates, dy);
  }
  void add_bias(TensorView bias, TensorView x) override { inner_->add_bias(bias, x); }
  void bias_backward(TensorView dy, TensorView dbias) override { inner_->bias_backward(dy, dbias); }
  void head_forward(TensorView x, TensorView embedding, TensorView logits) override {
    inner_->head_forward(x, embedding, logits);
  }
  void head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) override {
    inner_->head_backward_input(dlogits, embedding, dx);
  }
  void head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) override {
    inner_->head_backward_weight(x, dlogits, dembedding);
  }
  void adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
             TensorView stored) override {
    inner_->adamw(step, gradient, parameter, m, v, stored);
  }
  void sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient, TensorView parameter,
           TensorView stored) override {
    inner_->sgd(learning_rate, weight_decay, gradient_scale, gradient, parameter, stored);
  }
  void convert(TensorView from, TensorView to) override { inner_->convert(from, to); }
  [[nodiscard]] double quantize_fp8(TensorView from, Fp8Format format, double scale, TensorView to) override {
    return inner_->quantize_fp8(from, format, scale, to);
  }
  [[nodiscard]] double squared_norm(TensorView x) override { return inner_->squared_norm(x); }
  void fill(TensorView x, double value) override { inner_->fill(x, value); }
  void scale(TensorView x, double factor) override { inner_->scale(x, factor); }
  void add(TensorView x, TensorView y) override { inner_->add(x, y); }

 protected:
  [[nodiscard]] Kernels& inner() const noexcept { return *inner_; }

 private:
  const std::unique_ptr<Kernels> inner_;
};

}  // namespace tandem
