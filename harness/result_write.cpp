// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/config.h"
#include "core/error.h"
#include "core/io/atomic_file.h"
#include "harness/equivalence.h"
#include "harness/result_file.h"
#include "harness/schema_check.h"
#include "tandem_result_schema.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }
Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }
Json step_or_null(int step) { return step < 0 ? Json(nullptr) : Json(step); }

Json environment_json(const ResultFile& file) {
  const Environment& environment = file.environment;
  return {{"date", environment.date},
          {"cpu", environment.cpu},
          {"cores", environment.cores},
          {"usable_cores", environment.usable_cores},
          {"memory_bytes", environment.memory_bytes},
          {"instruction_set", environment.instruction_set},
          {"operating_system", environment.operating_system},
          {"gpus", environment.gpus},
          {"libraries", environment.libraries},
          {"version", environment.version},
          {"compiler", environment.compiler},
          {"build_type", environment.build_type},
          {"git_commit", environment.git_commit},
          {"git_dirty", environment.git_dirty},
          {"backend", environment.backend},
          {"transport", environment.transport},
          {"link", environment.link},
          {"algorithm", environment.algorithm},
          {"adversary", environment.adversary},
          {"ranks", environment.ranks},
          {"threads_per_rank", environment.threads_per_rank},
          {"seed", environment.seed},
          {"repetitions", environment.repetitions},
          {"pitfalls", environment.pitfalls},
          {"interrupted", file.interrupted}};
}

Json stages_json(const Verdict& verdict) {
  std::vector<const TensorVerdict*> worst;
  for (const TensorVerdict& tensor : verdict.tensors) {
    if (worst.empty() || worst.back()->stage != tensor.stage || worst.back()->step != tensor.step) {
      worst.push_back(&tensor);
    } else if (error_over_bound(tensor) > error_over_bound(*worst.back())) {
      worst.back() = &tensor;
    }
  }
  Json stages = Json::array();
  for (const TensorVerdict* tensor : worst) {
    stages.push_back({{"stage", tensor->stage},
                      {"step", tensor->step},
                      {"tensor", tensor->tensor},
                      {"error", number(tensor->error)},
                      {"yardstick_error", number(tensor->yardstick_error)},
                      {"floor", number(tensor->floor)},
                      {"bound", number(tensor->bound)},
                      {"absolute", tensor->absolute},
                      {"bitwise", tensor->bitwise}});
  }
  return stages;
}

Json localisation_json(const CaseResult& result) {
  if (!result.localisation) return nullptr;
  const Localisation& found = *result.localisation;
  return {{"tensor", found.tensor},
          {"layer", found.layer < 0 ? Json(nullptr) : Json(found.layer)},
          {"operation", found.operation},
          {"phase", found.phase},
          {"rank", found.rank},
          {"slice", found.slice},
          {"micro_batch", found.micro_batch},
          {"error", number(found.error)},
          {"bound", number(found.bound)},
          {"error_over_bound", number(found.error_over_bound)}};
}

Json equivalence_json(const CaseResult& result) {
  const Verdict& verdict = result.verdict;
  if (verdict.status == Status::skip) return nullptr;
  const bool compared = !verdict.worst_tensor.empty();  // a tensor, or the worst property of a case without tensors
  return {{"criterion", name(verdict.criterion)},
          {"error", compared ? number(verdict.error) : Json(nullptr)},
          {"bound", compared ? number(verdict.bound) : Json(nullptr)},
          {"error_over_bound", compared ? number(verdict.error_over_bound) : Json(nullptr)},
          {"worst_tensor", text_or_null(verdict.worst_tensor)},
          {"worst_stage", text_or_null(verdict.worst_stage)},
          {"first_bad_tensor", text_or_null(verdict.first_bad_tensor.value_or(""))},
          {"first_bad_step", step_or_null(verdict.first_bad_step)},
          {"localisation", localisation_json(result)},
          {"localisation_problem", text_or_null(result.localisation_problem)},
          {"ranks_judged", verdict.ranks_judged},
          {"tensors_judged", verdict.tensors_judged},
          {"stages", stages_json(verdict)}};
}

Json properties_json(const std::vector<Property>& properties) {
  Json list = Json::array();
  for (const Property& property : properties) {
    list.push_back({{"name", property.name},
                    {"value", number(property.value)},
                    {"relation", symbol(property.relation)},
                    {"limit", number(property.limit)},
                    {"holds", property.holds()},
                    {"derivation", property.derivation},
                    {"step", step_or_null(property.step)},
                    {"tensor", text_or_null(property.tensor)}});
  }
  return list;
}

