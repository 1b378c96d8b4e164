// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "harness/equivalence.h"
#include "harness/trace_compare.h"

namespace tandem {
namespace {

using nlohmann::ordered_json;

constexpr std::array<std::string_view, 7> kProblems = {"beyond bound",   "replicas differ", "not finite",  "part missing",
                                                       "tensor missing", "unknown tensor",  "size differs"};

std::string rank_text(int rank) { return rank < 0 ? "-" : fmt::format("{}", rank); }

std::vector<std::string> row_of(const TraceVerdict& verdict) {
  const TensorVerdict& tensor = verdict.tensor;
  const bool bad = verdict.divergence.has_value();
  return {tensor.tensor,
          bad ? std::string(name(verdict.divergence->problem)) : "ok",
          bad ? rank_text(verdict.divergence->rank) : "-",
          bad ? rank_text(verdict.divergence->micro_batch) : "-",
          bad && !verdict.divergence->slice.empty() ? verdict.divergence->slice : "-",
          fmt::format("{:.2e}", tensor.error),
          fmt::format("{:.2e}", tensor.bound),
          fmt::format("{:.3g}", error_over_bound(tensor))};
}

// Diverging tensors in the order of execution; where there are none, the worst first.
std::vector<const TraceVerdict*> shown(const TraceComparison& comparison) {
  std::vector<const TraceVerdict*> rows;
  for (const TraceVerdict& verdict : comparison.tensors) {
    if (verdict.divergence) rows.push_back(&verdict);
  }
  if (!rows.empty()) return rows;
  for (const TraceVerdict& verdict : comparison.tensors) rows.push_back(&verdict);
  std::stable_sort(rows.begin(), rows.end(), [](const TraceVerdict* a, const TraceVerdict* b) {
    return error_over_bound(a->tensor) > error_over_bound(b->tensor);
  });
  return rows;
}

std::string incomplete_line(const TraceComparison& comparison, TraceProblem problem, std::string_view text) {
  std::size_t count = 0;
  std::string first;
  for (const Divergence& divergence : comparison.incomplete) {
    if (divergence.problem != problem) continue;
    if (count++ == 0) first = divergence.name;
  }
  return count == 0 ? "" : fmt::format("{} {}, the first is {}\n", count, text, first);
}

// JSON has no infinity.
ordered_json number(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(fmt::format("{}", value)); }

ordered_json divergence_json(const Divergence& divergence) {
  return {{"problem", name(divergence.problem)},
          {"name", divergence.name},
          {"layer", divergence.layer},
          {"operation", divergence.operation},
          {"phase", divergence.phase},
          {"rank", divergence.rank},
          {"micro_batch", divergence.micro_batch},
          {"slice", divergence.slice},
          {"error", number(divergence.error)},
          {"bound", number(divergence.bound)},
          {"error_over_bound", number(divergence.error_over_bound)},
          {"element", divergence.element},
          {"element_indices", divergence.element_indices},
          {"value", number(divergence.value)},
          {"truth", number(divergence.truth)}};
}

ordered_json verdict_json(const TraceVerdict& verdict) {
  const TensorVerdict& tensor = verdict.tensor;
  ordered_json object = {{"name", tensor.tensor},
                         {"kind", tensor.stage},
                         {"error", number(tensor.error)},
                         {"yardstick_error", number(tensor.yardstick_error)},
                         {"floor", number(tensor.floor)},
                         {"bound", number(tensor.bound)},
                         {"error_over_bound", number(error_over_bound(tensor))},
                         {"absolute", tensor.absolute},
                         {"replica_conflicts", verdict.replica_conflicts}};
  object["divergence"] = verdict.divergence ? divergence_json(*verdict.divergence) : ordered_json(nullptr);
  return object;
}

}  // namespace

std::string_view name(TraceProblem problem) { return kProblems[static_cast<std::size_t>(problem)]; }

std::string describe(const Divergence& divergence) {
  std::string text = divergence.layer >= 0 ? fmt::format("layer {}, ", divergence.layer) : "";
  text += fmt::format("{}, {} ({})", divergence.operation, divergence.phase, divergence.name);
  std::string place;
  if (divergence.rank >= 0) place += fmt::format(", rank {}", divergence.rank);
  if (divergence.micro_batch >= 0) place += fmt::format(", micro-batch {}", divergence.micro_batch);
  if (!divergence.slice.empty()) place += fmt::format(", {} {}", divergence.rank >= 0 ? "slice" : "", divergence.slice);
  if (!divergence.element_indices.empty()) place += fmt::format(", element {}", divergence.element_indices);
  if (!place.empty()) text += ":" + place.substr(1);
  switch (divergence.problem) {
    case TraceProblem::tensor_missing: return text + ": was not recorded";
    case TraceProblem::unknown_tensor: return text + ": the truth has no such tensor";
    case TraceProblem::part_missing:
    case TraceProblem::size_differs: return text;
    default: break;
  }
  text += fmt::format(": error {:.2e} is {:.3g} times the bound {:.2e} ({:.8g} instead of {:.8g})", divergence.error,
                      divergence.error_over_bound, divergence.bound, divergence.value, divergence.truth);
  if (divergence.problem == TraceProblem::replicas_differ) text += "; ranks that hold the same part differ";
  return text;
}

std::string verdict_line(const TraceComparison& comparison) {
  if (const auto first = comparison.first_divergence()) {
    const auto bad = std::count_if(comparison.tensors.begin(), comparison.tensors.end(),
                                   [](const TraceVerdict& verdict) { return verdict.divergence.has_value(); });
    return fmt::format("diverges: {} of {} tensors; first {}", bad, comparison.tensors.size(), describe(*first));
  }
  const auto worst = std::max_element(comparison.tensors.begin(), comparison.tensors.end(), [](const auto& a, const auto& b) {
    return error_over_bound(a.tensor) < error_over_bound(b.tensor);
  });
  return fmt::format("agrees: {} tensors within their bounds; the worst is {} with {:.2e} of {:.2e}", comparison.tensors.size(),
                     worst->tensor.tensor, worst->tensor.error, worst->tensor.bound);
}

std::string render(const TraceComparison& comparison, TableStyle style, std::size_t most_rows) {
  TextTable table({"tensor", "result", "rank", "micro-batch", "slice", "error", "bound", "error/bound"});
  const std::vector<const TraceVerdict*> rows = shown(comparison);
  const std::size_t count = std::min(rows.size(), most_rows);
  for (std::size_t i = 0; i < count; ++i) table.add(row_of(*rows[i]));
  std::string text = fmt::format("{} against {}{}\n", comparison.candidate, comparison.truth,
                                 comparison.has_yardstick ? "" : " (no yardstick: bounds from the precision alone)");
  text += table.render(style);
  if (rows.size() > count) text += fmt::format("... and {} more\n", rows.size() - count);
  text += incomplete_line(comparison, TraceProblem::tensor_missing, "tensors were not recorded and not compared");
  text += incomplete_line(comparison, TraceProblem::unknown_tensor, "recorded tensors have no counterpart and were not compared");
  const auto conflicts = std::count_if(comparison.tensors.begin(), comparison.tensors.end(),
                                       [](const TraceVerdict& verdict) { return verdict.replica_conflicts > 0; });
  if (conflicts > 0) text += fmt::format("{} tensors differ between ranks that hold the same part\n", conflicts);
  return text + verdict_line(comparison) + "\n";
}

std::string to_json(const std::vector<TraceComparison>& comparisons) {
  ordered_json list = ordered_json::array();
  for (const TraceComparison& comparison : comparisons) {
    const auto first = comparison.first_divergence();
    ordered_json object = {{"candidate", comparison.candidate},
                           {"truth", comparison.truth},
                           {"agrees", !first},
                           {"verdict", verdict_line(comparison)},
                           {"bounds",
                            {{"storage_roundoff", comparison.bounds.storage_roundoff},
                             {"accumulate_roundoff", comparison.bounds.accumulate_roundoff},
                             {"gradient_roundoff", comparison.bounds.gradient_roundoff},
                             {"forward_length", comparison.bounds.forward_length},
                             {"backward_length", comparison.bounds.backward_length},
                             {"allowances", comparison.bounds.allowances},
                             {"yardstick", comparison.has_yardstick}}}};
    object["first_divergence"] = first ? divergence_json(*first) : ordered_json(nullptr);
    ordered_json tensors = ordered_json::array();
    for (const TraceVerdict& verdict : comparison.tensors) tensors.push_back(verdict_json(verdict));
    object["tensors"] = std::move(tensors);
    ordered_json incomplete = ordered_json::array();
    for (const Divergence& divergence : comparison.incomplete) incomplete.push_back(divergence_json(divergence));
    object["incomplete"] = std::move(incomplete);
    list.push_back(std::move(object));
  }
  return ordered_json{{"comparisons", std::move(list)}}.dump(1) + "\n";
}

}  // namespace tandem
