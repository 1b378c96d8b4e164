// SPDX-License-Identifier: Apache-2.0
#include "reference/tensor_parallel.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/attention.h"
#include "reference/lockstep_gpt.h"
#include "reference/model_ends.h"
#include "reference/require.h"
#include "reference/vocabulary_parallel.h"

namespace tandem::reference {
namespace {

/// The tokens of the batch, flattened, on which tensor rank `rank` runs norms, dropout and residuals.
Interval own_tokens(const Batch& batch, TensorParallelLayout layout, int rank) {
  const std::int64_t tokens = batch.rows * batch.sequence;
  return layout.sequence_parallel ? balanced_part(tokens, layout.ranks, rank) : Interval{0, tokens};
}

std::vector<std::vector<std::int64_t>> own_places(const GptConfig& model, const Batch& batch, TensorParallelLayout layout) {
  const std::vector<std::int64_t> places = token_places(batch, model.sequence);
  std::vector<std::vector<std::int64_t>> own;
  for (int r = 0; r < layout.ranks; ++r) {
    const Interval tokens = own_tokens(batch, layout, r);
    own.emplace_back(places.begin() + tokens.begin, places.begin() + tokens.end);
  }
  return own;
}

template <class Real>
std::vector<LockstepRank<Real>> sliced_ranks(const GptConfig& model, const NamedTensors<Real>& parameters, int ranks) {
  std::vector<LockstepRank<Real>> states;
  states.reserve(static_cast<std::size_t>(ranks));
  const NamedTensors<Real> zeros = zero_tensors<Real>(model);
  for (int r = 0; r < ranks; ++r) {
    states.push_back({tensor_slices(model, parameters, ranks, r), tensor_slices(model, zeros, ranks, r)});
  }
  return states;
}

template <class Real>
class TensorParallelGpt final : public LockstepGpt<Real> {
 public:
  TensorParallelGpt(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch, TensorParallelLayout layout,
                    const Pass<Real>& pass)
      : LockstepGpt<Real>(model, pass, sliced_ranks(model, parameters, layout.ranks), own_places(model, batch, layout)),
        batch_(batch),
        layout_(layout),
        probabilities_(static_cast<std::size_t>(model.layers)) {
    TANDEM_CHECK(model.heads % layout.ranks == 0, fmt::format("{} tensor ranks, {} heads", layout.ranks, model.heads));
  }

  [[nodiscard]] const TensorParallelExchanges& exchanges() const { return exchanges_; }

 private:
  using Part = typename LockstepGpt<Real>::Part;
  using LockstepGpt<Real>::model_;
  using LockstepGpt<Real>::pass_;
  using LockstepGpt<Real>::ranks_;

  [[nodiscard]] std::int64_t activation_elements() const { return batch_.rows * batch_.sequence * model_.hidden; }

  /// Own tokens to all tokens: an all-gather under sequence parallelism; otherwise every rank has them already.
  PerRank<Real> gather_tokens(const PerRank<Real>& own, std::int64_t& sent) const {
    if (!layout_.sequence_parallel) return own;
    sent += activation_elements() * (layout_.ranks - 1);
    return PerRank<Real>(own.size(), joined_over_ranks(own));
  }

  /// Partial results of all tokens to the sums of own tokens: a reduce-scatter under sequence parallelism, else an all-reduce.
  PerRank<Real> sum_partials(const PerRank<Real>& partial, std::int64_t& sent) const {
    sent += activation_elements() * (layout_.ranks - 1) * (layout_.sequence_parallel ? 1 : 2);
    const std::vector<Real> sum = sum_over_ranks(partial);
    PerRank<Real> own;
    for (int r = 0; r < layout_.ranks; ++r) {
      const Interval tokens = own_tokens(batch_, layout_, r);
      own.emplace_back(sum.begin() + tokens.begin * model_.hidden, sum.begin() + tokens.end * model_.hidden);
    }
    return own;
  }

  std::int64_t& sent_in(Part part) { return part == Part::head ? exchanges_.head : exchanges_.layers; }
  PerRank<Real> enter(const PerRank<Real>& own, Part part) override { return gather_tokens(own, sent_in(part)); }
  PerRank<Real> leave(const PerRank<Real>& partial, Part part) override { return sum_partials(partial, sent_in(part)); }

