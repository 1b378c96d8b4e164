// SPDX-License-Identifier: Apache-2.0
// The scale's state machine, driven through the engine by scripted overflows.
#include <algorithm>
#include <fstream>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "reference/loss_scaling.h"
#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct ScalerTrace {
  std::string name;
  LossScaleConfig config;
  std::vector<bool> overflow;
  // After each step:
  std::vector<double> scale_after;
  std::vector<std::int64_t> tracker_after;
};

// Small enough that a step is a fraction of a millisecond.
Script tiny_script(const ScalerTrace& trace, const ParallelVariant& variant, const RunContext& context) {
  ParallelVariant tiny = variant;
  tiny.loss_scale = trace.config;
  tiny.layers = 1;
  tiny.vocabulary = 11;
  tiny.row_tokens = 3;
  tiny.rows = 2;
  Script script;
  script.inputs = inputs_of(tiny, context);
  script.inputs.model.sequence = 3;
  script.inputs.model.hidden = 8;
  script.inputs.model.heads = 2;
  script.inputs.model.mlp_hidden = 8;
  script.inputs.steps = static_cast<std::int64_t>(trace.overflow.size());
  // Scales of the tables are of no gradient in particular: what overflows is the script's to say. A scale of 2^20 would take fp16
  // beyond its largest number on its own.
  script.prepare = {};
  const int last = script.inputs.plan.parallel.world_size() - 1;
  script.overflows = [overflow = trace.overflow, last](int rank, std::int64_t step) {
    return rank == last && overflow[static_cast<std::size_t>(step)];
  };
  return script;
}

void add_trace_properties(const ScalerTrace& trace, const ParallelVariant& variant, const RunContext& context,
                          CaseEvidence& evidence) {
  const ScriptedRun run =
      run_script(tiny_script(trace, variant, context), context, fmt::format("{} zero {}", trace.name, variant.zero_stage));
  const std::string label = fmt::format("{} {} zero {}", trace.name, variant.precision, variant.zero_stage);
  const auto at = [](const RankStep& s) { return static_cast<std::size_t>(s.step); };
  const auto add = [&](const std::string& name, const std::function<bool(const RankStep&)>& bad, const char* derivation) {
    evidence.properties.push_back(
        {fmt::format("{} ({})", name, label), count_steps(run, bad), Relation::equal, 0.0, derivation, -1, ""});
  };
  add(
      "scales_off", [&](const RankStep& s) { return s.scaler.scale != trace.scale_after[at(s)]; },
      "scale after each step of the table");
  add(
      "counters_off", [&](const RankStep& s) { return s.scaler.growth_tracker != trace.tracker_after[at(s)]; },
      "counter after each step of the table");
  add(
      "decisions_off", [&](const RankStep& s) { return s.result.skipped != trace.overflow[at(s)]; },
      "skipped where it overflowed");
  add(
      "skipped_counts_off",
      [&](const RankStep& s) {
        return s.scaler.skipped_steps != std::count(trace.overflow.begin(), trace.overflow.begin() + s.step + 1, true);
      },
      "every skipped step so far is counted: the schedule's position depends on it");
  add(
      "scales_of_the_step_off",
      [&](const RankStep& s) {
        return s.result.loss_scale != (s.step == 0 ? trace.config.initial : trace.scale_after[at(s) - 1]);
      },
      "a step runs with the scale that the one before has left");
}

// ---- own tables, worked out by hand

ScalerTrace table(const std::string& name, double initial, double growth, double backoff, std::int64_t interval,
                  const std::string& pattern, std::vector<double> scales, std::vector<std::int64_t> trackers) {
  ScalerTrace trace;
  trace.name = name;
  trace.config.initial = initial;
  trace.config.growth_factor = growth;
  trace.config.backoff_factor = backoff;
  trace.config.growth_interval = interval;
  trace.config.mode = "dynamic";
  for (const char c : pattern) trace.overflow.push_back(c == 'x');
  trace.scale_after = std::move(scales);
  trace.tracker_after = std::move(trackers);
  return trace;
}

std::vector<ScalerTrace> own_tables() {
  return {
      // The first overflow counts at once; each halves once.
      table("first_step", 64, 2, 0.5, 2, "x..x", {32, 32, 64, 32}, {0, 1, 0, 0}),
      // An overflow one step before the scale would grow: the count starts again.
      table("just_before_growth", 64, 2, 0.5, 3, "..x..x...", {64, 64, 32, 32, 32, 16, 16, 16, 32}, {1, 2, 0, 1, 2, 0, 1, 2, 0}),
      table("other_factors", 256, 4, 0.25, 2, "..x....xx", {256, 1024, 256, 256, 1024, 1024, 4096, 1024, 256},
            {1, 0, 0, 1, 0, 1, 0, 0, 0}),
      table("every_step", 8, 2, 0.5, 1, "...xx..", {16, 32, 64, 32, 16, 32, 64}, {0, 0, 0, 0, 0, 0, 0}),
  };
}

