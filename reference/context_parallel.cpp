// SPDX-License-Identifier: Apache-2.0
#include "reference/context_parallel.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/lockstep_gpt.h"
#include "reference/model_ends.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

std::vector<ContextSlice> context_slices(const Batch& batch, int ranks) {
  std::vector<ContextSlice> slices;
  slices.reserve(static_cast<std::size_t>(ranks));
  for (int c = 0; c < ranks; ++c) slices.push_back(context_slice(batch, ranks, c));
  return slices;
}

std::vector<std::vector<std::int64_t>> own_places(const GptConfig& model, const std::vector<ContextSlice>& slices) {
  std::vector<std::vector<std::int64_t>> own;
  for (const ContextSlice& slice : slices) {
    std::vector<std::int64_t>& places = own.emplace_back();
    for (const std::int64_t row_id : slice.batch.row_ids) {
      for (const std::int64_t position : slice.positions) places.push_back(row_id * model.sequence + position);
    }
  }
  return own;
}

template <class Real>
class ContextParallelGpt final : public LockstepGpt<Real> {
 public:
  ContextParallelGpt(const GptConfig& model, const NamedTensors<Real>& parameters, std::vector<ContextSlice> slices,
                     const Pass<Real>& pass)
      : LockstepGpt<Real>(model, pass, std::vector<LockstepRank<Real>>(slices.size(), {parameters, zero_tensors<Real>(model)}),
                          own_places(model, slices)),
        slices_(std::move(slices)),
        attention_(static_cast<std::size_t>(model.layers)) {}

  [[nodiscard]] const ContextParallelExchanges& exchanges() const { return exchanges_; }

 private:
  using Part = typename LockstepGpt<Real>::Part;
  using LockstepGpt<Real>::model_;
  using LockstepGpt<Real>::pass_;
  using LockstepGpt<Real>::ranks_;

  /// A rank has all matrices whole: own tokens are all that they see, and what they give is no part of a sum.
  PerRank<Real> enter(const PerRank<Real>& own, Part /*part*/) override { return own; }
  PerRank<Real> leave(const PerRank<Real>& own, Part /*part*/) override { return own; }

  PerRank<Real> embedding_forward() override {
    PerRank<Real> h;
    for (std::size_t c = 0; c < ranks_.size(); ++c) {
      const Batch& own = slices_[c].batch;
      h.emplace_back(own.ids.size() * static_cast<std::size_t>(model_.hidden));
      reference::embedding_forward<Real>(tensor(std::as_const(ranks_[c].parameters), "wte.weight"),
                                         tensor(std::as_const(ranks_[c].parameters), "wpe.weight"), own.ids, own.positions, h[c]);
    }
    return h;
  }

  void embedding_backward(const PerRank<Real>& dh) override {
    for (std::size_t c = 0; c < ranks_.size(); ++c) {
      const Batch& own = slices_[c].batch;
      reference::embedding_backward<Real>(dh[c], own.ids, own.positions, tensor(ranks_[c].gradients, "wte.weight"),
                                          tensor(ranks_[c].gradients, "wpe.weight"));
    }
  }

  RingAttentionInput ring(int layer) const {
    return {model_.heads, model_.hidden, model_.sequence, slices_,
            this->dropout(model_.attention_dropout, DropoutSite::attention_probability, layer)};
  }

  PerRank<Real> attention_forward(int layer, const PerRank<Real>& qkv) override {
    auto& kept = attention_[static_cast<std::size_t>(layer)];
    kept = ring_attention_forward(ring(layer), qkv, exchanges_.forward);
    PerRank<Real> out;
    for (const PartialAttention<Real>& of_rank : kept) out.push_back(of_rank.out);
    return out;
  }

  PerRank<Real> attention_backward(int layer, const PerRank<Real>& qkv, const PerRank<Real>& dout) override {
    return ring_attention_backward(ring(layer), qkv, attention_[static_cast<std::size_t>(layer)], dout, exchanges_.backward);
  }