  /// Token embeddings are summed over ranks; each rank then adds the position embeddings of its own tokens.
  PerRank<Real> embedding_forward() override {
    std::vector<std::span<const Real>> tables;
    for (const LockstepRank<Real>& rank : ranks_) tables.push_back(tensor(rank.parameters, "wte.weight"));
    PerRank<Real> h =
        sum_partials(vocabulary_lookup<Real>(tables, model_.vocabulary, model_.hidden, batch_.ids), exchanges_.embedding);
    for (int r = 0; r < layout_.ranks; ++r) {
      const auto table = tensor(std::as_const(ranks_[static_cast<std::size_t>(r)].parameters), "wpe.weight");
      for_own_positions(r, table, std::span(h[static_cast<std::size_t>(r)]), [](Real position, Real& sum) { sum += position; });
    }
    return h;
  }

  void embedding_backward(const PerRank<Real>& dh) override {
    std::vector<std::span<Real>> dtables;
    for (LockstepRank<Real>& rank : ranks_) dtables.push_back(tensor(rank.gradients, "wte.weight"));
    vocabulary_lookup_backward<Real>(gather_tokens(dh, exchanges_.embedding), model_.vocabulary, model_.hidden, batch_.ids,
                                     dtables);
    for (int r = 0; r < layout_.ranks; ++r) {
      const auto dtable = tensor(ranks_[static_cast<std::size_t>(r)].gradients, "wpe.weight");
      for_own_positions(r, dtable, std::span(dh[static_cast<std::size_t>(r)]),
                        [](Real& dposition, Real gradient) { dposition += gradient; });
    }
  }

  /// body(element of the token's row of wpe, element of `values`) for every element of rank r's own tokens.
  template <class Table, class Values, class Body>
  void for_own_positions(int r, std::span<Table> table, std::span<Values> values, const Body& body) const {
    const Interval tokens = own_tokens(batch_, layout_, r);
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      const std::int64_t position = batch_.positions[static_cast<std::size_t>(t)];
      TANDEM_CHECK(position >= 0 && position < model_.sequence, fmt::format("position {} of {}", position, model_.sequence));
      const auto row = row_of(table, position, model_.hidden);
      const auto of_token = row_of(values, t - tokens.begin, model_.hidden);
      for (std::size_t c = 0; c < row.size(); ++c) body(row[c], of_token[c]);
    }
  }

  /// The heads of rank r; masks are those of the same heads in the whole model.
  AttentionInput heads_of(int r, int layer) const {
    const int heads = model_.heads / layout_.ranks;
    return {heads,
            model_.hidden / layout_.ranks,
            {batch_.row_ids, batch_.sequence, model_.sequence},
            batch_.document_starts,
            this->dropout(model_.attention_dropout, DropoutSite::attention_probability, layer),
            model_.heads,
            r * heads};
  }

  PerRank<Real> attention_forward(int layer, const PerRank<Real>& qkv) override {
    PerRank<Real> out;
    PerRank<Real>& probabilities = probabilities_[static_cast<std::size_t>(layer)];
    probabilities.clear();
    for (int r = 0; r < layout_.ranks; ++r) {
      const auto rank = static_cast<std::size_t>(r);
      out.emplace_back(qkv[rank].size() / 3);
      probabilities.emplace_back(batch_.ids.size() * static_cast<std::size_t>(model_.heads / layout_.ranks * batch_.sequence));
      reference::attention_forward<Real>(heads_of(r, layer), qkv[rank], out[rank], probabilities[rank]);
    }
    return out;
  }

  PerRank<Real> attention_backward(int layer, const PerRank<Real>& qkv, const PerRank<Real>& dout) override {
    PerRank<Real> dqkv;
    for (int r = 0; r < layout_.ranks; ++r) {
      const auto rank = static_cast<std::size_t>(r);
      dqkv.emplace_back(qkv[rank].size());
      reference::attention_backward<Real>(heads_of(r, layer), qkv[rank], probabilities_[static_cast<std::size_t>(layer)][rank],
                                          dout[rank], dqkv[rank]);
    }
    return dqkv;
  }

