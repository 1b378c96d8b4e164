// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/dtype.h"
#include "core/error.h"
#include "core/io/json_field.h"
#include "core/nearest_name.h"
#include "core/shipped_files.h"
#include "optimized/scaling/published.h"

namespace tandem {
namespace {

constexpr double kGiga = 1e9;
constexpr double kGibi = 1024.0 * 1024.0 * 1024.0;

void only(const JsonField& object, const std::vector<std::string>& keys) {
  object.require(object.value().is_object(), "is no object");
  for (const auto& [key, value] : object.value().items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    const auto nearest = nearest_name(key, keys);
    object.refuse(fmt::format("has an unknown key '{}'{}", key, nearest ? fmt::format(" (did you mean {}?)", *nearest) : ""));
  }
}

bool flag(const JsonField& object, const char* key, bool otherwise) {
  if (!object.has(key)) return otherwise;
  object[key].require(object[key].value().is_boolean(), "is neither true nor false");
  return object[key].value().get<bool>();
}

std::string text(const JsonField& object, const char* key, const std::string& otherwise) {
  return object.has(key) ? object[key].text() : otherwise;
}

double amount(const JsonField& object, const char* key, double otherwise) {
  return object.has(key) ? object[key].amount() : otherwise;
}

int number(const JsonField& object, const char* key, int otherwise) {
  if (!object.has(key)) return otherwise;
  const std::int64_t value = object[key].count();
  object[key].require(value <= std::numeric_limits<int>::max(), "is too large");
  return static_cast<int>(value);
}

int positive(const JsonField& object, const char* key, int otherwise) {
  const int value = number(object, key, otherwise);
  if (value < 1) object[key].refuse("is 0, it must be at least 1");
  return value;
}

// What the set says of all its rows, and a row of itself.
void read_software(const JsonField& software, SoftwareTraits& traits, std::string& gradients) {
  const std::pair<const char*, bool*> flags[] = {{"fused_attention", &traits.fused_attention},
                                                 {"fused_elementwise", &traits.fused_elementwise},
                                                 {"fused_accumulation", &traits.fused_accumulation},
                                                 {"tuned_attention", &traits.tuned_attention},
                                                 {"cuda_graphs", &traits.cuda_graphs},
                                                 {"overlap_gradients", &traits.overlap_gradients},
                                                 {"overlap_parameters", &traits.overlap_parameters},
                                                 {"overlap_tensor", &traits.overlap_tensor},
                                                 {"overlap_pipeline", &traits.overlap_pipeline},
                                                 {"gather_products", &traits.gather_products},
                                                 {"scatter_each_micro_batch", &traits.scatter_each_micro_batch},
                                                 {"scatter_gather_pipeline", &traits.scatter_gather_pipeline}};
  std::vector<std::string> keys = {"optimizer",         "host_offload_share",        "selective", "loss",
                                   "recomputed_layers", "extra_bytes_per_parameter", "gradients"};
  for (const auto& [key, value] : flags) keys.emplace_back(key);
  only(software, keys);
  for (const auto& [key, value] : flags) *value = flag(software, key, *value);
  traits.optimizer = text(software, "optimizer", traits.optimizer);
  traits.host_offload_share = amount(software, "host_offload_share", traits.host_offload_share);
  traits.selective = text(software, "selective", traits.selective);
  traits.loss = text(software, "loss", traits.loss);
  traits.recomputed_layers = number(software, "recomputed_layers", traits.recomputed_layers);
  traits.extra_bytes_per_parameter = amount(software, "extra_bytes_per_parameter", traits.extra_bytes_per_parameter);
  gradients = text(software, "gradients", gradients);
}

// One layer less on the first and the last stage, whose embedding and head are about as much work.
std::string lighter_ends(const JsonField& row, std::int64_t layers, int stages) {
  row["lighter_ends"].require(stages >= 2 && (layers + 2) % stages == 0,
                              fmt::format("needs stages that divide two more than {} layers, not {}", layers, stages));
  const std::int64_t most = (layers + 2) / stages;
  std::string list = fmt::format("{}", most - 1);
  for (int stage = 1; stage + 1 < stages; ++stage) list += fmt::format("-{}", most);
  return list + fmt::format("-{}", most - 1);
}

void read_layout(const JsonField& row, TrainingPlan& plan) {
  plan.parallel.tensor = positive(row, "tensor", 1);
  plan.parallel.pipeline = positive(row, "pipeline", 1);
  plan.parallel.data = positive(row, "data", 1);
  plan.parallel.context = positive(row, "context", 1);
  plan.parallel.expert = positive(row, "expert", 1);
  plan.pipeline.chunks = positive(row, "chunks", 1);
  plan.pipeline.schedule = text(row, "schedule", "1f1b");
  plan.pipeline.stage_layers = text(row, "stage_layers", "");
  plan.sequence_parallel = flag(row, "sequence_parallel", false);
  plan.zero_stage = number(row, "zero", 0);
  plan.recompute.mode = text(row, "recompute", "none");
  plan.recompute.layers = positive(row, "recompute_layers", 1);
  plan.batch.rows = row["rows"].count();
  const std::int64_t together = static_cast<std::int64_t>(positive(row, "micro_rows", 1)) * plan.parallel.data;
  row["rows"].require(
      plan.batch.rows >= 1 && plan.batch.rows % together == 0,
      fmt::format("is {}, no multiple of the {} rows of one micro-batch of all data ranks", plan.batch.rows, together));
  plan.batch.micro_batches = static_cast<int>(plan.batch.rows / together);
}

void read_precision(const JsonField& row, const std::string& gradients, TrainingPlan& plan) {
  plan.precision = text(row, "precision", "bf16");
  plan.numerics = numerics_from_precision(plan.precision);
  plan.gradients = gradients;
  if (gradients != "stored" && gradients != "wide")
    row.refuse(fmt::format("has gradients '{}'; they are wide or stored", gradients));
  if (gradients == "stored") plan.numerics.accumulate = plan.numerics.reduce = plan.numerics.storage;
}

std::optional<double> bytes(const JsonField& row, const std::string& name) {
  if (row.has((name + "_gib").c_str())) return row[(name + "_gib").c_str()].amount() * kGibi;
  if (row.has((name + "_gb").c_str())) return row[(name + "_gb").c_str()].amount() * kGiga;
  return std::nullopt;
}

// The sizes of well-known models are no less certain for not having been looked up beside the measurement.
bool only_sizes(const JsonField& recalled) {
  const std::vector<std::string> sizes = {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab"};
  for (const JsonField& field : recalled.elements()) {
    if (std::find(sizes.begin(), sizes.end(), field.text()) == sizes.end()) return false;
  }
  return true;
}

// Half a unit of the last digit of a number as it is written.
double rounding(const JsonField& row, const std::string& name) {
  for (const auto& [suffix, unit] : {std::pair{"_gib", kGibi}, {"_gb", kGiga}}) {
    if (!row.has((name + suffix).c_str())) continue;
    const std::string digits = row[(name + suffix).c_str()].value().dump();
    const std::size_t point = digits.find('.');
    const std::size_t decimals = point == std::string::npos || digits.ends_with(".0") ? 0 : digits.size() - point - 1;
    return 0.5 * unit * std::pow(10.0, -static_cast<double>(decimals));
  }
  return 0;
}

void read_outcomes(const JsonField& row, PublishedRow& published) {
  published.step_seconds = amount(row, "seconds", 0);
  published.derived_by = text(row, "from", published.step_seconds > 0 ? "published" : "");
  if (row.has("mfu")) published.published_mfu = row["mfu"].amount() / 100;
  if (row.has("activation_percent")) published.activation_share = row["activation_percent"].amount() / 100;
  published.activation_bytes = bytes(row, "activation");
  published.model_state_bytes = bytes(row, "state");
  published.model_state_rounding = rounding(row, "state");
  published.device_bytes = bytes(row, "memory");
  published.out_of_memory = flag(row, "out_of_memory", false);
  published.complete = !row.has("assumed");
  published.suspect = flag(row, "suspect", false);
  published.approximate = flag(row, "approximate", false);
  published.analytic = flag(row, "analytic", false);
  published.from_memory = row.has("from_memory") && !only_sizes(row["from_memory"]);
  published.note = text(row, "note", "");
}

const std::vector<std::string>& row_keys() {
  static const std::vector<std::string> keys = {"id",
                                                "table",
                                                "device",
                                                "devices",
                                                "devices_per_node",
                                                "network_gbps",
                                                "model",
                                                "sequence",
                                                "precision",
                                                "products",
                                                "tensor",
                                                "pipeline",
                                                "data",
                                                "context",
                                                "expert",
                                                "chunks",
                                                "schedule",
                                                "stage_layers",
                                                "lighter_ends",
                                                "sequence_parallel",
                                                "zero",
                                                "recompute",
                                                "recompute_layers",
                                                "micro_rows",
                                                "rows",
                                                "software",
                                                "seconds",
                                                "from",
                                                "mfu",
                                                "memory_gb",
                                                "memory_gib",
                                                "activation_gb",
                                                "activation_gib",
                                                "activation_percent",
                                                "state_gb",
                                                "state_gib",
                                                "out_of_memory",
                                                "assumed",
                                                "suspect",
                                                "approximate",
                                                "analytic",
                                                "from_memory",
                                                "note"};
  return keys;
}

class SetReader {
 public:
  SetReader(JsonField file, const std::string& source_name) : file_(std::move(file)) {
    file_.require_format("tandem-published", 1);
    set_ = file_["set"].text();
    source_ = fmt::format("{} ({}), {}", file_["title"].text(), file_["year"].count(), file_["ref"].text());
    if (file_.has("cluster")) cluster_ = file_["cluster"].text();
    read_software(file_["software"], software_, gradients_);
    const JsonField models = file_["models"];
    models.require(models.value().is_object(), "is no object");
    for (const auto& [name, shape] : models.value().items()) {
      ModelShape model =
          model_shape_from_json(nlohmann::json{{"shape", shape}}.dump(), fmt::format("{}: models.{}", source_name, name));
      model.name = name;
      models_.emplace(name, model);
    }
  }

  [[nodiscard]] PublishedRow read(const JsonField& row) const {
    only(row, row_keys());
    PublishedRow published;
    published.id = row["id"].text();
    published.set = set_;
    published.table = row["table"].text();
    published.source = source_;
    published.cluster = cluster_;
    published.hardware = row["device"].text();
    published.devices = positive(row, "devices", 1);
    published.devices_per_node = positive(row, "devices_per_node", 8);
    published.network_bytes_per_second = amount(row, "network_gbps", 0) * kGiga / 8;
    Workload& workload = published.workload;
    const auto model = models_.find(row["model"].text());
    row["model"].require(model != models_.end(), fmt::format("is '{}', which \"models\" does not describe", row["model"].text()));
    workload.model = model->second;
    workload.sequence = number(row, "sequence", 0);
    workload.software = software_;
    std::string gradients = gradients_;
    if (row.has("software")) read_software(row["software"], workload.software, gradients);
    workload.software.product_dtype = text(row, "products", "");
    read_layout(row, workload.plan);
    if (flag(row, "lighter_ends", false)) {
      workload.plan.pipeline.stage_layers =
          lighter_ends(row, workload.model.layers, workload.plan.parallel.pipeline * workload.plan.pipeline.chunks);
    }
    read_precision(row, gradients, workload.plan);
    read_outcomes(row, published);
    const int ranks = workload.plan.parallel.world_size();
    row["devices"].require(ranks == published.devices, fmt::format("is {}, but the layout has {}", published.devices, ranks));
    return published;
  }

 private:
  const JsonField file_;
  std::string set_, source_, cluster_, gradients_ = "wide";
  SoftwareTraits software_;
  std::map<std::string, ModelShape> models_;
};

constexpr std::string_view kFigures = "figures";  // of other things than training steps

std::vector<PublishedRow> all_rows(const std::string& set) {
  std::vector<PublishedRow> rows;
  for (const std::string& name : set == "all" ? published_sets() : std::vector<std::string>{set}) {
    const NamedText file = read_file_or_shipped("published set", "published", name);
    for (PublishedRow& row : published_rows_from(file.text, file.source_name)) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

std::vector<std::string> published_sets() {
  std::vector<std::string> names = shipped_names("published");
  std::erase(names, kFigures);
  return names;
}

std::vector<PublishedRow> published_rows_from(const std::string& text, const std::string& source_name) {
  const nlohmann::json parsed = parse_json_object(text, source_name);
  const JsonField file(source_name, parsed);
  only(file,
       {"format", "version", "set", "title", "year", "ref", "software_note", "cluster", "software", "models", "rows", "bubbles"});
  const SetReader reader(file, source_name);
  std::vector<PublishedRow> rows;
  for (const JsonField& row : file["rows"].elements()) rows.push_back(reader.read(row));
  return rows;
}

std::vector<PublishedRow> published_rows(const std::string& set) {
  std::vector<PublishedRow> rows = all_rows(set);
  std::erase_if(rows, [](const PublishedRow& row) { return row.step_seconds <= 0; });
  return rows;
}

std::vector<PublishedRow> published_memory_rows(const std::string& set) {
  std::vector<PublishedRow> rows = all_rows(set);
  std::erase_if(rows, [](const PublishedRow& row) {
    return !row.activation_bytes && !row.model_state_bytes && !row.activation_share && !row.device_bytes && !row.out_of_memory;
  });
  return rows;
}

}  // namespace tandem
