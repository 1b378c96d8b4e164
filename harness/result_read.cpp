// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/config.h"
#include "core/error.h"
#include "core/io/atomic_file.h"
#include "harness/result_file.h"
#include "harness/schema_check.h"
#include "tandem_result_schema.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Json parse(std::string_view text, std::string_view source) {
  if (text.empty()) throw InputError(fmt::format("{} is empty; was the run that should write it cut off?", source));
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    const std::string_view before = text.substr(0, std::min(error.byte, text.size()));
    const auto line = std::ranges::count(before, '\n') + 1;
    throw InputError(
        fmt::format("{} is not valid JSON: error in line {} (byte {} of {})", source, line, error.byte, text.size()));
  } catch (const Json::exception&) {
    throw InputError(fmt::format("{} cannot be read as JSON", source));
  }
}

void check_document(const Json& document, std::string_view text, std::string_view source) {
  if (document.is_object() && document.contains("schema_version") && document["schema_version"].is_number_integer() &&
      document["schema_version"] != kResultSchemaVersion) {
    throw InputError(fmt::format("{}: /schema_version is {}; this program reads version {}", source,
                                 document["schema_version"].dump(), kResultSchemaVersion));
  }
  if (const std::optional<std::string> offence = schema_offence(text, kResultSchema)) {
    throw InputError(fmt::format("{} is not a result file: {}", source, *offence));
  }
}

double number(const Json& value) { return value.is_number() ? value.get<double>() : kNaN; }
double number_at(const Json& object, const char* key) { return object.contains(key) ? number(object[key]) : kNaN; }
std::string text_at(const Json& object, const char* key) {
  return object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : std::string();
}
int step_at(const Json& object, const char* key) {
  return object.contains(key) && object[key].is_number() ? object[key].get<int>() : -1;
}

Environment read_environment(const Json& json) {
  Environment environment;
  environment.date = json["date"];
  environment.cpu = json["cpu"];
  environment.cores = json["cores"];
  environment.usable_cores = json["usable_cores"];
  environment.memory_bytes = json["memory_bytes"];
  environment.instruction_set = json["instruction_set"];
  environment.operating_system = json["operating_system"];
  environment.gpus = json["gpus"].get<std::vector<std::string>>();
  environment.libraries = json["libraries"].get<std::map<std::string, std::string>>();
  environment.version = json.value("version", environment.version);
  environment.compiler = json["compiler"];
  environment.build_type = json["build_type"];
  environment.git_commit = json["git_commit"];
  environment.git_dirty = json["git_dirty"];
  environment.backend = json["backend"];
  environment.transport = json["transport"];
  environment.link = json["link"];
  // Files of before there was a choice.
  environment.algorithm = json.value("algorithm", environment.algorithm);
  environment.adversary = json.value("adversary", environment.adversary);
  environment.ranks = json["ranks"];
  environment.threads_per_rank = json["threads_per_rank"];
  environment.seed = json["seed"];
  environment.repetitions = json["repetitions"];
  environment.pitfalls = json["pitfalls"].get<std::vector<std::string>>();
  return environment;
}

template <class Enum>
Enum parse_name(const std::string& text, std::initializer_list<Enum> values) {
  for (const Enum value : values) {
    if (name(value) == text) return value;
  }
  throw ContractError("the schema let an unknown word through: " + text);
}

Localisation read_localisation(const Json& json) {
  Localisation found;
  found.tensor = json["tensor"];
  found.layer = step_at(json, "layer");
  found.operation = json["operation"];
  found.phase = json["phase"];
  found.rank = json["rank"];
  found.slice = json["slice"];
  found.micro_batch = json["micro_batch"];
  found.error = number(json["error"]);
  found.bound = number(json["bound"]);
  const bool finite = json["error_over_bound"].is_number();
  found.error_over_bound = finite ? number(json["error_over_bound"]) : std::numeric_limits<double>::infinity();
  return found;
}

void read_equivalence(const Json& json, CaseResult& result) {
  Verdict& verdict = result.verdict;
  if (json.contains("localisation") && json["localisation"].is_object()) {
    result.localisation = read_localisation(json["localisation"]);
  }
  result.localisation_problem = text_at(json, "localisation_problem");
  verdict.criterion = parse_name(json["criterion"], {Criterion::bitwise, Criterion::rounding, Criterion::convergence});
  verdict.error = number(json["error"]);
  verdict.bound = number(json["bound"]);
  verdict.error_over_bound = number(json["error_over_bound"]);
  // Infinite, which JSON cannot say: an error under a bound of zero, a property that does not hold.
  if (json["error_over_bound"].is_null() && verdict.error > 0) verdict.error_over_bound = std::numeric_limits<double>::infinity();
  verdict.worst_tensor = text_at(json, "worst_tensor");
  verdict.worst_stage = text_at(json, "worst_stage");
  if (const std::string bad = text_at(json, "first_bad_tensor"); !bad.empty()) verdict.first_bad_tensor = bad;
  verdict.first_bad_step = step_at(json, "first_bad_step");
  verdict.ranks_judged = json.value("ranks_judged", 0);
  verdict.tensors_judged = json.value("tensors_judged", 0);
  if (!json.contains("stages")) return;
  for (const Json& stage : json["stages"]) {
    TensorVerdict tensor;
    tensor.stage = stage["stage"];
    tensor.step = stage["step"];
    tensor.tensor = stage["tensor"];
    tensor.error = number(stage["error"]);
    tensor.yardstick_error = number(stage["yardstick_error"]);
    tensor.floor = number(stage["floor"]);
    tensor.bound = number(stage["bound"]);
    tensor.absolute = stage["absolute"];
    tensor.bitwise = stage["bitwise"];
    verdict.tensors.push_back(std::move(tensor));
  }
}

