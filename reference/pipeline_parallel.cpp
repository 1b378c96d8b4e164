// SPDX-License-Identifier: Apache-2.0
#include "reference/pipeline_parallel.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/model_ends.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// What one rank owns during a step.
template <class Real>
struct PipelineRank {
  NamedTensors<Real> parameters;
  RankGradients<Real> result;
};

template <class Real>
std::vector<PipelineRank<Real>> pipeline_ranks(const GptConfig& model, const NamedTensors<Real>& parameters,
                                               const PipelineLayout& stages) {
  std::vector<PipelineRank<Real>> ranks(static_cast<std::size_t>(stages.ranks));
  for (int r = 0; r < stages.ranks; ++r) {
    PipelineRank<Real>& rank = ranks[static_cast<std::size_t>(r)];
    for (const ParameterSpec& parameter : pipeline_parameters(model, stages, r)) {
      const auto values = tensor(parameters, parameter.name);
      rank.parameters[parameter.name] = {values.begin(), values.end()};
      rank.result.gradients[parameter.name].assign(values.size(), Real{0});
    }
  }
  return ranks;
}

/// One micro-batch on its way through all stages.
template <class Real>
class PipelinePass {
 public:
  PipelinePass(const GptConfig& model, const PipelineLayout& stages, const Batch& batch, const Pass<Real>& pass,
               std::vector<PipelineRank<Real>>& ranks, PipelineParallelExchanges& exchanges)
      : model_(model),
        stages_(stages),
        batch_(batch),
        ranks_(ranks),
        exchanges_(exchanges),
        passes_(ranks.size(), pass),
        blocks_(static_cast<std::size_t>(model.layers)) {
    for (std::size_t r = 0; r < ranks.size(); ++r) passes_[r].routing = &ranks[r].result.routing;
  }

  void run() {
    std::vector<Real> message;
    for (int stage = 0; stage < stages_.stages(); ++stage) message = forward(stage, std::move(message));
    for (int stage = stages_.stages() - 1; stage >= 0; --stage) message = backward(stage, std::move(message));
  }

 private:
  [[nodiscard]] std::size_t rank_of(int stage) const { return static_cast<std::size_t>(stages_.rank_of_stage(stage)); }
  [[nodiscard]] PassContext<Real> context(int stage) const {
    return {model_, ranks_[rank_of(stage)].parameters, batch_, passes_[rank_of(stage)]};
  }
  [[nodiscard]] NamedTensors<Real>& gradients(int stage) const { return ranks_[rank_of(stage)].result.gradients; }
  [[nodiscard]] const Interval& layers(int stage) const { return stages_.layers[static_cast<std::size_t>(stage)]; }
  [[nodiscard]] bool is_last(int stage) const { return stage == stages_.stages() - 1; }
  [[nodiscard]] bool crosses_ranks(int stage, int next) const { return rank_of(stage) != rank_of(next); }

  /// Takes what the stage before sent and returns what the stage after receives.
  std::vector<Real> forward(int stage, std::vector<Real> received) {
    const PassContext<Real> own = context(stage);
    std::vector<Real> h = stage == 0 ? embed(own) : std::move(received);
    for (std::int64_t layer = layers(stage).begin; layer < layers(stage).end; ++layer) {
      block_forward(own, static_cast<int>(layer), h, blocks_[static_cast<std::size_t>(layer)]);
    }
    if (is_last(stage)) {
      head_ = head(own, std::move(h));
      ranks_[rank_of(stage)].result.loss += head_loss(own, head_);
      return {};
    }
    if (crosses_ranks(stage, stage + 1)) exchanges_.activations += std::ssize(h);
    return h;
  }

  /// Takes the gradient of what the stage sent and returns that of what it received.
  std::vector<Real> backward(int stage, std::vector<Real> received) {
    const PassContext<Real> own = context(stage);
    std::vector<Real> dh = is_last(stage) ? head_loss_backward(own, head_, gradients(stage)) : std::move(received);
    for (std::int64_t layer = layers(stage).end - 1; layer >= layers(stage).begin; --layer) {
      block_backward(own, static_cast<int>(layer), blocks_[static_cast<std::size_t>(layer)], dh, gradients(stage));
    }
    if (stage == 0) {
      embed_backward<Real>(own, dh, gradients(stage));
      return {};
    }
    if (crosses_ranks(stage, stage - 1)) exchanges_.gradients += std::ssize(dh);
    return dh;
  }