Json bytes_json(const BytesByCategory& bytes) {
  Json object = Json::object();
  for (std::size_t i = 0; i < kMemoryCategories; ++i) object[std::string(name(static_cast<MemoryCategory>(i)))] = bytes[i];
  return object;
}

Json measurements_json(const Measurements& measured) {
  const Summary& steps = measured.step_seconds;
  Json purposes = Json::object();
  for (std::size_t i = 0; i < kPurposes; ++i) {
    purposes[std::string(name(static_cast<Purpose>(i)))] =
        i < measured.bytes_by_purpose.size() ? measured.bytes_by_purpose[i] : 0;
  }
  return {{"step_seconds",
           {{"median", number(steps.median)},
            {"p10", number(steps.p10)},
            {"p90", number(steps.p90)},
            {"ci95", Json::array({number(steps.ci95_low), number(steps.ci95_high)})},
            {"samples", steps.samples}}},
          {"tokens_per_second",
           {{"median", number(measured.tokens_per_second)},
            {"ci95", Json::array({number(measured.tokens_per_second_low), number(measured.tokens_per_second_high)})}}},
          {"peak_bytes", bytes_json(measured.peak_bytes)},
          {"communication",
           {{"bytes", measured.bytes_on_wire},
            {"bytes_by_purpose", purposes},
            {"busy_share", number(measured.busy_share)},
            {"exposed_share", number(measured.exposed_share)}}},
          {"time_shares",
           {{"compute", number(measured.compute_share)},
            {"communication_exposed", number(measured.exposed_share)},
            {"data", number(measured.data_share)},
            {"checkpoint", number(measured.checkpoint_share)},
            {"idle", number(measured.idle_share)}}},
          {"model_flops_utilization",
           measured.model_flops_utilization > 0 ? number(measured.model_flops_utilization) : Json(nullptr)},
          {"flops_convention", kFlopsConvention},
          {"bottleneck", text_or_null(measured.bottleneck)},
          {"steps_over_wall", number(measured.steps_over_wall)}};
}

Json predictions_json(const Measurements& measured) {
  Json predictions = Json::object();
  Json bytes = Json::object();
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    const std::int64_t predicted = measured.predicted_peak_bytes[i];
    if (predicted > 0) bytes[std::string(name(static_cast<MemoryCategory>(i)))] = predicted;
  }
  if (!bytes.empty()) predictions["peak_bytes"] = bytes;
  if (measured.predicted_bytes_on_wire >= 0) predictions["communication"] = {{"bytes", measured.predicted_bytes_on_wire}};
  return predictions;
}

Json case_json(const CaseResult& result) {
  RunConfig config;
  config.model = result.model;
  config.plan = result.plan;
  const Json sections = Json::parse(to_json(config));
  Json object = {{"case", result.name},
                 {"suite", result.suite},
                 {"status", name(result.verdict.status)},
                 {"reason", result.verdict.reason},
                 {"check", result.verdict.check},
                 {"seconds", number(result.seconds)},
                 {"model", sections["model"]},
                 {"plan", sections["plan"]},
                 {"equivalence", equivalence_json(result)},
                 {"properties", properties_json(result.verdict.properties)},
                 {"measurements", nullptr},
                 {"predictions", nullptr}};
  if (result.measurements) {
    object["measurements"] = measurements_json(*result.measurements);
    object["predictions"] = predictions_json(*result.measurements);
  }
  return object;
}

}  // namespace

std::string to_json(const ResultFile& file) {
  Json cases = Json::array();
  for (const CaseResult& result : file.cases) cases.push_back(case_json(result));
  const Counts counts = count(file.cases);
  const Json document = {
      {"schema_version", kResultSchemaVersion},
      {"environment", environment_json(file)},
      {"cases", std::move(cases)},
      {"summary",
       {{"passed", counts.passed}, {"failed", counts.failed}, {"skipped", counts.skipped}, {"invalid", counts.invalid}}}};
  // Reasons may quote bytes of a user's file, so what is not UTF-8 is replaced.
  std::string text = document.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  const std::optional<std::string> offence = schema_offence(text, kResultSchema);
  TANDEM_CHECK(!offence, fmt::format("the result file would break its own schema: {}", *offence));
  return text;
}

void write_result_file(const std::filesystem::path& path, const ResultFile& file) { write_file_atomically(path, to_json(file)); }

}  // namespace tandem
