// SPDX-License-Identifier: Apache-2.0
// Operations of step programs on a described cluster.
#include <array>
#include <memory>
#include <utility>

#include "optimized/engine/local_model.h"
#include "optimized/engine/parameter_store.h"
#include "optimized/scaling/layer_cost.h"
#include "optimized/scaling/replay.h"

namespace tandem {
namespace {

Workload workload_of(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence) {
  Workload workload;
  workload.model = shape_of(model);
  workload.plan = plan;
  workload.sequence = sequence;
  return workload;
}

class ClusterCost {
 public:
  ClusterCost(ClusterSpec cluster, const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence)
      : cluster_(std::move(cluster)),
        workload_(workload_of(plan, model, sequence)),
        costs_(cluster_),
        layers_(workload_, costs_),
        grid_(plan),
        local_(local_model(model, plan, grid_, 0)) {
    for (std::size_t axis = 0; axis < kGroupAxes; ++axis) {
      groups_[axis] = placement(plan, static_cast<GroupAxis>(axis), cluster_);
    }
    const PassTriple embedding = layers_.embedding(), head = layers_.head();
    embedding_forward_ = embedding.forward.compute;
    embedding_backward_ = embedding.backward_weight.compute;
    head_ = head.forward.compute + head.backward_input.compute + head.backward_weight.compute;
    for (int stage = 0; stage < plan.parallel.pipeline; ++stage) {
      double elements = 0;
      for (const LocalParameter& parameter : local_parameters(model, plan, grid_, grid_.rank_of({.pipeline = stage}))) {
        elements += static_cast<double>(parameter.num_elements());
      }
      parameters_.push_back(elements);
    }
  }

  [[nodiscard]] double seconds(const Operation& op, int stage) const {
    switch (op.kind) {
      case OpKind::compute: return op.layer >= 0 ? of_block(op) : of_end(op);
      case OpKind::communicate: return communication(op, stage);
      case OpKind::optimizer: return update(stage);
      default: return 0;  // the update reads gradients for the norm, too
    }
  }

 private:
  [[nodiscard]] double communication(const Operation& op, int stage) const {
    const auto bytes = static_cast<double>(op.bytes);
    if (op.collective == Collective::send) return 0;
    if (op.collective != Collective::recv) {
      return costs_.collective_seconds(op.collective, bytes, groups_[static_cast<std::size_t>(op.axis)]);
    }
    return costs_.message_seconds(bytes, costs_.level_between(op.peer, grid_.rank_of({.pipeline = stage})));
  }

  [[nodiscard]] double update(int stage) const {
    const TrainingPlan& plan = workload_.plan;
    const double owners = plan.zero_stage >= 1 ? plan.parallel.data * plan.parallel.context : 1;
    const double bytes = update_bytes_of_parameter(workload_.software.optimizer, layers_.gradient_bytes());
    return costs_.elementwise_seconds(parameters_[static_cast<std::size_t>(stage)] / owners * bytes);
  }

  // A product of [tokens, inner] and [inner, outer], or for its gradients the same three sizes in another order. The tokens
  // follow from the FLOPs, also of a part of them.
  [[nodiscard]] double product(double tokens, double inner, double outer, Phase phase) const {
    const std::string& dtype = workload_.plan.precision;
    if (phase == Phase::backward_weight) return costs_.matmul_seconds(inner, outer, tokens, dtype);
    if (phase == Phase::backward_input) return costs_.matmul_seconds(tokens, inner, outer, dtype);
    return costs_.matmul_seconds(tokens, outer, inner, dtype);
  }
  static double tokens_of(double flops, double elements) { return flops / (2 * elements); }

  [[nodiscard]] double of_block(const Operation& op) const {
    const bool backward = op.phase == Phase::backward_input;
    const auto h = static_cast<double>(local_.model.hidden);
    const auto width = static_cast<double>(local_.attention_width()), mlp = static_cast<double>(local_.mlp_width());
    switch (op.part) {
      case Part::norm_1:
      case Part::norm_2: return layers_.norms(backward).seconds / 2;
      case Part::attention_merge:
      case Part::mlp_merge: return layers_.residuals(backward).seconds / 2;
      case Part::attention_core: return layers_.attention(backward).seconds / local_.context_ranks;
      case Part::attention_in: return product(tokens_of(op.flops, h * 3 * width), h, 3 * width, op.phase);
      case Part::attention_out: return product(tokens_of(op.flops, h * width), width, h, op.phase);
      case Part::mlp: {
        const double tokens = tokens_of(op.flops, 2 * h * mlp);
        return product(tokens, h, mlp, op.phase) + product(tokens, mlp, h, op.phase) + activation(op, backward);
      }
      case Part::router: return product(tokens_of(op.flops, h * local_.model.experts), h, local_.model.experts, op.phase);
      case Part::experts: return experts(op.flops, op.phase) + activation(op, backward);
      case Part::block: return weights(op.flops);
      default: return 0;  // dispatch and combine copy what their all-to-all carries
    }
  }

