// SPDX-License-Identifier: Apache-2.0
#include "cli/scaling_report.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/config.h"
#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json_field.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kGib = 1024.0 * 1024 * 1024;

Json memory_json(const MemoryEstimate& memory) {
  return {{"parameters_bytes", memory.parameters},
          {"gradients_bytes", memory.gradients},
          {"optimizer_bytes", memory.optimizer},
          {"activations_bytes", memory.activations},
          {"communication_bytes", memory.communication},
          {"workspace_bytes", memory.workspace},
          {"reserved_bytes", memory.reserved},
          {"total_bytes", memory.total()},
          {"limit_bytes", memory.limit},
          {"fits", memory.fits()}};
}

Json parts_json(const StepParts& parts) {
  Json json = Json::object();
  for (const StepPart& part : kStepParts) json[part.key] = parts.*part.seconds;
  return json;
}

}  // namespace

StepShares shares_of(const StepEstimate& estimate) {
  const StepParts& parts = estimate.parts;
  const double step = estimate.step_seconds;
  return {.compute = (parts.compute + parts.recompute) / step,
          .communication = parts.communication() / step,
          .bubble = parts.bubble / step,
          .optimizer = parts.optimizer / step,
          .data = parts.input / step,
          .stall = 1 - estimate.goodput};
}

std::string schedule_text(const TrainingPlan& plan) {
  if (plan.parallel.pipeline == 1) return "-";
  const std::string_view schedule = plan.pipeline.effective_schedule();
  return schedule == "interleaved" ? fmt::format("interleaved x {}", plan.pipeline.chunks) : std::string(schedule);
}

std::string memory_of_limit(const MemoryEstimate& memory) {
  return fmt::format("{:.1f} of {:.1f} GiB", memory.total() / kGib, memory.limit / kGib);
}

Json plan_json(const TrainingPlan& plan) {
  RunConfig config;
  config.plan = plan;
  return Json::parse(to_json(config)).at("plan");
}

Json estimate_json(const StepEstimate& estimate) {
  return {{"step_seconds", estimate.step_seconds},
          {"tokens_per_second", estimate.tokens_per_second},
          {"model_flops_utilization", estimate.model_flops_utilization},
          {"hardware_flops_utilization", estimate.hardware_flops_utilization},
          {"goodput", estimate.goodput},
          {"parts_seconds", parts_json(estimate.parts)},
          {"hidden_communication_seconds", estimate.hidden_communication_seconds},
          {"memory", memory_json(estimate.memory)},
          {"bottleneck", estimate.bottleneck}};
}

std::string rendered(const CellRows& rows, TableStyle style) {
  std::vector<std::size_t> columns;
  std::string alike;
  for (std::size_t column = 0; column < rows.front().size(); ++column) {
    const auto same = [&](const std::vector<std::string>& row) { return row[column] == rows[1][column]; };
    if (style == TableStyle::terminal && rows.size() > 2 && std::all_of(rows.begin() + 1, rows.end(), same)) {
      alike += fmt::format("{}{} {}", alike.empty() ? "" : ", ", rows[0][column], rows[1][column]);
    } else {
      columns.push_back(column);
    }
  }
  const auto kept = [&](const std::vector<std::string>& row) {
    std::vector<std::string> cells;
    for (const std::size_t column : columns) cells.push_back(row[column]);
    return cells;
  };
  TextTable table(kept(rows.front()));
  for (std::size_t i = 1; i < rows.size(); ++i) table.add(kept(rows[i]));
  return table.render(style) + (alike.empty() ? "" : fmt::format("all: {}\n", alike));
}

std::string with_sections(Json document, const std::vector<ReportSection>& sections) {
  document.update(Json::parse(to_json(sections)));
  return document.dump(1) + "\n";
}

TrainingPlan read_layout(const std::string& file) {
  const nlohmann::json json = parse_json_object(read_text_file(file), file);
  if (!json.contains("best")) return read_config(file).plan;
  const JsonField best = JsonField(file, json)["best"];
  best.require(best.size() > 0, "holds no layout that fits");
  return config_from_json(Json{{"plan", best.at(0)["plan"].value()}}.dump(), file).plan;
}

SoftwareTraits traits_of(const TrainingPlan& plan) {
  SoftwareTraits traits;
  traits.fused_attention = plan.attention == "blocked";
  traits.overlap_gradients = plan.overlap.gradients;
  traits.overlap_parameters = plan.overlap.prefetch;
  traits.overlap_tensor = plan.overlap.tensor_chunks > 1;
  return traits;
}

}  // namespace tandem
