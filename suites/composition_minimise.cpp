// SPDX-License-Identifier: Apache-2.0
#include "suites/composition_minimise.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "core/config_fields.h"
#include "suites/composition_checks.h"

namespace tandem {
namespace {

using Simplification = std::function<void(Composition&)>;

// Options that mean something together, the large ones first: each goes back as a whole.
const std::vector<std::vector<std::string>>& groups_of_keys() {
  static const std::vector<std::vector<std::string>> kGroups = {
      {"adversary"},
      {"algorithm"},
      {"overflow_step", "overflow_rank"},
      {"expert", "experts", "expert_choices", "capacity_factor", "auxiliary_loss_weight"},
      {"pipeline", "pipeline_schedule", "chunks", "stage_layers"},
      {"context"},
      {"data"},
      {"tensor", "sequence_parallel", "overlap_tensor_chunks"},
      {"compression", "compression_error_feedback", "compression_block", "compression_density", "compression_rank"},
      {"zero"},
      {"offload"},
      {"recompute", "recompute_layers"},
      {"precision", "gradients"},
      {"loss_scale", "loss_scale_initial", "loss_scale_growth_interval", "loss_scale_growth_factor", "loss_scale_backoff_factor"},
      {"fp8_history", "fp8_margin"},
      {"embedding_dropout", "attention_dropout", "residual_dropout"},
      {"learning_rate_schedule", "warmup_steps", "decay_steps", "min_ratio"},
      {"second_row_tokens"}};
  return kGroups;
}

// Puts one key of the configuration, or of the composition itself, to its simplest value.
void reset(Composition& composition, const std::string& key) {
  static const Composition kSimplest = simplest_composition();
  for (const ConfigField& field : config_fields()) {
    if (field.key == key) return field.set(composition.config, field.get(kSimplest.config));
  }
  if (key == "row_shape") composition.row_shape = kSimplest.row_shape;
  if (key == "row_tokens") composition.row_tokens = kSimplest.row_tokens;
  if (key == "second_row_tokens") composition.second_row_tokens = kSimplest.second_row_tokens;
  if (key == "algorithm") composition.algorithm = kSimplest.algorithm;
  if (key == "adversary") composition.adversary = kSimplest.adversary;
  if (key == "overflow_step") composition.overflow_step = kSimplest.overflow_step;
  if (key == "overflow_rank") composition.overflow_rank = kSimplest.overflow_rank;
}

void add_resets(std::vector<Simplification>& all) {
  const auto add = [&](const std::vector<std::string>& keys) {
    all.emplace_back([keys](Composition& composition) {
      for (const std::string& key : keys) reset(composition, key);
    });
  };
  for (const auto& group : groups_of_keys()) add(group);
  for (const auto& group : groups_of_keys()) {
    for (const std::string& key : group) add({key});
  }
  for (const ConfigField& field : config_fields()) {
    if (!field.shorthand && field.key != "seed" && field.section != "anomaly") add({field.key});
  }
  for (const char* key : {"row_shape", "row_tokens"}) add({key});
}

// A number between the simplest and its own: the least first.
template <class Number>
void add_sizes(std::vector<Simplification>& all, const std::function<Number&(Composition&)>& member) {
  for (const Number size : {1, 2, 3, 4, 5, 6, 8}) {
    all.emplace_back([member, size](Composition& composition) {
      if (member(composition) > size) member(composition) = size;
    });
  }
  all.emplace_back([member](Composition& composition) {
    if (member(composition) > 1) --member(composition);
  });
}

void add_degrees_and_sizes(std::vector<Simplification>& all) {
  for (const auto member : {&ParallelDegrees::context, &ParallelDegrees::pipeline, &ParallelDegrees::data,
                            &ParallelDegrees::tensor, &ParallelDegrees::expert}) {
    add_sizes<int>(all, [member](Composition& c) -> int& { return c.config.plan.parallel.*member; });
  }
  add_sizes<int>(all, [](Composition& c) -> int& { return c.config.plan.zero_stage; });
  add_sizes<int>(all, [](Composition& c) -> int& { return c.config.model.experts; });
  add_sizes<int>(all, [](Composition& c) -> int& { return c.config.plan.batch.micro_batches; });
  add_sizes<std::int64_t>(all, [](Composition& c) -> std::int64_t& { return c.config.plan.batch.rows; });
  add_sizes<std::int64_t>(all, [](Composition& c) -> std::int64_t& { return c.config.steps; });
  add_sizes<int>(all, [](Composition& c) -> int& { return c.config.model.layers; });
  add_sizes<std::int64_t>(all, [](Composition& c) -> std::int64_t& { return c.config.model.sequence; });
  add_sizes<std::int64_t>(all, [](Composition& c) -> std::int64_t& { return c.config.model.vocabulary; });
  add_sizes<std::int64_t>(all, [](Composition& c) -> std::int64_t& { return c.config.model.mlp_hidden; });
  // Heads keep their size, and a smaller size keeps their number.
  for (const int heads : {1, 2, 3, 4, 6}) {
    all.emplace_back([heads](Composition& composition) {
      GptConfig& model = composition.config.model;
      if (model.heads <= heads) return;
      model.hidden = model.head_size() * heads;
      model.heads = heads;
    });
  }
  for (const int size : {1, 2, 3}) {
    all.emplace_back([size](Composition& composition) {
      GptConfig& model = composition.config.model;
      if (model.head_size() > size) model.hidden = std::int64_t{model.heads} * size;
    });
  }
}

// Whether a size falls below the simplest one that was not there already: settings are written from simplest_composition(), and
// sizes below it are degenerate.
bool degenerates(const Composition& from, const Composition& to) {
  static const Composition kSimplest = simplest_composition();
  const auto sizes = [](const Composition& composition) {
    const GptConfig& model = composition.config.model;
    return std::vector<std::int64_t>{model.vocabulary, model.sequence,    model.hidden,
                                     model.heads,      model.mlp_width(), composition.config.plan.batch.rows};
  };
  const std::vector<std::int64_t> before = sizes(from), after = sizes(to), least = sizes(kSimplest);
  for (std::size_t i = 0; i < least.size(); ++i) {
    if (after[i] < before[i] && after[i] < least[i]) return true;
  }
  return false;
}

// Legal, where needed after the options that stand in the way have gone back as well.
std::optional<Composition> simplified(const Composition& from, const Simplification& simplify) {
  constexpr int kRounds = 4;
  Composition composition = from;
  simplify(composition);
  for (int round = 0; round < kRounds; ++round) {
    composition.row_tokens = std::min(composition.row_tokens, composition.config.model.sequence);
    composition.second_row_tokens = std::min(composition.second_row_tokens, composition.config.model.sequence);
    if (!refusal(composition)) return composition;
    for (const Conflict& conflict : conflicts(composition.config.plan, composition.config.model))
      reset(composition, conflict.option);
    if (composition.overflow_step >= 0 && conflicts(composition.config.plan, composition.config.model).empty()) {
      reset(composition, "overflow_step");
      reset(composition, "overflow_rank");
    }
  }
  return std::nullopt;
}

// Whether a tensor or a loss was off by more than rounding explains.
bool bounds_decided(const Verdict& verdict) {
  if (verdict.check.starts_with("property ")) return verdict.check.find("held_out_loss_error") != std::string::npos;
  return verdict.criterion == Criterion::rounding && verdict.first_bad_tensor.has_value();
}

}  // namespace

std::optional<CompositionFailure> first_failure(const Composition& composition, const std::string& name,
                                                const RunnerOptions& options, const std::string& only,
                                                std::vector<CaseResult>* results) {
  std::optional<CompositionFailure> first;
  for (Case& entry : composition_cases(composition, name)) {
    const std::string check = check_of(entry.name);
    if (!only.empty() && check != only) continue;
    if (!only.empty()) entry.localise = {};
    CaseResult result = run_case(entry, options);
    const Verdict& verdict = result.verdict;
    const bool red = verdict.status == Status::fail || verdict.status == Status::invalid;
    if (red && !first) {
      const std::string precision = bounds_decided(verdict) ? composition.config.plan.precision : "";
      first = CompositionFailure{check, verdict.check, precision, verdict.reason};
    }
    if (results != nullptr) results->push_back(std::move(result));
  }
  return first;
}

Minimised minimise(const Composition& failing, const std::function<bool(const Composition&)>& fails_alike,
                   std::int64_t most_tried) {
  std::vector<Simplification> all;
  add_resets(all);
  add_degrees_and_sizes(all);
  Minimised result{failing};
  std::set<std::string> seen = {to_settings(failing)};
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (const Simplification& simplify : all) {
      const std::optional<Composition> candidate = simplified(result.composition, simplify);
      if (!candidate || degenerates(result.composition, *candidate)) continue;
      if (!seen.insert(to_settings(*candidate)).second || undecidable(*candidate)) continue;
      if (result.tried == most_tried) {
        result.complete = false;
        return result;
      }
      ++result.tried;
      if (!fails_alike(*candidate)) continue;
      result.composition = *candidate;
      smaller = true;
    }
  }
  return result;
}

}  // namespace tandem
