// SPDX-License-Identifier: Apache-2.0
// A whole step of expert parallelism: data-parallel ranks that meet in every layer of experts.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/block.h"
#include "reference/expert_parallel.h"
#include "reference/model_ends.h"

namespace tandem::reference {
namespace {

/// One micro-batch on all data ranks in lockstep.
template <class Real>
class MicroBatch {
 public:
  MicroBatch(const GptConfig& model, ExpertParallelLayout layout, std::vector<Batch> batches, const Pass<Real>& pass,
             std::vector<LockstepRank<Real>>& ranks, std::vector<RoutingRecord>& routing)
      : model_(model), layout_(layout), batches_(std::move(batches)), pass_(pass), ranks_(ranks), routing_(routing) {
    for (std::size_t r = 0; r < ranks.size(); ++r) contexts_.push_back({model_, ranks[r].parameters, batches_[r], pass_});
    layer_ = contexts_.front().expert_layer();
    blocks_.assign(static_cast<std::size_t>(model.layers), std::vector<BlockActivations<Real>>(ranks.size()));
    experts_.assign(static_cast<std::size_t>(model.layers), std::vector<std::vector<ExpertRankActivations<Real>>>(num_groups()));
  }

  /// Adds to losses[r] and to the gradients of the ranks.
  void forward_and_backward(std::vector<double>& losses) {
    PerRank<Real> h;
    for (const PassContext<Real>& context : contexts_) h.push_back(embed(context));
    for (int layer = 0; layer < model_.layers; ++layer) block_forward_of_ranks(layer, h);
    for (std::size_t r = 0; r < contexts_.size(); ++r) {
      HeadActivations<Real> kept = head(contexts_[r], std::move(h[r]));
      losses[r] += head_loss(contexts_[r], kept);
      h[r] = head_loss_backward(contexts_[r], kept, ranks_[r].gradients);
    }
    PerRank<Real>& dh = h;
    for (int layer = model_.layers - 1; layer >= 0; --layer) block_backward_of_ranks(layer, dh);
    for (std::size_t r = 0; r < contexts_.size(); ++r) embed_backward<Real>(contexts_[r], dh[r], ranks_[r].gradients);
  }

 private:
  [[nodiscard]] std::size_t num_groups() const { return static_cast<std::size_t>(layout_.data / layout_.expert); }
  /// The elements of a group in what all ranks hold.
  template <class T>
  [[nodiscard]] std::span<T> of_group(std::vector<T>& all, std::size_t group) const {
    const auto size = static_cast<std::size_t>(layout_.expert);
    return std::span<T>(all).subspan(group * size, size);
  }
  [[nodiscard]] std::string mlp_name(int layer) const { return fmt::format("h.{}.mlp", layer); }

  void block_forward_of_ranks(int layer, PerRank<Real>& h) {
    std::vector<BlockActivations<Real>>& blocks = blocks_[static_cast<std::size_t>(layer)];
    for (std::size_t r = 0; r < h.size(); ++r) block_attention_forward(contexts_[r], layer, h[r], blocks[r]);
    for (std::size_t group = 0; group < num_groups(); ++group) {
      PerRank<Real> x;
      for (const BlockActivations<Real>& block : of_group(blocks, group)) x.push_back(block.norm_2.out);
      auto& kept = experts_[static_cast<std::size_t>(layer)][group];
      PerRank<Real> out = expert_parallel_forward<Real>(layer_, mlp_name(layer), of_group(ranks_, group), x, kept);
      std::move(out.begin(), out.end(), of_group(h, group).begin());
      for (std::size_t i = 0; i < kept.size(); ++i) add_to_record(layer_, kept[i].routing, of_group(routing_, group)[i]);
    }
    for (std::size_t r = 0; r < h.size(); ++r) h[r] = block_output(contexts_[r], layer, blocks[r], std::move(h[r]));
  }

  void block_backward_of_ranks(int layer, PerRank<Real>& dh) {
    const std::vector<BlockActivations<Real>>& blocks = blocks_[static_cast<std::size_t>(layer)];
    PerRank<Real> dmlp;
    for (std::size_t r = 0; r < dh.size(); ++r) dmlp.push_back(block_output_backward(contexts_[r], layer, dh[r]));
    for (std::size_t group = 0; group < num_groups(); ++group) {
      const auto dout = of_group(dmlp, group);
      PerRank<Real> dx =
          expert_parallel_backward<Real>(layer_, mlp_name(layer), of_group(ranks_, group),
                                         experts_[static_cast<std::size_t>(layer)][group], {dout.begin(), dout.end()});
      std::move(dx.begin(), dx.end(), dout.begin());
    }
    for (std::size_t r = 0; r < dh.size(); ++r) {
      block_attention_backward<Real>(contexts_[r], layer, blocks[r], dmlp[r], dh[r], ranks_[r].gradients);
    }
  }

