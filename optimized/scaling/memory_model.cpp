// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/memory_model.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/scaling/layer_memory.h"

namespace tandem {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

// Elements that a rank holds, by how many ranks hold the same.
struct Elements {
  double dense = 0;    // over data and context ranks
  double experts = 0;  // over those with the same experts
  double largest = 0;  // of the units that are gathered or reduced as one
};

double split_rows(std::int64_t rows, int degree) { return std::ceil(real(rows) / degree); }

class RankMemory {
 public:
  RankMemory(const Workload& workload, const ClusterSpec& cluster)
      : workload_(workload),
        plan_(workload.plan),
        model_(workload.model),
        cluster_(cluster),
        layout_(pipeline_layout(workload)),
        layer_(layer_memory(workload)),
        tokens_(real(micro_batch_rows(plan_)) * real(workload.tokens_per_row()) / plan_.parallel.context) {}

  [[nodiscard]] int ranks() const { return layout_.ranks; }

  [[nodiscard]] MemoryEstimate of(int rank) const {
    MemoryEstimate memory;
    std::int64_t layers = 0, most = 0;
    for (int chunk = 0; chunk < layout_.chunks; ++chunk) {
      const std::int64_t here = layout_.layers[static_cast<std::size_t>(layout_.stage_of(rank, chunk))].size();
      layers += here;
      most = std::max(most, here);
    }
    state(elements_of(rank, layers), memory);
    activations(rank, real(layers) / layout_.chunks, memory);
    communication(elements_of(rank, layers), most, memory);
    memory.reserved = reserved();
    memory.limit = cluster_.device.memory_bytes;
    memory.worst_pipeline_rank = rank;
    return memory;
  }

 private:
  [[nodiscard]] Elements elements_of(int rank, std::int64_t layers) const {
    Elements elements;
    const double h = real(model_.hidden);
    const double table = split_rows(model_.vocabulary, plan_.parallel.tensor) * h;
    const double norm = (model_.rms_norm ? 1 : 2) * h;
    elements.dense = real(layers) * layer_.dense_elements;
    elements.experts = real(layers) * layer_.expert_elements;
    elements.largest = layers > 0 ? layer_.dense_elements + layer_.expert_elements : 0;
    const bool first = layout_.holds_embedding(rank);
    const bool last = layout_.holds_head(rank);
    if (first) elements.dense += table + (model_.learned_positions ? real(model_.sequence) * h : 0);
    if (last) elements.dense += norm + (model_.tied && first ? 0 : table);
    if (first || last) elements.largest = std::max(elements.largest, table);
    return elements;
  }

  void state(const Elements& elements, MemoryEstimate& memory) const {
    const Numerics& numerics = plan_.numerics;
    const double replicas = static_cast<double>(plan_.parallel.data) * plan_.parallel.context;
    const double all = elements.dense + elements.experts;
    const double owned = elements.dense / replicas + elements.experts / replicas * plan_.parallel.expert;
    const auto bytes = [](DType dtype) { return static_cast<double>(size_bytes(dtype)); };
    const double moment = workload_.software.optimizer == "adam_bf16" ? 2 : bytes(numerics.master);
    const double master = numerics.has_master_copy() ? bytes(numerics.master) : 0;
    memory.parameters = bytes(numerics.storage) * (plan_.zero_stage >= 3 ? owned : all);
    memory.gradients = bytes(numerics.accumulate) * (deals_gradients() ? owned : all) +
                       workload_.software.extra_bytes_per_parameter * (plan_.zero_stage >= 3 ? owned : all);
    if (plan_.offload == "none") memory.optimizer = (2 * moment + master) * (plan_.zero_stage >= 1 ? owned : all);
  }

  // In stage 2 whole sums are kept where they are dealt once a step.
  [[nodiscard]] bool deals_gradients() const {
    return plan_.zero_stage >= 3 || (plan_.zero_stage == 2 && workload_.software.scatter_each_micro_batch);
  }

