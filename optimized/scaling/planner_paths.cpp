// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "optimized/scaling/planner_search.h"

namespace tandem::planner {
namespace {

std::string name_of(Recompute recompute) {
  return recompute == Recompute::none ? "none" : recompute == Recompute::selective ? "selective" : "full";
}

// A layout that rules change one after the other until it fits.
class Reasoning {
 public:
  Reasoning(const PlanQuery& query, std::string name)
      : query_(query), workload_(base_workload(query)), layout_(first_layout(query)) {
    path_.name = std::move(name);
    is_possible_ = degrees_fit(query, layout_) && layout_.tensor * layout_.pipeline * layout_.data == query.devices;
  }

  [[nodiscard]] PlannedLayout& layout() { return layout_; }
  [[nodiscard]] bool fits() { return is_possible_ && fits(layout_); }

  void decide(std::string rule, std::string choice) {
    path_.steps.push_back({std::move(rule), std::move(choice), memory_of(layout_)});
  }

  /// The lightest of these that fits, otherwise the last.
  void recompute_as_needed(std::initializer_list<Recompute> modes) {
    for (const Recompute mode : modes) {
      layout_.recompute = mode;
      if (fits()) return;
    }
  }

  /// Tensor degrees within a node, smallest first, until one fits; sequences are dealt along.
  void grow_tensor() {
    const int begin = layout_.tensor;
    for (const int tensor : divisors_of(std::min(query_.cluster.devices_per_node, query_.devices))) {
      if (fits()) break;
      if (tensor > layout_.tensor) with_degrees(tensor, layout_.pipeline);
    }
    const bool is_node = layout_.tensor == query_.cluster.devices_per_node;
    if (layout_.tensor > begin) {
      decide("tensor parallel, up to the node",
             fmt::format("tensor {}{}{}", layout_.tensor, is_node ? ": the node" : "", fits() ? ", fits" : ", does not fit yet"));
    } else {
      decide("tensor parallel, up to the node", fmt::format("tensor {}: heads, rows and node allow no more", layout_.tensor));
    }
  }

  /// Pipeline degrees, smallest first, until one fits with one of these modes.
  bool grow_pipeline(std::initializer_list<Recompute> modes) {
    const PlannedLayout before = layout_;
    for (const int pipeline : divisors_of(query_.devices / layout_.tensor)) {
      if (!with_degrees(layout_.tensor, pipeline)) continue;
      recompute_as_needed(modes);
      if (fits()) return true;
    }
    layout_ = before;
    return false;
  }

  /// What fits of recomputation and rows, by trial: more rows make larger products and fewer gathers, fewer make shorter bubbles.
  void choose_rows() {
    const std::int64_t rows_per_rank = query_.global_batch_rows / layout_.data;
    PlannedLayout fastest = layout_;
    double least = 0;
    for (const int rows : divisors_of(rows_per_rank)) {
      for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
        PlannedLayout tried = layout_;
        tried.rows = rows;
        tried.micro_batches = static_cast<std::int32_t>(rows_per_rank / rows);
        tried.recompute = recompute;
        if (!fits(tried)) continue;
        const double seconds = simulate(workload_, query_.cluster).step_seconds;
        if (least > 0 && seconds >= least) continue;
        least = seconds;
        fastest = tried;
      }
    }
    layout_ = fastest;
    decide("recomputation and rows of a micro-batch by trial, of those that fit",
           fmt::format("recompute {}, {} row{}, {} micro-batch{}", name_of(layout_.recompute), layout_.rows,
                       layout_.rows == 1 ? "" : "s", layout_.micro_batches, layout_.micro_batches == 1 ? "" : "es"));
  }

  [[nodiscard]] PlanPath finish() {
    path_.result.workload = base_workload(query_);
    if (!is_possible_) {
      path_.result.why_not = "no data, tensor and pipeline degrees deal these rows to these devices";
      path_.steps.clear();
      return std::move(path_);
    }
    apply(layout_, path_.result.workload);
    path_.result.estimate.memory = memory_of(layout_);
    if (fits()) {
      path_.result.estimate = simulate(path_.result.workload, query_.cluster);
    } else {
      path_.result.why_not = "does not fit: " + memory_text(path_.result.estimate.memory);
    }
    return std::move(path_);
  }

 private:
  [[nodiscard]] MemoryEstimate memory_of(const PlannedLayout& layout) {
    if (!is_possible_) return {};
    apply(layout, workload_);
    return estimate_memory(workload_, query_.cluster);
  }
  [[nodiscard]] bool fits(const PlannedLayout& layout) { return memory_of(layout).fits(); }