  std::vector<double> head_forward_and_backward(const PerRank<Real>& x, PerRank<Real>& dx) override {
    const LinearSize size{batch_.rows * batch_.sequence, model_.hidden, vocabulary_rows(model_.vocabulary, layout_.ranks)};
    const PerRank<Real> entered = enter(x, Part::head);
    PerRank<Real> logits;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      logits.emplace_back(static_cast<std::size_t>(size.rows * size.out));
      head_forward<Real>(size, entered[r], tensor(std::as_const(ranks_[r].parameters), head_name(model_)), logits[r]);
    }
    exchanges_.loss += 6 * size.rows * (layout_.ranks - 1);
    const auto statistics = vocabulary_statistics<Real>(logits, model_.vocabulary, batch_.targets);
    const double loss = vocabulary_loss(statistics, batch_.targets, pass_.valid_tokens);

    const PerRank<Real> dlogits =
        vocabulary_loss_backward(logits, model_.vocabulary, statistics, batch_.targets, pass_.valid_tokens);
    PerRank<Real> partial;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      partial.emplace_back(entered[r].size());
      head_backward<Real>(size, entered[r], tensor(std::as_const(ranks_[r].parameters), head_name(model_)), dlogits[r],
                          partial[r], tensor(ranks_[r].gradients, head_name(model_)));
    }
    dx = leave(partial, Part::head);
    return std::vector<double>(ranks_.size(), loss);
  }

  const Batch& batch_;
  TensorParallelLayout layout_;
  TensorParallelExchanges exchanges_;
  std::vector<PerRank<Real>> probabilities_;  // [layers]
};

}  // namespace

template <class Real>
TensorParallelStep<Real> tensor_parallel_local_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                         const Batch& batch, TensorParallelLayout layout,
                                                         const Pass<Real>& pass) {
  const PassContext<Real> context{model, parameters, batch, pass};
  require_batch_fits(context);
  require_normaliser_fits(context);
  TensorParallelGpt<Real> gpt(model, parameters, batch, layout, pass);
  std::vector<double> losses(static_cast<std::size_t>(layout.ranks), 0.0);
  if (batch.rows > 0) losses = gpt.forward_and_backward();
  TensorParallelStep<Real> step;
  for (std::size_t r = 0; r < losses.size(); ++r) {
    RankGradients<Real>& rank = step.ranks.emplace_back();
    rank.loss = losses[r];
    rank.gradients = std::move(gpt.ranks()[r].gradients);
  }
  step.exchanges = gpt.exchanges();
  return step;
}

template <class Real>
void sum_replicated_gradients(const GptConfig& model, TensorParallelLayout layout, TensorParallelStep<Real>& step) {
  if (!layout.sequence_parallel) return;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    if (tensor_split(parameter) != TensorSplit::replicated) continue;
    std::vector<std::span<Real>> values;
    for (RankGradients<Real>& rank : step.ranks) values.push_back(tensor(rank.gradients, parameter.name));
    all_reduce_sum<Real>(values);
    step.exchanges.gradients += 2 * parameter.num_elements() * (layout.ranks - 1);
  }
}

template <class Real>
TensorParallelStep<Real> tensor_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                   const Batch& batch, TensorParallelLayout layout, const Pass<Real>& pass) {
  TensorParallelStep<Real> step = tensor_parallel_local_gradients(model, parameters, batch, layout, pass);
  sum_replicated_gradients(model, layout, step);
  return step;
}

template TensorParallelStep<float> tensor_parallel_local_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                                   TensorParallelLayout, const Pass<float>&);
template TensorParallelStep<double> tensor_parallel_local_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                                    TensorParallelLayout, const Pass<double>&);
template void sum_replicated_gradients(const GptConfig&, TensorParallelLayout, TensorParallelStep<float>&);
template void sum_replicated_gradients(const GptConfig&, TensorParallelLayout, TensorParallelStep<double>&);
template TensorParallelStep<float> tensor_parallel_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                             TensorParallelLayout, const Pass<float>&);
template TensorParallelStep<double> tensor_parallel_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                              TensorParallelLayout, const Pass<double>&);

}  // namespace tandem::reference