  void activations(int rank, double layers_of_chunk, MemoryEstimate& memory) const {
    const double slices = plan_.sequence_parallel ? plan_.parallel.tensor : 1;
    const double element = layer_.element_bytes;
    const double h = real(model_.hidden);
    const double pairs = peak_in_flight(plan_.pipeline, layout_.ranks, rank, plan_.batch.micro_batches);
    double kept = pairs * layers_of_chunk * layer_.kept;
    if (layout_.holds_embedding(rank) && layer_.dropout) kept += pairs / layout_.chunks * h / slices;
    double head = 0;
    if (layout_.holds_head(rank)) {
      // Bytes of a logit that are kept, and that exist besides while the loss is passed backward.
      const std::string& loss = workload_.software.loss;
      const double logits = real(model_.vocabulary) / plan_.parallel.tensor;
      const double heads = plan_.pipeline.schedule == "gpipe" ? plan_.batch.micro_batches : 1;
      kept += heads * (2 * element * h / slices + (loss == "fused" ? element : 4) * logits);
      head = (loss == "fp32" ? 2 * element : loss == "unfused" ? element + 8 : 0) * logits;
    }
    memory.activations = tokens_ * kept * (1 - workload_.software.host_offload_share);
    memory.workspace = tokens_ * std::max(head, layers_of_chunk > 0 ? layer_.again + layer_.backward : 0.0);
  }

  void communication(const Elements& elements, std::int64_t layers_of_chunk, MemoryEstimate& memory) const {
    const double tensor = plan_.parallel.tensor;
    const double element = layer_.element_bytes;
    const double h = real(model_.hidden);
    const double message = element * tokens_ * h;
    if (layout_.ranks > 1) {
      memory.communication += 2 * message / (plan_.sequence_parallel || workload_.software.scatter_gather_pipeline ? tensor : 1);
    }
    if (plan_.sequence_parallel) memory.communication += message;  // whole rows before a product
    if (plan_.parallel.context > 1) memory.communication += 2 * element * tokens_ * layer_.key_value_width;
    const double replicas = static_cast<double>(plan_.parallel.data) * plan_.parallel.context;
    if (replicas == 1) return;
    // Two units are whole at once: one in use and the next on its way.
    const double window =
        std::min(2.0 * elements.largest, std::max(real(layers_of_chunk) * layer_.dense_elements, elements.largest));
    if (plan_.zero_stage >= 3) memory.communication += static_cast<double>(size_bytes(plan_.numerics.compute)) * window;
    if (deals_gradients()) memory.communication += static_cast<double>(size_bytes(plan_.numerics.reduce)) * elements.largest;
  }

  // Context of the driver, buffers of the communication library, and what the allocator cannot use.
  [[nodiscard]] double reserved() const {
    constexpr double kMost = 4e9;
    constexpr double kShare = 0.05;
    const auto constant = cluster_.device.constants.find("reserved_bytes");
    if (constant != cluster_.device.constants.end()) return constant->second;
    return std::min(kMost, kShare * cluster_.device.memory_bytes);
  }

  const Workload& workload_;
  const TrainingPlan& plan_;
  const ModelShape& model_;
  const ClusterSpec& cluster_;
  const PipelineLayout layout_;
  const LayerMemory layer_;
  const double tokens_;  // of a micro-batch, on one context rank
};

}  // namespace

MemoryEstimate estimate_memory(const Workload& workload, const ClusterSpec& cluster, const PitfallSet& pitfalls) {
  const RankMemory memory(workload, cluster);
  MemoryEstimate worst = memory.of(memory.ranks() - 1);
  if (pitfalls.on(Pitfall::memory_of_last_stage_for_all)) return worst;
  for (int rank = memory.ranks() - 2; rank >= 0; --rank) {
    const MemoryEstimate here = memory.of(rank);
    if (here.total() >= worst.total()) worst = here;
  }
  return worst;
}

double activation_bytes_of_layer(const Workload& workload, double rows) {
  return rows * real(workload.tokens_per_row()) / workload.plan.parallel.context * layer_memory(workload).kept;
}

}  // namespace tandem