  // Pieces of a product share its activation function.
  [[nodiscard]] double activation(const Operation& op, bool backward) const {
    if (op.flops <= 0) return 0;
    const bool in_pieces = local_.tensor_chunks > 1 && local_.sequence_parallel && local_.tensor_ranks > 1;
    return layers_.activation(backward).seconds / (in_pieces ? local_.tensor_chunks : 1);
  }

  [[nodiscard]] double experts(double flops, Phase phase) const {
    const auto h = static_cast<double>(local_.model.hidden), mlp = static_cast<double>(local_.mlp_width());
    const double each = tokens_of(flops, 2 * h * mlp) / local_.experts();
    return local_.experts() * (product(each, h, mlp, phase) + product(each, mlp, h, phase));
  }

  [[nodiscard]] double weights(double flops) const {
    const auto h = static_cast<double>(local_.model.hidden);
    const auto width = static_cast<double>(local_.attention_width()), mlp = static_cast<double>(local_.mlp_width());
    const bool dense = local_.model.experts == 0;
    const double attention_elements = h * 4 * width;
    const double tokens = dense ? tokens_of(flops, attention_elements + 2 * h * mlp) : dense_tokens();
    const Phase phase = Phase::backward_weight;
    const double attention = product(tokens, h, 3 * width, phase) + product(tokens, width, h, phase);
    if (dense) return attention + product(tokens, h, mlp, phase) + product(tokens, mlp, h, phase);
    const double of_router = 2 * tokens * h * local_.model.experts;
    return attention + product(tokens, h, local_.model.experts, phase) +
           experts(flops - 2 * tokens * attention_elements - of_router, phase);
  }

  [[nodiscard]] double dense_tokens() const {
    const TrainingPlan& plan = workload_.plan;
    return static_cast<double>(plan.batch.rows * workload_.sequence) / plan.parallel.data / plan.batch.micro_batches /
           plan.parallel.context;
  }

  // Embedding and head as LayerCost prices them. All of the head stands on head_loss, piece by piece of the tokens: there the
  // engine makes its gradients, too.
  [[nodiscard]] double of_end(const Operation& op) const {
    if (op.part == Part::embedding) return op.phase == Phase::forward ? embedding_forward_ : embedding_backward_;
    if (op.part != Part::head_loss) return 0;
    const auto vocabulary = static_cast<double>(local_.model.hidden * local_.vocabulary_rows());
    return head_ * tokens_of(op.flops / 2, vocabulary) / dense_tokens();
  }

  ClusterSpec cluster_;
  Workload workload_;
  CostModel costs_;
  LayerCost layers_;
  ProcessGrid grid_;
  LocalModel local_;
  std::array<GroupPlacement, kGroupAxes> groups_;
  double embedding_forward_ = 0, embedding_backward_ = 0, head_ = 0;  // seconds of computing
  std::vector<double> parameters_;                                    // [stages] elements on a rank
};

// Of the levels that a group crosses the outermost; -1: it is one rank.
int level_of(const GroupPlacement& group) {
  for (std::size_t level = group.ranks_in_island.size(); level-- > 0;) {
    const int below = level > 0 ? group.ranks_in_island[level - 1] : 1;
    if (group.ranks_in_island[level] > below) return static_cast<int>(level);
  }
  return -1;
}

}  // namespace

OperationCost cost_on(const ClusterSpec& cluster, const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence) {
  const auto cost = std::make_shared<const ClusterCost>(cluster, plan, model, sequence);
  return [cost](const Operation& operation, int stage) { return cost->seconds(operation, stage); };
}

SharesLinks shares_links_on(const ClusterSpec& cluster, const TrainingPlan& plan) {
  std::array<int, kGroupAxes> levels{};
  for (std::size_t axis = 0; axis < kGroupAxes; ++axis) {
    levels[axis] = level_of(placement(plan, static_cast<GroupAxis>(axis), cluster));
  }
  return [levels](GroupAxis a, GroupAxis b) {
    const int level = levels[static_cast<std::size_t>(a)];
    return level >= 0 && level == levels[static_cast<std::size_t>(b)];
  };
}

}  // namespace tandem
