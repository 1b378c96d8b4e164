// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/simulator_step.h"

#include <algorithm>
#include <cmath>

#include "core/process_grid.h"
#include "optimized/scaling/layer_cost.h"
#include "optimized/scaling/simulator_pipeline.h"

namespace tandem {
namespace {

class StepSimulation {
 public:
  StepSimulation(const Workload& workload, const ClusterSpec& cluster, const SimulateOptions& options)
      : workload_(workload),
        plan_(workload.plan),
        options_(options),
        costs_(cluster),
        grid_(plan_),
        layers_(workload, costs_, options.pitfalls.on(Pitfall::contention_ignored)),
        layout_(pipeline_layout(workload)) {
    price_stages();
  }

  StepEstimate run() {
    const PipelinePlay play = play_pipeline(plan_.pipeline, layout_, plan_.batch.micro_batches, times());
    StepEstimate estimate;
    StepParts parts;
    for (int rank = 0; rank < layout_.ranks; ++rank) {
      double hidden = 0;
      const StepParts mine = parts_of(rank, play, hidden);
      if (rank > 0 && mine.sum() <= parts.sum()) continue;
      parts = mine;
      estimate.hidden_communication_seconds = hidden;
    }
    add_jitter(parts);
    parts.input = input_seconds(parts.sum());
    if (has(Pitfall::communication_counted_twice)) estimate.hidden_communication_seconds += parts.communication();
    estimate.parts = parts;
    estimate.step_seconds = parts.sum();
    return estimate;
  }

 private:
  [[nodiscard]] bool has(Pitfall pitfall) const { return options_.pitfalls.on(pitfall); }

  void price_stages() {
    const bool recomputes = plan_.recompute.mode != "none";
    const PassTriple recomputed = layers_.layer(recomputes);
    const int some = recomputes && plan_.recompute.mode == "full" ? workload_.software.recomputed_layers : 0;
    const PassTriple kept = some > 0 ? layers_.layer(false) : recomputed;
    const double share = some > 0 ? static_cast<double>(some) / static_cast<double>(workload_.model.layers) : 1;
    for (int stage = 0; stage < layout_.stages(); ++stage) {
      const auto count = static_cast<double>(layout_.layers[static_cast<std::size_t>(stage)].size());
      PassTriple sum = recomputed.times(count * share);
      sum += kept.times(count * (1 - share));
      if (stage == 0) sum += layers_.embedding();
      if (stage + 1 == layout_.stages()) sum += layers_.head();
      stages_.push_back(sum);
    }
  }

  [[nodiscard]] double hop_seconds(int stage) const {
    const int from = layout_.rank_of_stage(stage), to = layout_.rank_of_stage(stage + 1);
    if (from == to) return 0;
    const int level = costs_.level_between(grid_.rank_of({.pipeline = from}), grid_.rank_of({.pipeline = to}));
    double seconds = costs_.message_seconds(layers_.boundary_bytes(), level);
    if (workload_.software.scatter_gather_pipeline && !plan_.sequence_parallel) {
      const double whole = layers_.boundary_bytes() * plan_.parallel.tensor;
      seconds += costs_.collective_seconds(Collective::all_gather, whole, layers_.tensor_group());
    }
    return seconds;
  }

  [[nodiscard]] PipelineTimes times() const {
    PipelineTimes times;
    for (const PassTriple& stage : stages_) {
      times.forward.push_back(stage.forward.total());
      times.backward_input.push_back(stage.backward_input.total());
      times.backward_weight.push_back(stage.backward_weight.total());
    }
    for (int stage = 0; stage + 1 < layout_.stages(); ++stage) times.hop.push_back(hop_seconds(stage));
    times.sender_waits = !workload_.software.overlap_pipeline;
    return times;
  }

  [[nodiscard]] double parameters_of_stage(int stage) const {
    double sum = static_cast<double>(layout_.layers[static_cast<std::size_t>(stage)].size()) * layers_.layer_parameters();
    const bool last = stage + 1 == layout_.stages();
    if (stage == 0) sum += layers_.embedding_parameters();
    if (last && (!workload_.model.tied || layout_.ranks > 1)) sum += layers_.head_parameters();
    return sum;
  }

  [[nodiscard]] double parameters_of_rank(int rank) const {
    double sum = 0;
    for (int chunk = 0; chunk < layout_.chunks; ++chunk) sum += parameters_of_stage(layout_.stage_of(rank, chunk));
    return sum;
  }

  // Seconds after the rank's last slot until its gradients are summed, and those that were hidden before. Buckets of a layer each
  // become ready one after the other during the last backward pass of each stage.
  [[nodiscard]] double gradient_seconds(int rank, const PipelinePlay& play, double& hidden) const {
    if (plan_.zero_stage >= 2 && workload_.software.scatter_each_micro_batch) return 0;  // counted within the passes
    const Collective sum = plan_.zero_stage == 0 ? Collective::all_reduce : Collective::reduce_scatter;
    const double end = play.rank_end[static_cast<std::size_t>(rank)];
    double free = 0, total = 0;
    for (int chunk = layout_.chunks - 1; chunk >= 0; --chunk) {
      const int stage = layout_.stage_of(rank, chunk);
      const double bytes = parameters_of_stage(stage) * layers_.gradient_bytes();
      const double seconds = costs_.collective_seconds(sum, bytes, layers_.gradient_group());
      total += seconds;
      if (!workload_.software.overlap_gradients) continue;
      const PassTriple& pass = stages_[static_cast<std::size_t>(stage)];
      const double last = play.stage_end[static_cast<std::size_t>(stage)];
      const double backward = pass.backward_input.total() + pass.backward_weight.total();
      const double buckets = 1 + static_cast<double>(layout_.layers[static_cast<std::size_t>(stage)].size());
      const double first = last - backward * (1 - 1 / buckets);
      free = std::max(std::max(free, first) + seconds, last + seconds / buckets);
    }
    if (!workload_.software.overlap_gradients) return total;
    const double exposed = std::max(0.0, free - end);
    const double behind = std::max(0.0, total - exposed);
    const double lost = behind * costs_.constants().overlap_interference;
    hidden += behind - lost;
    return exposed + lost;
  }