  const GptConfig& model_;
  const PipelineLayout& stages_;
  const Batch& batch_;
  std::vector<PipelineRank<Real>>& ranks_;
  PipelineParallelExchanges& exchanges_;
  std::vector<Pass<Real>> passes_;  // [ranks]
  std::vector<BlockActivations<Real>> blocks_;
  HeadActivations<Real> head_;
};

}  // namespace

PipelineParallelLayout pipeline_stages(const GptConfig& model, int ranks, const std::vector<int>& stage_layers, int micro_batches,
                                       bool v_shaped) {
  const auto stages = static_cast<int>(stage_layers.size());
  const int layers = std::accumulate(stage_layers.begin(), stage_layers.end(), 0);
  TANDEM_CHECK(ranks > 0 && stages > 0 && stages % ranks == 0, fmt::format("{} stages on {} ranks", stages, ranks));
  TANDEM_CHECK(layers == model.layers, fmt::format("stages of {} layers, the model has {}", layers, model.layers));
  TANDEM_CHECK(!v_shaped || stages == 2 * ranks, fmt::format("{} stages on {} ranks of a V", stages, ranks));
  PipelineParallelLayout layout{{ranks, stages / ranks, v_shaped, {}}, micro_batches};
  std::int64_t begin = 0;
  for (const int count : stage_layers) {
    layout.stages.layers.push_back({begin, begin + count});
    begin += count;
  }
  return layout;
}

std::vector<ParameterSpec> pipeline_parameters(const GptConfig& model, const PipelineLayout& stages, int rank) {
  const auto holds = [&](const ParameterSpec& parameter) {
    const bool is_embedding = parameter.name == "wte.weight" || parameter.name == "wpe.weight";
    const bool is_head = parameter.name == "ln_f.weight" || parameter.name == "ln_f.bias" || parameter.name == head_name(model);
    if (is_embedding && stages.holds_embedding(rank)) return true;
    if (is_head && stages.holds_head(rank)) return true;
    for (int stage = 0; stage < stages.stages(); ++stage) {
      const Interval& layers = stages.layers[static_cast<std::size_t>(stage)];
      const bool in_stage = parameter.layer >= layers.begin && parameter.layer < layers.end;
      if (in_stage && stages.rank_of_stage(stage) == rank) return true;
    }
    return false;
  };
  std::vector<ParameterSpec> own;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    if (holds(parameter)) own.push_back(parameter);
  }
  return own;
}

bool has_two_embeddings(const GptConfig& model, const PipelineLayout& stages) {
  return model.tied && stages.rank_of_stage(0) != stages.rank_of_stage(stages.stages() - 1);
}

PipelineParallelExchanges pipeline_parallel_exchanges(const GptConfig& model, const PipelineLayout& stages, std::int64_t tokens) {
  if (stages.ranks == 1) return {};
  const std::int64_t boundaries = stages.stages() - (stages.v_shaped ? 2 : 1);
  const std::int64_t sent = boundaries * tokens * model.hidden;
  return {sent, sent, has_two_embeddings(model, stages) ? 2 * model.vocabulary * model.hidden : 0};
}

template <class Real>
PipelineParallelStep<Real> pipeline_parallel_local_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                             const Batch& batch, const PipelineParallelLayout& layout,
                                                             const Pass<Real>& pass) {
  Pass<Real> of_micro_batch = pass;
  if (pass.global_rows == 0) of_micro_batch.global_rows = batch.rows;
  require_batch_fits(PassContext<Real>{model, parameters, batch, of_micro_batch});
  std::vector<PipelineRank<Real>> ranks = pipeline_ranks(model, parameters, layout.stages);
  PipelineParallelStep<Real> step;
  for (int i = 0; i < layout.micro_batches; ++i) {
    const Interval rows = balanced_part(batch.rows, layout.micro_batches, i);
    if (rows.size() == 0) continue;
    const Batch micro_batch = slice_rows(batch, rows.begin, rows.size());
    PipelinePass<Real>(model, layout.stages, micro_batch, of_micro_batch, ranks, step.exchanges).run();
  }
  for (PipelineRank<Real>& rank : ranks) step.ranks.push_back(std::move(rank.result));
  return step;
}