  // Data parallel over all, or where the batch has too few rows for that, as little else as feeds every rank.
  [[nodiscard]] static PlannedLayout first_layout(const PlanQuery& query) {
    for (const int tensor : divisors_of(query.devices)) {
      const PlannedLayout layout = simple_layout(query, {.data = query.devices / tensor, .tensor = tensor});
      if (degrees_fit(query, layout)) return layout;
    }
    for (const int pipeline : divisors_of(query.devices)) {
      const PlannedLayout layout = simple_layout(query, {.data = query.devices / pipeline, .pipeline = pipeline});
      if (degrees_fit(query, layout)) return layout;
    }
    return {};
  }

  bool with_degrees(int tensor, int pipeline) {
    if (query_.devices % (tensor * pipeline) != 0) return false;
    PlannedLayout layout =
        simple_layout(query_, {.data = query_.devices / tensor / pipeline, .tensor = tensor, .pipeline = pipeline});
    if (!degrees_fit(query_, layout)) return false;
    layout.recompute = layout_.recompute;
    layout.zero = layout.replicas() > 1 ? layout_.zero : std::uint8_t{0};
    layout.sequence_parallel = tensor > 1;
    layout_ = layout;
    return true;
  }

  const PlanQuery& query_;
  Workload workload_;
  PlannedLayout layout_;
  PlanPath path_;
  bool is_possible_ = true;
};

std::string start_of(const PlannedLayout& layout) {
  if (layout.tensor == 1 && layout.pipeline == 1) return fmt::format("data {}", layout.data);
  return fmt::format("data {}, tensor {}, pipeline {}: more data ranks do not divide the rows", layout.data, layout.tensor,
                     layout.pipeline);
}

// `modes`: recomputation that is tried at every depth before any other.
void pipeline_for_the_rest(Reasoning& path, std::initializer_list<Recompute> modes) {
  if (path.fits()) return;
  if (!path.grow_pipeline(modes) && !path.grow_pipeline({Recompute::full})) {
    path.layout().recompute = Recompute::full;
    path.decide("pipeline and recomputation for what is left", "no depth fits");
    return;
  }
  path.decide("pipeline and recomputation for what is left",
              fmt::format("pipeline {}, recompute {}", path.layout().pipeline, name_of(path.layout().recompute)));
}

// The largest shard that fits a device with a sharded optimizer; tensor parallel up to the node; pipeline and recomputation for
// what is left; data parallel for throughput.
PlanPath tuning_path(const PlanQuery& query) {
  Reasoning path(query, "tuning path");
  if (path.layout().replicas() > 1) path.layout().zero = 1;
  path.decide("the largest shard that fits a device, its optimizer sharded over the data ranks",
              fmt::format("{}, zero {}{}", start_of(path.layout()), path.layout().zero, path.fits() ? ", fits" : ""));
  if (!path.fits()) path.grow_tensor();
  pipeline_for_the_rest(path, {Recompute::none, Recompute::selective});
  if (path.fits()) {
    path.decide("data parallel for throughput", fmt::format("data {}", path.layout().data));
    path.choose_rows();
  }
  return path.finish();
}

// Data parallelism and recomputation first, then ZeRO, and tensor and pipeline parallelism only then.
PlanPath simple_first(const PlanQuery& query) {
  Reasoning path(query, "simple first");
  path.decide("data parallel alone", fmt::format("{}{}", start_of(path.layout()), path.fits() ? ", fits" : ""));
  if (!path.fits()) {
    path.recompute_as_needed({Recompute::selective, Recompute::full});
    path.decide("recomputation", fmt::format("recompute {}{}", name_of(path.layout().recompute), path.fits() ? ", fits" : ""));
  }
  while (!path.fits() && path.layout().zero + 1 < zero_stages(path.layout())) {
    ++path.layout().zero;
    path.decide("shard what the data ranks hold alike",
                fmt::format("zero {}{}", path.layout().zero, path.fits() ? ", fits" : ""));
  }
  if (!path.fits()) path.grow_tensor();
  pipeline_for_the_rest(path, {Recompute::full});
  if (path.fits()) {
    path.choose_rows();
  }
  return path.finish();
}

}  // namespace

std::vector<PlanPath> rules_of_thumb(const PlanQuery& query) { return {tuning_path(query), simple_first(query)}; }

}  // namespace tandem::planner
