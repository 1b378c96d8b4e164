// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/layer_memory.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

// Bytes of a token by what recomputation may drop.
struct Parts {
  double input = 0;         // of the layer
  double second_input = 0;  // of the second norm
  double norm_outputs = 0;
  double queries = 0, keys = 0, attention_output = 0, statistics = 0;
  double scores = 0;
  double mlp_before = 0, mlp_after = 0;
  double masks = 0;
  [[nodiscard]] double all() const {
    return input + second_input + norm_outputs + queries + 2 * keys + attention_output + statistics + scores + mlp_before +
           mlp_after + masks;
  }
};

double key_value_width(const Workload& workload) {
  const ModelShape& model = workload.model;
  const std::int64_t heads = std::max<std::int64_t>(1, model.key_value_heads() / workload.plan.parallel.tensor);
  return real(heads * model.head_size());
}

// Of an element of what enters a linear layer, kept for the gradient of its weights: quantized, with the scales of its blocks.
double input_bytes(const Workload& workload, double element) {
  const std::string& products = workload.software.product_dtype;
  if (products.starts_with("fp8")) return 1;
  if (products == "mxfp8") return 1 + 1.0 / 32;
  return products == "nvfp4" ? 0.5 + 1.0 / 16 : element;
}

Parts parts_of(const Workload& workload, double element, bool dropout) {
  const ModelShape& model = workload.model;
  const double tensor = workload.plan.parallel.tensor;
  const double slices = workload.plan.sequence_parallel ? tensor : 1;
  const double h = real(model.hidden);
  // With experts every token is at each of its choices, in places of which some are empty.
  const double copies = model.experts > 0 ? 1.25 * model.expert_choices : 1;
  const double width = copies * real(model.mlp_width()) / tensor;
  Parts parts;
  parts.input = parts.second_input = element * h / slices;
  const double input = input_bytes(workload, element);
  parts.norm_outputs = 2 * input * h / slices + (model.experts > 0 ? 2 * copies * element * h : 0);
  parts.queries = parts.attention_output = element * h / tensor;
  if (input < element) parts.attention_output += input * h / tensor;  // attention needs it unquantized
  parts.keys = element * key_value_width(workload);
  const double heads = real(model.heads) / tensor;
  if (workload.software.fused_attention) {
    parts.statistics = 4 * heads;
  } else {
    parts.scores = (dropout ? 2 * element + 1 : element) * heads * real(workload.tokens_per_row());
  }
  parts.mlp_before = (model.gated ? 2 : 1) * element * width;
  parts.mlp_after = input * width;
  if (dropout) parts.masks = 2 * h / slices;
  return parts;
}

double kept_selectively(const Workload& workload, const Parts& parts) {
  const std::string& kind = workload.software.selective;
  if (kind == "norms") return parts.all() - parts.norm_outputs - parts.mlp_after;
  // Of the products in order (queries, keys, values, output, gate or first, up, last) every other one, and attention's output.
  if (kind == "products") {
    const double gates = workload.model.gated ? 0.5 : 1;
    return parts.input + 2 * parts.queries + parts.keys + parts.statistics + gates * parts.mlp_before + parts.second_input;
  }
  return parts.all() - parts.scores;
}

void recompute(const Workload& workload, const Parts& parts, LayerMemory& layer) {
  const RecomputeConfig& recompute = workload.plan.recompute;
  layer.kept = parts.all();
  // Weight parts that are put off need what was kept for them.
  if (recompute.mode == "none" || workload.plan.pipeline.schedule.starts_with("zb-")) return;
  if (recompute.mode == "selective") {
    layer.kept = kept_selectively(workload, parts);
    layer.again = parts.all() - layer.kept;
    return;
  }
  const double share =
      workload.software.recomputed_layers > 0 ? workload.software.recomputed_layers / real(workload.model.layers) : 1;
  layer.kept = share * parts.input / recompute.layers + (1 - share) * parts.all();
  layer.again = recompute.layers * parts.all() - parts.input;
}

double elements_of_layer(const Workload& workload, bool experts) {
  const ModelShape& model = workload.model;
  const double tensor = workload.plan.parallel.tensor;
  const double h = real(model.hidden);
  const double width = real(model.mlp_width()) / tensor;
  const double keys = key_value_width(workload);
  double mlp = (model.gated ? 3 : 2) * h * width;
  double attention = 2 * h * h / tensor + 2 * h * keys;
  if (model.biases) {
    // Those of rows that are summed over tensor ranks are on each of them.
    mlp += (model.gated ? 2 : 1) * width + h;
    attention += h / tensor + 2 * keys + h;
  }
  if (experts) return model.experts > 0 ? static_cast<double>(model.experts) / workload.plan.parallel.expert * mlp : 0;
  const double norms = 2 * (model.rms_norm ? 1 : 2) * h;
  return attention + norms + (model.experts > 0 ? h * model.experts : mlp);
}

}  // namespace

LayerMemory layer_memory(const Workload& workload) {
  LayerMemory layer;
  layer.dense_elements = elements_of_layer(workload, false);
  layer.expert_elements = elements_of_layer(workload, true);
  layer.element_bytes = static_cast<double>(size_bytes(workload.plan.numerics.storage));
  layer.key_value_width = key_value_width(workload);
  layer.dropout = workload.model.biases;
  const Parts parts = parts_of(workload, layer.element_bytes, layer.dropout);
  recompute(workload, parts, layer);
  // The gradient of the stream and of the widest tensor inside.
  layer.backward =
      2 * parts.input + std::max({parts.mlp_before + parts.mlp_after, 2 * parts.queries + 2 * parts.keys, parts.scores});
  return layer;
}

int peak_in_flight(const PipelineConfig& config, int ranks, int rank, int micro_batches) {
  const std::string_view schedule = config.effective_schedule();
  if (schedule == "gpipe") return micro_batches;
  if (schedule == "zb-h1") return std::min(micro_batches, ranks);
  if (schedule == "zb-2p") return std::min(micro_batches, 2 * ranks - 1);
  if (schedule == "zb-v") return 2 * std::min(micro_batches, ranks);
  if (schedule == "1f1b") return std::min(micro_batches, ranks - rank);
  TANDEM_CHECK(schedule == "interleaved", fmt::format("there is no schedule '{}'", schedule));
  const int first = 2 * (ranks - rank - 1) + (config.chunks - 1) * ranks;
  return std::min(config.chunks * micro_batches, first + 1);
}

}  // namespace tandem