  std::vector<double> head_forward_and_backward(const PerRank<Real>& x, PerRank<Real>& dx) override {
    std::vector<double> shares;
    dx.clear();
    for (std::size_t c = 0; c < ranks_.size(); ++c) {
      const Batch& own = slices_[c].batch;
      const LinearSize size{own.rows * own.sequence, model_.hidden, model_.vocabulary};
      const auto table = tensor(std::as_const(ranks_[c].parameters), head_name(model_));
      std::vector<Real> logits(static_cast<std::size_t>(size.rows * size.out)), log_sum_exp(own.ids.size());
      head_forward<Real>(size, x[c], table, logits);
      shares.push_back(cross_entropy_forward<Real>(logits, own.targets, pass_.valid_tokens, log_sum_exp));
      std::vector<Real> dlogits(logits.size());
      cross_entropy_backward<Real>(logits, own.targets, pass_.valid_tokens, log_sum_exp, dlogits);
      dx.emplace_back(x[c].size());
      head_backward<Real>(size, x[c], table, dlogits, dx[c], tensor(ranks_[c].gradients, head_name(model_)));
    }
    return shares;
  }

  std::vector<ContextSlice> slices_;
  std::vector<std::vector<PartialAttention<Real>>> attention_;  // [layers, ranks]
  ContextParallelExchanges exchanges_;
};

}  // namespace

std::array<Interval, 2> context_chunks(std::int64_t row_tokens, int ranks, int rank) {
  TANDEM_CHECK(rank >= 0 && rank < ranks, fmt::format("context rank {} of {}", rank, ranks));
  const std::int64_t chunks = 2 * std::int64_t{ranks};
  return {balanced_part(row_tokens, chunks, rank), balanced_part(row_tokens, chunks, chunks - 1 - rank)};
}

ContextSlice context_slice(const Batch& batch, int ranks, int rank) {
  ContextSlice slice;
  for (const Interval& chunk : context_chunks(batch.sequence, ranks, rank)) {
    for (std::int64_t t = chunk.begin; t < chunk.end; ++t) slice.positions.push_back(t);
  }
  slice.batch.rows = batch.rows;
  slice.batch.sequence = std::ssize(slice.positions);
  slice.batch.row_ids = batch.row_ids;
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    for (const std::int64_t position : slice.positions) {
      const auto token = static_cast<std::size_t>(row * batch.sequence + position);
      slice.batch.ids.push_back(batch.ids[token]);
      slice.batch.targets.push_back(batch.targets[token]);
      slice.batch.positions.push_back(batch.positions[token]);
      slice.batch.document_starts.push_back(batch.document_starts[token]);
    }
  }
  return slice;
}

ContextParallelExchanges context_parallel_exchanges(const GptConfig& model, std::int64_t tokens, ContextParallelLayout layout) {
  if (layout.ranks == 1) return {};
  const std::int64_t n = model.layers * tokens * model.hidden;
  const std::int64_t ranks = layout.ranks;
  return {2 * (ranks - 1) * n, (4 * ranks - 2) * n};
}

template <class Real>
ContextParallelStep<Real> context_parallel_local_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                           const Batch& batch, ContextParallelLayout layout,
                                                           const Pass<Real>& pass) {
  const PassContext<Real> context{model, parameters, batch, pass};
  require_batch_fits(context);
  require_normaliser_fits(context);
  ContextParallelGpt<Real> gpt(model, parameters, context_slices(batch, layout.ranks), pass);
  std::vector<double> losses(static_cast<std::size_t>(layout.ranks), 0.0);
  if (batch.rows > 0) losses = gpt.forward_and_backward();
  ContextParallelStep<Real> step;
  for (std::size_t c = 0; c < losses.size(); ++c) {
    RankGradients<Real>& rank = step.ranks.emplace_back();
    rank.loss = losses[c];
    rank.gradients = std::move(gpt.ranks()[c].gradients);
  }
  step.exchanges = gpt.exchanges();
  return step;
}

template <class Real>
RankGradients<Real> context_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                                               ContextParallelLayout layout, const Pass<Real>& pass) {
  ContextParallelStep<Real> step = context_parallel_local_gradients(model, parameters, batch, layout, pass);
  all_reduce_sum(step.ranks);
  return std::move(step.ranks.front());
}

template ContextParallelStep<float> context_parallel_local_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                                     ContextParallelLayout, const Pass<float>&);
template ContextParallelStep<double> context_parallel_local_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                                      ContextParallelLayout, const Pass<double>&);
template RankGradients<float> context_parallel_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                         ContextParallelLayout, const Pass<float>&);
template RankGradients<double> context_parallel_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                          ContextParallelLayout, const Pass<double>&);

}  // namespace tandem::reference