const std::vector<ParallelVariant>& table_layouts() {
  static const std::vector<ParallelVariant> layouts = [] {
    std::vector<ParallelVariant> all;
    for (const std::string precision : {"fp16", "fp32"}) {
      for (const int zero : {0, 1, 2, 3}) all.push_back({.degrees = {.data = 2}, .precision = precision, .zero_stage = zero});
    }
    return all;
  }();
  return layouts;
}

Case own_tables_case() {
  Case result = loss_scaling_case("scaler/tables", "scripted overflows, the same trace for every ZeRO stage and storage",
                                  Criterion::convergence, table_layouts().front());
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    for (const ScalerTrace& trace : own_tables()) {
      for (const ParallelVariant& variant : table_layouts()) add_trace_properties(trace, variant, context, evidence);
    }
    return evidence;
  };
  return result;
}

// A table without overflow whose scale never has time to grow: what it cannot tell is written in suites/pitfalls.json.
Case quiet_table_case() {
  Case result = loss_scaling_case("scaler/quiet", "no overflow, no growth: the scale stays", Criterion::convergence,
                                  table_layouts().front());
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    const ScalerTrace trace = table("quiet", 64, 2, 0.5, 9, "....", {64, 64, 64, 64}, {1, 2, 3, 4});
    add_trace_properties(trace, table_layouts().front(), context, evidence);
    return evidence;
  };
  return result;
}

// ---- modes

Case modes_case() {
  const ParallelVariant variant{.degrees = {.data = 2}, .precision = "fp16"};
  Case result = loss_scaling_case("scaler/modes", "static skips and never changes; none looks for nothing",
                                  Criterion::convergence, variant);
  result.execute = [variant](const RunContext& context) {
    CaseEvidence evidence;
    ScalerTrace fixed = table("static", 128, 2, 0.5, 1, ".x.xx.", {128, 128, 128, 128, 128, 128}, {0, 0, 0, 0, 0, 0});
    fixed.config.mode = "static";
    add_trace_properties(fixed, variant, context, evidence);
    ScalerTrace none = table("none", 128, 2, 0.5, 1, ".x..", {1, 1, 1, 1}, {0, 0, 0, 0});
    none.config.mode = "none";
    const ScriptedRun run = run_script(tiny_script(none, variant, context), context, "none");
    evidence.properties.push_back({"skipped_without_scale", static_cast<double>(run.skipped()), Relation::equal, 0.0,
                                   "nobody looks for overflows", -1, ""});
    evidence.properties.push_back({"updates_without_scale", static_cast<double>(run.steps.front().back().updates),
                                   Relation::equal, 4.0, "every step updates, whatever comes of it", -1, ""});
    evidence.properties.push_back({"scales_not_one", count_steps(run, [](const RankStep& s) { return s.result.loss_scale != 1; }),
                                   Relation::equal, 0.0, "no scale", -1, ""});
    return evidence;
  };
  return result;
}

// ---- golden traces

ScalerTrace golden_trace(const nlohmann::json& json, std::size_t steps) {
  ScalerTrace trace;
  trace.config.mode = "dynamic";
  trace.config.initial = json.at("init_scale").get<double>();
  trace.config.growth_factor = json.at("growth_factor").get<double>();
  trace.config.backoff_factor = json.at("backoff_factor").get<double>();
  trace.config.growth_interval = json.at("growth_interval").get<std::int64_t>();
  trace.name = fmt::format("golden interval {}", trace.config.growth_interval);
  for (const int overflow : json.at("overflow").get<std::vector<int>>()) trace.overflow.push_back(overflow != 0);
  trace.scale_after = json.at("scale_after").get<std::vector<double>>();
  trace.tracker_after = json.at("growth_tracker_after").get<std::vector<std::int64_t>>();
  if (trace.overflow.size() > steps) trace.overflow.resize(steps);
  return trace;
}

// Scales of the golden traces reach 2^20, with which fp16 would overflow on its own: storage is fp32, and the two in fp16 are
// those of own_tables().
Case golden_case(const fs::path& file, std::size_t steps, bool quick) {
  const ParallelVariant variant{.degrees = {.data = 2}};
  Case result = loss_scaling_case(quick ? "scaler/golden" : "scaler/golden/long", "traces of an outside program",
                                  Criterion::convergence, variant, quick);
  result.unavailable = [file](const RunContext&) -> std::optional<std::string> {
    if (fs::exists(file)) return std::nullopt;
    return "the golden traces are not here: " + file.filename().string();
  };
  result.execute = [file, steps, quick](const RunContext& context) {
    CaseEvidence evidence;
    const nlohmann::json traces = nlohmann::json::parse(read_text_file(file)).at("traces");
    for (const nlohmann::json& json : traces) {
      const ScalerTrace trace = golden_trace(json, steps);
      for (const int zero : quick ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0}) {
        add_trace_properties(trace, {.degrees = {.data = 2}, .zero_stage = zero}, context, evidence);
      }
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_scaler_table_cases(CaseList& cases, const fs::path& golden_pieces) {
  cases.push_back(own_tables_case());
  cases.push_back(quiet_table_case());
  cases.push_back(modes_case());
  cases.push_back(golden_case(golden_pieces / "loss_scaler.json", 60, true));
  cases.push_back(golden_case(golden_pieces / "loss_scaler.json", 6050, false));
}

}  // namespace tandem