  // Gathers of the distributed optimizer's parameters: behind the first forward pass, but for the first layer's.
  [[nodiscard]] double parameter_seconds(int rank, double& hidden) const {
    if (plan_.zero_stage != 1 && plan_.zero_stage != 2) return 0;
    const double seconds =
        costs_.collective_seconds(Collective::all_gather, parameters_of_rank(rank) * 2, layers_.gradient_group());
    if (!workload_.software.overlap_parameters) return seconds;
    double forward = 0;
    double count = 1;
    for (int chunk = 0; chunk < layout_.chunks; ++chunk) {
      const auto stage = static_cast<std::size_t>(layout_.stage_of(rank, chunk));
      forward += stages_[stage].forward.total();
      count += static_cast<double>(layout_.layers[stage].size());
    }
    const double behind = std::min(seconds * (1 - 1 / count), forward);
    const double lost = behind * costs_.constants().overlap_interference;
    hidden += behind - lost;
    return seconds - behind + lost;
  }

  [[nodiscard]] double optimizer_seconds(int rank) const {
    const double owners = plan_.zero_stage >= 1 ? plan_.parallel.data * plan_.parallel.context : 1;
    const double bytes = update_bytes_of_parameter(workload_.software.optimizer, layers_.gradient_bytes());
    return costs_.elementwise_seconds(parameters_of_rank(rank) / owners * bytes);
  }

  [[nodiscard]] double tied_embedding_seconds(int rank) const {
    const bool ends = layout_.holds_embedding(rank) || layout_.holds_head(rank);
    if (!workload_.model.tied || layout_.ranks == 1 || !ends || layout_.rank_of_stage(layout_.stages() - 1) == 0) return 0;
    const double bytes = layers_.head_parameters() * layers_.gradient_bytes();
    return costs_.collective_seconds(Collective::all_reduce, bytes, placement(plan_, GroupAxis::embedding, costs_.cluster()));
  }

  [[nodiscard]] StepParts parts_of(int rank, const PipelinePlay& play, double& hidden) const {
    PassSeconds busy;
    for (int chunk = 0; chunk < layout_.chunks; ++chunk) {
      const PassTriple& stage = stages_[static_cast<std::size_t>(layout_.stage_of(rank, chunk))];
      for (const PassSeconds& pass : {stage.forward, stage.backward_input, stage.backward_weight}) busy += pass;
    }
    busy = busy.times(plan_.batch.micro_batches);
    const auto at = static_cast<std::size_t>(rank);
    StepParts parts;
    parts.compute = busy.compute;
    parts.recompute = busy.recompute;
    parts.tensor = busy.tensor;
    parts.context = busy.context;
    parts.expert = busy.expert;
    parts.data = busy.data;
    // The same without messages tells waiting for bytes from waiting for work.
    const double without_messages = play.rank_end_with_free_messages[at];
    parts.bubble = std::max(0.0, without_messages - busy.total());
    parts.pipeline = std::max(0.0, play.rank_end[at] - without_messages);
    hidden = busy.hidden;
    parts.data += gradient_seconds(rank, play, hidden) + parameter_seconds(rank, hidden) + tied_embedding_seconds(rank);
    parts.optimizer = optimizer_seconds(rank);
    if (has(Pitfall::bubble_not_scaled_by_chunks)) parts.bubble *= layout_.chunks;
    return parts;
  }

  // Ranks of many islands wait for the slowest of them at every step.
  void add_jitter(StepParts& parts) const {
    const double step = parts.sum();
    std::int64_t below = 1;
    const std::int64_t world = plan_.parallel.world_size();
    for (const NetworkLevel& level : costs_.cluster().levels) {
      const std::int64_t devices = level.devices > 0 ? std::min<std::int64_t>(level.devices, world) : world;
      const double islands = static_cast<double>(devices) / static_cast<double>(below);
      if (islands > 1) parts.data += step * level.jitter * std::log2(islands);
      below = std::max(devices, below);
    }
  }

  [[nodiscard]] double input_seconds(double step) const {
    const double rate = costs_.cluster().storage.read_bytes_per_second_per_node;
    if (rate <= 0) return 0;
    const double rows = static_cast<double>(plan_.batch.rows) / plan_.parallel.data;
    const double devices = std::min(costs_.cluster().devices_per_node, plan_.parallel.world_size());
    const double bytes = 4.0 * rows * static_cast<double>(workload_.tokens_per_row()) * devices;
    return std::max(0.0, bytes / rate - step);  // read ahead while the step before is computed
  }

  const Workload& workload_;
  const TrainingPlan& plan_;
  const SimulateOptions& options_;
  CostModel costs_;
  ProcessGrid grid_;
  LayerCost layers_;
  PipelineLayout layout_;
  std::vector<PassTriple> stages_;
};

}  // namespace

StepEstimate play_step(const Workload& workload, const ClusterSpec& cluster, const SimulateOptions& options) {
  return StepSimulation(workload, cluster, options).run();
}

}  // namespace tandem
