// SPDX-License-Identifier: Apache-2.0
#include "core/config_fields.h"

#include <cmath>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/config_field_makers.h"

namespace tandem {
namespace {

using namespace config_field;

void add_model(std::vector<ConfigField>& fields) {
  fields.push_back(
      number("model", "vocabulary", kPositiveInt, "token ids; 256 for the bytes tokenizer", in_model(&GptConfig::vocabulary)));
  fields.push_back(number("model", "sequence", kPositiveInt, "longest context in tokens", in_model(&GptConfig::sequence)));
  fields.push_back(number("model", "layers", kPositiveInt, "transformer blocks", in_model(&GptConfig::layers)));
  fields.push_back(number("model", "hidden", kPositiveInt, "width of the residual stream", in_model(&GptConfig::hidden)));
  fields.push_back(number("model", "heads", kPositiveInt, "attention heads; must divide hidden", in_model(&GptConfig::heads)));
  fields.push_back(number("model", "mlp_hidden", {.low = 0, .high = kLargestInt}, "width of the MLP; 0 means 4 x hidden",
                          in_model(&GptConfig::mlp_hidden)));
  fields.push_back(number("model", "experts", {.low = 0, .high = kLargestInt}, "experts of each MLP; 0 means one dense MLP",
                          in_model(&GptConfig::experts)));
  fields.push_back(
      number("model", "expert_choices", {.low = 1, .high = 2}, "experts of each token", in_model(&GptConfig::expert_choices)));
  fields.push_back(number("model", "capacity_factor", kPositive, "places of an expert over its even share of a row's tokens",
                          in_model(&GptConfig::capacity_factor)));
  fields.push_back(number("model", "auxiliary_loss_weight", kNonNegative, "of the load-balancing loss",
                          in_model(&GptConfig::auxiliary_loss_weight)));
  fields.push_back(flag("model", "tied", "the head is the token embedding", in_model(&GptConfig::tied)));
  fields.push_back(
      number("model", "layer_norm_epsilon", kPositive, "added to the variance", in_model(&GptConfig::layer_norm_epsilon)));
  fields.push_back(
      number("model", "embedding_dropout", kProbability, "after the embeddings", in_model(&GptConfig::embedding_dropout)));
  fields.push_back(
      number("model", "attention_dropout", kProbability, "of attention probabilities", in_model(&GptConfig::attention_dropout)));
  fields.push_back(
      number("model", "residual_dropout", kProbability, "before each residual sum", in_model(&GptConfig::residual_dropout)));
  ConfigField dropout = number("model", "dropout", kProbability, "sets embedding, attention and residual dropout",
                               in_model(&GptConfig::embedding_dropout));
  dropout.shorthand = true;
  dropout.set = [](RunConfig& config, const FieldValue& value) {
    config.model.embedding_dropout = config.model.attention_dropout = config.model.residual_dropout = std::get<double>(value);
  };
  fields.push_back(std::move(dropout));
}

// 16-bit gradients instead of fp32 ones are a choice beside the precision; either may be set first.
void set_numerics(TrainingPlan& plan, bool gradients_as_stored) {
  plan.numerics = numerics_from_precision(plan.precision);
  if (gradients_as_stored) plan.numerics.accumulate = plan.numerics.reduce = plan.numerics.storage;
}

void add_precision(std::vector<ConfigField>& fields) {
  std::vector<std::pair<std::string, std::string>> words;
  for (const std::string_view name : precisions()) words.emplace_back(name, name);
  ConfigField precision = choice<std::string>(
      "plan", "precision", words, "arithmetic of the step (docs/techniques/loss_scaling.md)", in_plan(&TrainingPlan::precision));
  precision.set = [](RunConfig& config, const FieldValue& value) {
    config.plan.precision = std::get<std::string>(value);
    set_numerics(config.plan, config.plan.gradients == "stored");
  };
  fields.push_back(std::move(precision));
  ConfigField gradients = choice<std::string>("plan", "gradients", {{"wide", "wide"}, {"stored", "stored"}},
                                              "sums of gradients: wide is fp32, stored what parameters are stored in",
                                              in_plan(&TrainingPlan::gradients));
  gradients.set = [](RunConfig& config, const FieldValue& value) {
    config.plan.gradients = std::get<std::string>(value);
    set_numerics(config.plan, config.plan.gradients == "stored");
  };
  fields.push_back(std::move(gradients));
}

void add_loss_scale(std::vector<ConfigField>& fields) {
  const auto in_scale = [](auto member) {
    return [member](auto& config) -> auto& { return config.plan.loss_scale.*member; };
  };
  fields.push_back(choice<std::string>("plan", "loss_scale",
                                       {{"auto", "auto"}, {"none", "none"}, {"dynamic", "dynamic"}, {"static", "static"}},
                                       "auto: dynamic for fp16, else none", in_scale(&LossScaleConfig::mode)));
  fields.push_back(number("plan", "loss_scale_initial", kPositive, "scale of the first step; static: of all",
                          in_scale(&LossScaleConfig::initial)));
  fields.push_back(number("plan", "loss_scale_growth_factor", {.low = 1, .includes_low = false},
                          "scale grows by this after loss_scale_growth_interval updates without overflow",
                          in_scale(&LossScaleConfig::growth_factor)));
  fields.push_back(number("plan", "loss_scale_backoff_factor",
                          {.low = 0, .high = 1, .includes_low = false, .includes_high = false},
                          "scale shrinks by this at an overflow", in_scale(&LossScaleConfig::backoff_factor)));
  fields.push_back(number("plan", "loss_scale_growth_interval", kPositiveCount, "updates without overflow before the scale grows",
                          in_scale(&LossScaleConfig::growth_interval)));
  fields.push_back(number(
      "plan", "fp8_history", FieldRange{.low = 1, .high = 65536}, "steps whose largest values decide the scale of an fp8 operand",
      [](auto& config) -> auto& { return config.plan.fp8.history; }));
  fields.push_back(number(
      "plan", "fp8_margin", {.low = 0, .high = 16}, "powers of two that an fp8 scale leaves free",
      [](auto& config) -> auto& { return config.plan.fp8.margin; }));
}

void add_communication(std::vector<ConfigField>& fields) {
  const auto in_overlap = [](auto member) {
    return [member](auto& config) -> auto& { return config.plan.overlap.*member; };
  };
  const auto in_compression = [](auto member) {
    return [member](auto& config) -> auto& { return config.plan.compression.*member; };
  };
  fields.push_back(flag("plan", "overlap_gradients", "each gradient bucket is reduced while the backward pass goes on",
                        in_overlap(&OverlapConfig::gradients)));
  fields.push_back(flag("plan", "overlap_prefetch", "zero 3: the next block's parameters are gathered while this one computes",
                        in_overlap(&OverlapConfig::prefetch)));
  fields.push_back(number("plan", "overlap_tensor_chunks", kPositiveInt,
                          "sequence_parallel: pieces of a product, each scattered while the next is computed",
                          in_overlap(&OverlapConfig::tensor_chunks)));
  std::vector<std::pair<std::string, std::string>> codecs;
  for (const char* codec : {"none", "int8", "int4", "top_k", "random_k", "sign", "power_sgd"}) codecs.emplace_back(codec, codec);
  fields.push_back(choice<std::string>("plan", "compression", codecs, "lossy code of gradient buckets on the wire",
                                       in_compression(&CompressionConfig::codec)));
  fields.push_back(flag("plan", "compression_error_feedback", "what was not sent is added to the next step's gradient",
                        in_compression(&CompressionConfig::error_feedback)));
  fields.push_back(number("plan", "compression_block", {.low = 2, .high = 1 << 20},
                          "int8, int4, sign: elements that share a scale", in_compression(&CompressionConfig::block)));
  fields.push_back(number("plan", "compression_density", {.low = 0, .high = 1, .includes_low = false},
                          "top_k, random_k: share of the elements that is sent", in_compression(&CompressionConfig::density)));
  fields.push_back(number("plan", "compression_rank", {.low = 1, .high = 1024}, "power_sgd: rank of the approximation",
                          in_compression(&CompressionConfig::rank)));
}

void add_plan(std::vector<ConfigField>& fields) {
  fields.push_back(number("plan", "data", kPositiveInt, "data-parallel ranks", degree(&ParallelDegrees::data)));
  fields.push_back(number("plan", "tensor", kPositiveInt, "tensor-parallel ranks", degree(&ParallelDegrees::tensor)));
  fields.push_back(number("plan", "pipeline", kPositiveInt, "pipeline stages", degree(&ParallelDegrees::pipeline)));
  fields.push_back(number("plan", "context", kPositiveInt, "context-parallel ranks", degree(&ParallelDegrees::context)));
  fields.push_back(number("plan", "expert", kPositiveInt, "expert-parallel ranks", degree(&ParallelDegrees::expert)));
  add_precision(fields);
  fields.push_back(number("plan", "rows", kPositiveCount, "sequences per step, over all ranks", in_batch(&GlobalBatch::rows)));
  fields.push_back(number("plan", "micro_batches", kPositiveInt, "gradient accumulation: micro-batches per data rank and step",
                          in_batch(&GlobalBatch::micro_batches)));
  fields.push_back(number(
      "plan", "bucket_bytes", kAnyCount, "size of a gradient bucket; 0 means one bucket",
      [](auto& config) -> auto& { return config.plan.buckets.bucket_bytes; }));
  fields.push_back(choice<std::string>(
      "plan", "pipeline_schedule",
      {{"gpipe", "gpipe"}, {"1f1b", "1f1b"}, {"interleaved", "interleaved"}, {"zb-h1", "zb-h1"}, {"zb-v", "zb-v"}},
      "order of pipeline work", [](auto& config) -> auto& { return config.plan.pipeline.schedule; }));
  fields.push_back(number(
      "plan", "chunks", kPositiveInt, "model chunks of each pipeline rank (interleaved, zb-v)",
      [](auto& config) -> auto& { return config.plan.pipeline.chunks; }));
  fields.push_back(text(
      "plan", "stage_layers", "layers of each pipeline stage, as in 3-2-2-1; empty: dealt evenly",
      [](auto& config) -> auto& { return config.plan.pipeline.stage_layers; }));
  fields.push_back(flag("plan", "sequence_parallel", "norm, dropout and residual on slices of the tokens over tensor ranks",
                        in_plan(&TrainingPlan::sequence_parallel)));
  fields.push_back(text("plan", "rank_order", "numbering of ranks, fastest axis first, as in tensor-context-data-pipeline",
                        in_plan(&TrainingPlan::rank_order)));
  fields.push_back(choice<std::string>(
      "plan", "recompute", {{"none", "none"}, {"selective", "selective"}, {"full", "full"}},
      "activations computed again in the backward pass", [](auto& config) -> auto& { return config.plan.recompute.mode; }));
  fields.push_back(number(
      "plan", "recompute_layers", kPositiveInt, "full: layers between two that keep their input",
      [](auto& config) -> auto& { return config.plan.recompute.layers; }));
  fields.push_back(choice<std::string>("plan", "attention", {{"blocked", "blocked"}, {"materialized", "materialized"}},
                                       "materialized: probabilities [T, T] are kept for the backward pass",
                                       in_plan(&TrainingPlan::attention)));
  fields.push_back(number("plan", "zero", {.low = 0, .high = 3},
                          "ZeRO stage: 1 deals optimizer state, 2 also gradients, 3 also parameters to the data-parallel ranks",
                          in_plan(&TrainingPlan::zero_stage)));
  fields.push_back(choice<std::string>("plan", "offload", {{"none", "none"}, {"optimizer", "optimizer"}},
                                       "optimizer: master weights and moments live in host memory",
                                       in_plan(&TrainingPlan::offload)));
  add_loss_scale(fields);
  add_communication(fields);
  fields.push_back(
      number("plan", "threads_per_rank", kPositiveInt, "threads inside a rank", in_plan(&TrainingPlan::threads_per_rank)));
}

void add_optimizer(std::vector<ConfigField>& fields) {
  fields.push_back(choice<OptimizerKind>("optimizer", "optimizer", {{"adamw", OptimizerKind::adamw}, {"sgd", OptimizerKind::sgd}},
                                         "update rule", in_optimizer(&OptimizerConfig::kind)));
  fields.push_back(number("optimizer", "learning_rate", kNonNegative, "peak; the schedule scales it",
                          in_optimizer(&OptimizerConfig::learning_rate)));
  fields.push_back(
      number("optimizer", "beta1", kProbability, "decay of the first moment", in_optimizer(&OptimizerConfig::beta1)));
  fields.push_back(
      number("optimizer", "beta2", kProbability, "decay of the second moment", in_optimizer(&OptimizerConfig::beta2)));
  fields.push_back(number("optimizer", "epsilon", kPositive, "added to the root of the second moment",
                          in_optimizer(&OptimizerConfig::epsilon)));
  fields.push_back(number("optimizer", "weight_decay", kNonNegative, "decoupled; of matrices and embeddings only",
                          in_optimizer(&OptimizerConfig::weight_decay)));
  fields.push_back(number("optimizer", "max_grad_norm", kNonNegative, "gradients are clipped to this norm; 0 means never",
                          in_optimizer(&OptimizerConfig::max_grad_norm)));
}

void add_schedule(std::vector<ConfigField>& fields) {
  fields.push_back(choice<ScheduleKind>("schedule", "learning_rate_schedule",
                                        {{"constant", ScheduleKind::constant}, {"cosine", ScheduleKind::cosine}},
                                        "shape after the warm-up", in_schedule(&ScheduleConfig::kind)));
  fields.push_back(
      number("schedule", "warmup_steps", kAnyCount, "steps of linear warm-up", in_schedule(&ScheduleConfig::warmup_steps)));
  fields.push_back(number("schedule", "decay_steps", kAnyCount, "step at which min_ratio is reached; 0 means the last",
                          in_schedule(&ScheduleConfig::decay_steps)));
  fields.push_back(number("schedule", "min_ratio", {.low = 0, .high = 1}, "final learning rate as a part of the peak",
                          in_schedule(&ScheduleConfig::min_ratio)));
}

bool is_limit(double end) { return std::isfinite(end) && end < kLargestInt; }

std::string interval(const FieldRange& range) {
  return fmt::format("{}{}, {}{}", range.includes_low ? '[' : '(', range.low, range.high, range.includes_high ? ']' : ')');
}

}  // namespace

const std::vector<ConfigField>& config_fields() {
  static const std::vector<ConfigField> kFields = [] {
    std::vector<ConfigField> fields;
    add_model(fields);
    add_plan(fields);
    add_optimizer(fields);
    add_schedule(fields);
    add_run_fields(fields);
    return fields;
  }();
  return kFields;
}

std::string accepted_values(const ConfigField& field) {
  const FieldRange& range = field.range;
  switch (field.type) {
    case FieldType::flag: return "true or false";
    case FieldType::text: return "text";
    case FieldType::unsigned_integer: return fmt::format("an integer from 0 to {}", std::numeric_limits<std::uint64_t>::max());
    case FieldType::integer:
      return range.low == range.high ? fmt::format("{:.0f}", range.low)
                                     : fmt::format("an integer from {:.0f} to {:.0f}", range.low, range.high);
    case FieldType::real:
      return is_limit(range.high) ? fmt::format("a number in {}", interval(range))
                                  : fmt::format("a number {} {}", range.includes_low ? "of at least" : "above", range.low);
    case FieldType::choice: break;
  }
  return field.choices.size() == 1 ? field.choices.front() : fmt::format("one of: {}", fmt::join(field.choices, ", "));
}

std::string type_column(const ConfigField& field) {
  const FieldRange& range = field.range;
  const std::string_view type = field.type == FieldType::real ? "number" : "integer";
  switch (field.type) {
    case FieldType::flag: return "true|false";
    case FieldType::text: return "text";
    case FieldType::choice: return fmt::format("{}", fmt::join(field.choices, "|"));
    case FieldType::unsigned_integer: return "integer >= 0";
    case FieldType::integer:
    case FieldType::real: break;
  }
  if (range.low == range.high) return fmt::format("{}", range.low);
  return is_limit(range.high) ? fmt::format("{} in {}", type, interval(range))
                              : fmt::format("{} {} {}", type, range.includes_low ? ">=" : ">", range.low);
}

}  // namespace tandem