template <class Real>
void sum_tied_embedding(const GptConfig& model, const PipelineLayout& stages, PipelineParallelStep<Real>& step) {
  if (!has_two_embeddings(model, stages)) return;
  std::vector<std::span<Real>> copies;
  for (const int stage : {0, stages.stages() - 1}) {
    const auto rank = static_cast<std::size_t>(stages.rank_of_stage(stage));
    copies.push_back(tensor(step.ranks[rank].gradients, "wte.weight"));
  }
  all_reduce_sum<Real>(copies);
  step.exchanges.embedding += 2 * std::ssize(copies.front());
}

template <class Real>
PipelineParallelStep<Real> pipeline_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters,
                                                       const Batch& batch, const PipelineParallelLayout& layout,
                                                       const Pass<Real>& pass) {
  PipelineParallelStep<Real> step = pipeline_parallel_local_gradients(model, parameters, batch, layout, pass);
  sum_tied_embedding(model, layout.stages, step);
  return step;
}

template <class Real>
NamedTensors<Real> joined_stages(const GptConfig& model, const PipelineLayout& stages,
                                 const std::vector<RankGradients<Real>>& ranks) {
  NamedTensors<Real> global;
  const auto first = static_cast<std::size_t>(stages.rank_of_stage(0));
  for (const auto& rank : ranks) global.insert(rank.gradients.begin(), rank.gradients.end());
  global["wte.weight"] = ranks[first].gradients.at("wte.weight");
  require_parameters_of(model, global);
  return global;
}

template <class Real>
double pipeline_parallel_norm(const GptConfig& model, const PipelineLayout& stages,
                              const std::vector<RankGradients<Real>>& ranks) {
  double squares = 0.0;
  for (int r = 0; r < stages.ranks; ++r) {
    for (const ParameterSpec& parameter : pipeline_parameters(model, stages, r)) {
      if (parameter.name == "wte.weight" && !stages.holds_embedding(r)) continue;
      const auto values = tensor(ranks[static_cast<std::size_t>(r)].gradients, parameter.name);
      for (const Real value : values) squares += static_cast<double>(value) * static_cast<double>(value);
    }
  }
  return std::sqrt(squares);
}

template PipelineParallelStep<float> pipeline_parallel_local_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                                       const PipelineParallelLayout&, const Pass<float>&);
template PipelineParallelStep<double> pipeline_parallel_local_gradients(const GptConfig&, const NamedTensors<double>&,
                                                                        const Batch&, const PipelineParallelLayout&,
                                                                        const Pass<double>&);
template void sum_tied_embedding(const GptConfig&, const PipelineLayout&, PipelineParallelStep<float>&);
template void sum_tied_embedding(const GptConfig&, const PipelineLayout&, PipelineParallelStep<double>&);
template PipelineParallelStep<float> pipeline_parallel_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                                 const PipelineParallelLayout&, const Pass<float>&);
template PipelineParallelStep<double> pipeline_parallel_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                                  const PipelineParallelLayout&, const Pass<double>&);
template NamedTensors<float> joined_stages(const GptConfig&, const PipelineLayout&, const std::vector<RankGradients<float>>&);
template NamedTensors<double> joined_stages(const GptConfig&, const PipelineLayout&, const std::vector<RankGradients<double>>&);
template double pipeline_parallel_norm(const GptConfig&, const PipelineLayout&, const std::vector<RankGradients<float>>&);
template double pipeline_parallel_norm(const GptConfig&, const PipelineLayout&, const std::vector<RankGradients<double>>&);

}  // namespace tandem::reference