  const GptConfig& model_;
  ExpertParallelLayout layout_;
  std::vector<Batch> batches_;  // [ranks]
  const Pass<Real>& pass_;
  std::vector<LockstepRank<Real>>& ranks_;
  std::vector<RoutingRecord>& routing_;
  std::vector<PassContext<Real>> contexts_;  // [ranks]
  ExpertLayer layer_;
  std::vector<std::vector<BlockActivations<Real>>> blocks_;                     // [layers][ranks]
  std::vector<std::vector<std::vector<ExpertRankActivations<Real>>>> experts_;  // [layers][groups][ranks of the group]
};

void require_legal_layout(const GptConfig& model, ExpertParallelLayout layout) {
  TANDEM_CHECK(model.experts > 0, "expert parallelism needs a model with experts");
  TANDEM_CHECK(layout.expert > 0 && layout.data % layout.expert == 0,
               fmt::format("{} data ranks do not make groups of {}", layout.data, layout.expert));
}

/// Whether data rank `rank` holds this parameter.
bool holds(const GptConfig& model, ExpertParallelLayout layout, int rank, const ParameterSpec& parameter) {
  if (parameter.expert < 0) return true;
  const Interval own = own_experts(model.experts, layout.expert, rank % layout.expert);
  return parameter.expert >= own.begin && parameter.expert < own.end;
}

}  // namespace

template <class Real>
std::vector<LockstepRank<Real>> expert_parallel_ranks(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                      ExpertParallelLayout layout) {
  require_legal_layout(model, layout);
  require_parameters_of(model, parameters);
  std::vector<LockstepRank<Real>> ranks(static_cast<std::size_t>(layout.data));
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    for (int rank = 0; rank < layout.data; ++rank) {
      if (!holds(model, layout, rank, parameter)) continue;
      LockstepRank<Real>& state = ranks[static_cast<std::size_t>(rank)];
      state.parameters[parameter.name] = parameters.at(parameter.name);
      state.gradients[parameter.name].resize(static_cast<std::size_t>(parameter.num_elements()));
    }
  }
  return ranks;
}

template <class Real>
ExpertParallelStep<Real> expert_parallel_local_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                         const Batch& batch, ExpertParallelLayout layout,
                                                         const std::optional<DropoutStep>& dropout) {
  ExpertParallelStep<Real> step;
  step.ranks = expert_parallel_ranks(model, parameters, layout);
  step.losses.resize(step.ranks.size());
  step.routing.resize(step.ranks.size());
  validate_tokens(batch, model.vocabulary);
  const Pass<Real> pass{.valid_tokens = batch.valid_tokens(), .global_rows = batch.rows, .dropout = dropout};
  for (int micro_batch = 0; micro_batch < layout.micro_batches; ++micro_batch) {
    std::vector<Batch> batches;
    for (int rank = 0; rank < layout.data; ++rank) {
      const Interval rows = micro_batch_rows(batch.rows, layout.data, rank, layout.micro_batches, micro_batch);
      batches.push_back(slice_rows(batch, rows.begin, rows.size()));
    }
    MicroBatch<Real>(model, layout, std::move(batches), pass, step.ranks, step.routing).forward_and_backward(step.losses);
  }
  return step;
}

template <class Real>
RankGradients<Real> expert_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                                              ExpertParallelLayout layout, const std::optional<DropoutStep>& dropout) {
  const ExpertParallelStep<Real> step = expert_parallel_local_gradients(model, parameters, batch, layout, dropout);
  RankGradients<Real> result{0.0, zero_tensors<Real>(model)};
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const std::span<Real> sum = tensor(result.gradients, parameter.name);
    for (int rank = 0; rank < layout.data; ++rank) {
      if (!holds(model, layout, rank, parameter)) continue;
      add<Real>(sum, step.ranks[static_cast<std::size_t>(rank)].gradients.at(parameter.name), sum);
    }
  }
  for (const double loss_of_rank : step.losses) result.loss += loss_of_rank;
  for (const RoutingRecord& record : step.routing) result.routing.add(record);
  return result;
}

template std::vector<LockstepRank<float>> expert_parallel_ranks(const GptConfig&, const NamedTensors<float>&,
                                                                ExpertParallelLayout);
template std::vector<LockstepRank<double>> expert_parallel_ranks(const GptConfig&, const NamedTensors<double>&,
                                                                 ExpertParallelLayout);
template ExpertParallelStep<float> expert_parallel_local_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                                   ExpertParallelLayout, const std::optional<DropoutStep>&);
template ExpertParallelStep<double> expert_parallel_local_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                                    ExpertParallelLayout, const std::optional<DropoutStep>&);
template RankGradients<float> expert_parallel_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                        ExpertParallelLayout, const std::optional<DropoutStep>&);
template RankGradients<double> expert_parallel_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                         ExpertParallelLayout, const std::optional<DropoutStep>&);

}  // namespace tandem::reference