Property read_property(const Json& json) {
  Property property;
  property.name = json["name"];
  property.value = number(json["value"]);
  for (const Relation relation : {Relation::at_most, Relation::at_least, Relation::equal}) {
    if (json["relation"] == std::string(symbol(relation))) property.relation = relation;
  }
  property.limit = number(json["limit"]);
  property.derivation = json["derivation"];
  property.step = step_at(json, "step");
  property.tensor = text_at(json, "tensor");
  return property;
}

BytesByCategory read_bytes(const Json& json) {
  BytesByCategory bytes{};
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    bytes[i] = json.value(std::string(name(static_cast<MemoryCategory>(i))), std::int64_t{0});
  }
  return bytes;
}

Summary read_summary(const Json& json) {
  return {number(json["median"]),  number(json["p10"]),     number(json["p90"]),
          number(json["ci95"][0]), number(json["ci95"][1]), json["samples"].get<std::vector<double>>()};
}

Measurements read_measurements(const Json& json, const Json& predictions) {
  Measurements measured;
  measured.step_seconds = read_summary(json["step_seconds"]);
  measured.tokens_per_second = number(json["tokens_per_second"]["median"]);
  measured.tokens_per_second_low = number(json["tokens_per_second"]["ci95"][0]);
  measured.tokens_per_second_high = number(json["tokens_per_second"]["ci95"][1]);
  measured.peak_bytes = read_bytes(json["peak_bytes"]);
  const Json& communication = json["communication"];
  measured.bytes_on_wire = communication["bytes"];
  for (std::size_t i = 0; i < kPurposes; ++i) {
    measured.bytes_by_purpose.push_back(communication["bytes_by_purpose"][std::string(name(static_cast<Purpose>(i)))]);
  }
  measured.busy_share = number(communication["busy_share"]);
  measured.exposed_share = number(communication["exposed_share"]);
  const Json shares = json.value("time_shares", Json::object());
  measured.compute_share = number_at(shares, "compute");
  measured.data_share = number_at(shares, "data");
  measured.checkpoint_share = number_at(shares, "checkpoint");
  measured.idle_share = number_at(shares, "idle");
  measured.model_flops_utilization = json["model_flops_utilization"].is_null() ? 0 : number(json["model_flops_utilization"]);
  measured.bottleneck = text_at(json, "bottleneck");
  measured.steps_over_wall = number_at(json, "steps_over_wall");
  if (!predictions.is_object()) return measured;
  if (predictions.contains("peak_bytes")) measured.predicted_peak_bytes = read_bytes(predictions["peak_bytes"]);
  if (predictions.contains("communication")) {
    measured.predicted_bytes_on_wire = predictions["communication"].value("bytes", std::int64_t{-1});
  }
  return measured;
}

CaseResult read_case(const Json& json, const std::string& where) {
  CaseResult result;
  result.name = json["case"];
  result.suite = json["suite"];
  const RunConfig config = config_from_json(Json{{"model", json["model"]}, {"plan", json["plan"]}}.dump(), where);
  result.model = config.model;
  result.plan = config.plan;
  result.seconds = number_at(json, "seconds");
  Verdict& verdict = result.verdict;
  verdict.status = parse_name(json["status"], {Status::pass, Status::fail, Status::skip, Status::invalid});
  verdict.reason = json["reason"];
  verdict.check = text_at(json, "check");
  if (json["equivalence"].is_object()) read_equivalence(json["equivalence"], result);
  for (const Json& property : json.value("properties", Json::array())) verdict.properties.push_back(read_property(property));
  if (json["measurements"].is_object()) result.measurements = read_measurements(json["measurements"], json["predictions"]);
  return result;
}

void check_summary(const Json& summary, const Counts& counts, std::string_view source) {
  const std::pair<const char*, int> parts[] = {
      {"passed", counts.passed}, {"failed", counts.failed}, {"skipped", counts.skipped}, {"invalid", counts.invalid}};
  for (const auto& [key, counted] : parts) {
    if (summary[key] == counted) continue;
    throw InputError(fmt::format("{}: /summary/{} is {}, but the cases say {}", source, key, summary[key].dump(), counted));
  }
}

ResultFile read_document(const Json& document, std::string_view source) {
  ResultFile file;
  file.environment = read_environment(document["environment"]);
  file.interrupted = document["environment"]["interrupted"];
  std::set<std::string> names;
  for (const Json& entry : document["cases"]) {
    const std::string where = fmt::format("{} at /cases/{}", source, file.cases.size());
    file.cases.push_back(read_case(entry, where));
    if (!names.insert(file.cases.back().name).second) {
      throw InputError(
          fmt::format("{}: /cases/{}/case is {}, which appears twice", source, file.cases.size() - 1, file.cases.back().name));
    }
  }
  check_summary(document["summary"], count(file.cases), source);
  return file;
}

}  // namespace

ResultFile result_file_from_json(std::string_view text, std::string_view source_name) {
  const Json document = parse(text, source_name);
  check_document(document, text, source_name);
  try {
    return read_document(document, source_name);
  } catch (const Json::exception& error) {
    throw InputError(fmt::format("{} holds a number out of range: {}", source_name, error.what()));
  }
}

ResultFile read_result_file(const std::filesystem::path& path) {
  return result_file_from_json(read_text_file(path), path.string());
}

}  // namespace tandem
