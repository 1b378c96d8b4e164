// SPDX-License-Identifier: Apache-2.0
#include "suites/composition_draw.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "core/config_fields.h"
#include "core/error.h"
#include "core/rng.h"

namespace tandem {
namespace {

constexpr int kRepairs = 12;
constexpr std::int64_t kDraws = 100000;
constexpr std::int64_t kSeedsOfRows = 40;

void add_layout(std::vector<ComposedOption>& options) {
  options.push_back({"data", {"data=1", "data=2", "data=3", "data=4"}, 2});
  options.push_back({"tensor", {"tensor=1", "tensor=2", "tensor=3", "tensor=4"}, 2});
  options.push_back({"pipeline", {"pipeline=1", "pipeline=2", "pipeline=3", "pipeline=4"}, 2});
  options.push_back({"context", {"context=1", "context=2", "context=3"}, 2});
  options.push_back({"expert", {"expert=1", "expert=2", "expert=3"}, 1});
  options.push_back({"rank_order",
                     {"rank_order=tensor-context-data-pipeline", "rank_order=pipeline-data-context-tensor",
                      "rank_order=data-tensor-pipeline-context", "rank_order=context-pipeline-tensor-data",
                      "rank_order=context-data-tensor-pipeline", "rank_order=tensor-pipeline-data-context"}});
  options.push_back(
      {"pipeline_schedule",
       {"pipeline_schedule=1f1b", "pipeline_schedule=gpipe", "pipeline_schedule=zb-h1", "pipeline_schedule=interleaved chunks=2",
        "pipeline_schedule=interleaved chunks=3", "pipeline_schedule=zb-v chunks=2"}});
  options.push_back({"stage_layers", {"@uneven=0", "@uneven=1"}});
  options.push_back({"sequence_parallel", {"sequence_parallel=false", "sequence_parallel=true"}});
  options.push_back({"overlap_tensor_chunks",
                     {"overlap_tensor_chunks=1", "overlap_tensor_chunks=2", "overlap_tensor_chunks=3", "overlap_tensor_chunks=7"},
                     2});
  options.push_back({"rows", {"rows=2", "rows=1", "rows=3", "rows=5", "rows=7", "rows=9"}});
  options.push_back(
      {"micro_batches", {"micro_batches=1", "micro_batches=2", "micro_batches=3", "micro_batches=4", "micro_batches=6"}});
  options.push_back({"threads_per_rank", {"threads_per_rank=1", "threads_per_rank=2"}, 5});
}

void add_memory_and_messages(std::vector<ComposedOption>& options) {
  options.push_back({"zero", {"zero=0", "zero=1", "zero=2", "zero=3"}, 2});
  options.push_back({"offload", {"offload=none", "offload=optimizer"}, 2});
  options.push_back(
      {"recompute", {"recompute=none", "recompute=selective", "recompute=full", "recompute=full recompute_layers=2"}});
  options.push_back({"attention", {"attention=blocked", "attention=materialized"}});
  options.push_back({"bucket_bytes", {"bucket_bytes=0", "bucket_bytes=1", "bucket_bytes=400"}});
  options.push_back({"overlap_gradients", {"overlap_gradients=false", "overlap_gradients=true"}});
  options.push_back({"overlap_prefetch", {"overlap_prefetch=true", "overlap_prefetch=false"}});
  options.push_back({"compression",
                     {"compression=none", "compression=top_k compression_density=1", "compression=top_k compression_density=0.2",
                      "compression=random_k compression_density=0.2", "compression=int8 compression_block=16", "compression=int8",
                      "compression=int4 compression_block=6", "compression=sign compression_block=16",
                      "compression=power_sgd compression_rank=1", "compression=power_sgd compression_rank=2"},
                     3});
  options.push_back({"compression_error_feedback", {"compression_error_feedback=true", "compression_error_feedback=false"}});
  options.push_back({"algorithm",
                     {"algorithm=direct", "algorithm=automatic", "algorithm=ring", "algorithm=recursive", "algorithm=tree",
                      "algorithm=hierarchical"},
                     3});
  options.push_back({"adversary", {"adversary=0", "adversary=7"}, 4});
}

void add_numerics(std::vector<ComposedOption>& options) {
  options.push_back({"precision",
                     {"precision=fp32", "precision=fp64", "precision=bf16", "precision=fp16", "precision=bf16-autocast",
                      "precision=fp16-autocast", "precision=fp8"}});
  options.push_back({"gradients", {"gradients=wide", "gradients=stored"}, 2});
  options.push_back({"loss_scale", {"loss_scale=auto", "loss_scale=none", "loss_scale=dynamic", "loss_scale=static"}, 2});
  options.push_back({"loss_scale_initial", {"loss_scale_initial=1024", "loss_scale_initial=8"}});
  options.push_back({"loss_scale_growth_interval", {"loss_scale_growth_interval=2000", "loss_scale_growth_interval=1"}});
  options.push_back({"fp8", {"fp8_history=16", "fp8_history=2", "fp8_history=1 fp8_margin=1"}});
  options.push_back({"overflow", {"overflow_step=-1", "overflow_step=0", "overflow_step=1"}});
  options.push_back({"optimizer", {"optimizer=adamw", "optimizer=sgd"}, 2});
  options.push_back({"max_grad_norm", {"max_grad_norm=0.5", "max_grad_norm=0"}, 2});
  options.push_back({"weight_decay", {"weight_decay=0.1", "weight_decay=0"}, 2});
  options.push_back({"learning_rate_schedule",
                     {"learning_rate_schedule=constant", "learning_rate_schedule=cosine warmup_steps=1 decay_steps=3"}});
}

void add_model_and_rows(std::vector<ComposedOption>& options) {
  options.push_back({"tied", {"tied=true", "tied=false"}});
  options.push_back(
      {"dropout", {"dropout=0", "dropout=0.1", "embedding_dropout=0.2", "attention_dropout=0.2", "residual_dropout=0.2"}});
  options.push_back({"heads", {"@heads=1", "@heads=2", "@heads=3"}});
  options.push_back({"head_size", {"@head_size=2", "@head_size=1", "@head_size=3", "@head_size=4"}});
  options.push_back({"mlp_hidden", {"@mlp=3", "@mlp=5", "@mlp=8"}});
  options.push_back({"layers", {"@layers=0", "@layers=1", "@layers=2"}});
  options.push_back({"vocabulary", {"vocabulary=5", "vocabulary=11", "vocabulary=13", "vocabulary=37"}});
  options.push_back({"sequence", {"sequence=4", "sequence=7", "sequence=9"}});
  options.push_back({"row_tokens", {"@short=0", "@short=1", "@short=3"}});
  options.push_back({"second_row_tokens", {"second_row_tokens=0", "second_row_tokens=2", "second_row_tokens=3"}, 2});
  options.push_back({"row_shape", {"row_shape=skewed", "row_shape=packed", "row_shape=full"}});
  options.push_back({"experts", {"@experts=0", "@experts=1", "@experts=2", "@experts=3"}, 4});
  options.push_back({"expert_choices", {"expert_choices=1", "expert_choices=2"}});
  options.push_back({"capacity_factor", {"capacity_factor=1.1", "capacity_factor=0.3", "capacity_factor=2"}});
  options.push_back({"auxiliary_loss_weight", {"auxiliary_loss_weight=0.1", "auxiliary_loss_weight=0"}, 3});
  options.push_back({"steps", {"steps=1", "steps=2", "steps=3", "steps=4"}});
}

std::size_t index_of(std::string_view name) {
  const auto& options = composed_options();
  const auto found = std::ranges::find(options, name, &ComposedOption::name);
  return found == options.end() ? options.size() : static_cast<std::size_t>(found - options.begin());
}

// A setting whose text was read once: compositions are drawn by the ten thousand.
struct Setting {
  std::string text;
  const ConfigField* field = nullptr;  // of the configuration; null: of the composition, or a size
  FieldValue value;
};

Setting read_setting(const std::string& text) {
  const std::string key = text.substr(0, text.find('='));
  for (const ConfigField& field : config_fields()) {
    if (field.key != key) continue;
    RunConfig config;
    set_option(config, text);
    return {text, &field, field.get(config)};
  }
  return {text, nullptr, {}};
}

// [options][values][settings]
const std::vector<std::vector<std::vector<Setting>>>& settings() {
  static const auto kSettings = [] {
    std::vector<std::vector<std::vector<Setting>>> all;
    for (const ComposedOption& option : composed_options()) {
      auto& values = all.emplace_back();
      for (const std::string& value : option.values) {
        auto& of_value = values.emplace_back();
        std::istringstream words(value);
        for (std::string word; words >> word;) of_value.push_back(read_setting(word));
      }
    }
    return all;
  }();
  return kSettings;
}

using Sizes = std::map<std::string, int, std::less<>>;

// What a composition's sizes are in units of what must divide them.
void apply_sizes(Composition& composition, const Sizes& sizes) {
  GptConfig& model = composition.config.model;
  TrainingPlan& plan = composition.config.plan;
  const auto size = [&](const char* key) { return sizes.at(key); };
  model.heads = plan.parallel.tensor * size("@heads");
  model.hidden = std::int64_t{model.heads} * size("@head_size");
  model.mlp_hidden = std::int64_t{plan.parallel.tensor} * size("@mlp");
  model.experts = plan.parallel.expert * size("@experts");
  const int stages = plan.parallel.pipeline * plan.pipeline.chunks;
  model.layers = stages + size("@layers");
  composition.row_tokens = model.sequence - size("@short");
  if (composition.row_tokens == model.sequence) composition.row_tokens = 0;
  if (size("@uneven") == 0 || stages == 1) return;
  // All that is beyond one layer a stage to the last but one.
  for (int stage = 0; stage < stages; ++stage) {
    const bool fullest = stage == stages - 2;
    plan.pipeline.stage_layers += fmt::format("{}{}", stage == 0 ? "" : "-", fullest ? 1 + size("@layers") : 1);
  }
}

// Whether the option changes anything in the composition.
bool has_effect(std::string_view option, const Composition& composition) {
  const RunConfig& config = composition.config;
  const TrainingPlan& plan = config.plan;
  const ParallelDegrees& degrees = plan.parallel;
  const bool reduces = degrees.data * degrees.context > 1;
  if (option == "rank_order") {
    return (degrees.data > 1) + (degrees.tensor > 1) + (degrees.pipeline > 1) + (degrees.context > 1) > 1;
  }
  if (option == "algorithm" || option == "adversary") return degrees.world_size() > 1;
  if (option == "bucket_bytes" || option == "overlap_gradients" || option == "compression") return reduces;
  if (option == "overlap_prefetch") return plan.zero_stage == 3;
  const int stages = degrees.pipeline * plan.pipeline.chunks;
  if (option == "stage_layers") return stages > 1 && config.model.layers > stages;
  if (option == "compression_error_feedback") return plan.compression.codec != "none";
  if (option == "gradients") return is_16bit(plan.numerics.storage);
  if (option == "loss_scale_initial") return scales_loss(plan);
  if (option == "loss_scale_growth_interval") return scales_loss_dynamically(plan);
  if (option == "fp8") return plan.numerics.fp8;
  if (option == "expert_choices" || option == "capacity_factor" || option == "auxiliary_loss_weight") {
    return config.model.experts > 1;
  }
  if (option == "second_row_tokens") return config.steps > 1;
  return true;
}

// Options at fault that can be drawn again. conflicts() names keys of the configuration, some of which are not drawn themselves.
std::vector<std::size_t> at_fault(const Composition& composition) {
  std::vector<std::size_t> found;
  const auto blame = [&](std::string_view name) {
    if (const std::size_t index = index_of(name); index < composed_options().size()) found.push_back(index);
  };
  const int ranks = composition.config.plan.parallel.world_size();
  if (ranks > kMostComposedRanks) {
    for (const char* axis : {"data", "tensor", "pipeline", "context"}) blame(axis);
    return found;
  }
  for (const Conflict& conflict : conflicts(composition.config.plan, composition.config.model)) {
    blame(conflict.option == "chunks" ? "pipeline_schedule" : conflict.option);
    if (conflict.option == "expert") blame("experts");
    if (conflict.option == "compression") blame("zero"), blame("precision");
    if (conflict.option == "precision") blame("experts");
    if (conflict.option == "context") blame("sequence");
    if (conflict.option == "overlap_tensor_chunks") blame("sequence_parallel");
    if (conflict.option == "sequence_parallel") blame("tensor");
  }
  if (found.empty() && refusal(composition)) {
    for (const char* name : {"overflow", "steps", "loss_scale", "expert_choices"}) blame(name);
  }
  return found;
}

class Drawer {
 public:
  explicit Drawer(CounterRng rng) : rng_(rng) {}

  int draw(std::size_t option) {
    const ComposedOption& of = composed_options()[option];
    const auto others = static_cast<int>(of.values.size()) - 1;
    const int drawn = static_cast<int>(rng_.next_below(static_cast<std::uint64_t>(of.weight_of_first + others)));
    return std::max(0, drawn - of.weight_of_first + 1);
  }

  // A legal composition of at most kMostComposedRanks ranks, or nothing.
  std::optional<Levels> draw_all(DrawCounts& counts) {
    ++counts.drawn;
    Levels levels;
    for (std::size_t i = 0; i < composed_options().size(); ++i) levels.push_back(draw(i));
    for (int repair = 0; repair <= kRepairs; ++repair) {
      const Composition composition = compose(levels);
      const std::vector<std::size_t> faults = at_fault(composition);
      const bool legal = composition.config.plan.parallel.world_size() <= kMostComposedRanks && !refusal(composition);
      if (legal) {
        counts.repaired += repair > 0 ? 1 : 0;
        return without_idle(levels);
      }
      for (const std::size_t fault : faults) levels[fault] = draw(fault);
    }
    ++counts.refused;
    return std::nullopt;
  }

  std::uint64_t seed_of_rows() { return rng_.next_below(1000000); }
  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(rng_.next_below(static_cast<std::uint64_t>(bound))); }

 private:
  // One may make another idle.
  static Levels without_idle(Levels levels) {
    for (bool changed = true; changed;) {
      changed = false;
      const Composition composition = compose(levels);
      for (std::size_t i = 0; i < levels.size(); ++i) {
        if (levels[i] == kIdle || has_effect(composed_options()[i].name, composition)) continue;
        changed = changed || levels[i] > 0;
        levels[i] = kIdle;
      }
    }
    return levels;
  }

  CounterRng rng_;
};

// A rank that keeps a part of every gradient whatever the ZeRO stage.
std::int64_t overflowing_rank(const Composition& composition, Drawer& drawer) {
  const TrainingPlan& plan = composition.config.plan;
  return plan.zero_stage > 0 ? 0 : drawer.below(plan.parallel.world_size());
}

}  // namespace

const std::vector<ComposedOption>& composed_options() {
  static const std::vector<ComposedOption> kOptions = [] {
    std::vector<ComposedOption> options;
    add_layout(options);
    add_memory_and_messages(options);
    add_numerics(options);
    add_model_and_rows(options);
    return options;
  }();
  return kOptions;
}

Composition compose(const Levels& levels) {
  Composition composition = simplest_composition();
  Sizes sizes;
  for (std::size_t i = 0; i < levels.size(); ++i) {
    for (const Setting& setting : settings()[i].at(static_cast<std::size_t>(std::max(0, levels[i])))) {
      if (setting.field != nullptr) {
        setting.field->set(composition.config, setting.value);
      } else if (setting.text.front() == '@') {
        const std::size_t equals = setting.text.find('=');
        sizes[setting.text.substr(0, equals)] = std::stoi(setting.text.substr(equals + 1));
      } else {
        set_option(composition, setting.text);
      }
    }
  }
  apply_sizes(composition, sizes);
  return composition;
}

DrawnComposition draw_composition(std::uint64_t seed, std::int64_t number, DrawCounts& counts, Decidable decidable) {
  Drawer drawer(CounterRng(seed, fmt::format("composition {}", number)));
  for (std::int64_t i = 0; i < kDraws; ++i) {
    const std::optional<Levels> levels = drawer.draw_all(counts);
    if (!levels) continue;
    DrawnComposition drawn{seed, number, *levels, compose(*levels)};
    if (drawn.composition.overflow_step >= 0) drawn.composition.overflow_rank = overflowing_rank(drawn.composition, drawer);
    drawn.composition.config.seed = drawer.seed_of_rows();
    if (decidable == Decidable::no) return drawn;
    for (std::int64_t attempt = 0; attempt < kSeedsOfRows; ++attempt) {
      if (!undecidable(drawn.composition)) return drawn;
      drawn.composition.config.seed = drawer.seed_of_rows();
    }
    ++counts.undecidable;
  }
  throw ContractError(fmt::format("no legal composition among {} draws", kDraws));
}

CompositionCoverage::CompositionCoverage() {
  for (const ComposedOption& option : composed_options()) {
    first_.push_back(num_values_);
    num_values_ += option.values.size();
  }
  values_.assign(num_values_, false);
  pairs_.assign(num_values_ * num_values_, false);
}

void CompositionCoverage::add(const Levels& levels) {
  for (std::size_t i = 0; i < levels.size(); ++i) {
    if (levels[i] == kIdle) continue;
    const std::size_t value = first_[i] + static_cast<std::size_t>(levels[i]);
    values_[value] = true;
    for (std::size_t j = i + 1; j < levels.size(); ++j) {
      if (levels[j] == kIdle) continue;
      pairs_[value * num_values_ + first_[j] + static_cast<std::size_t>(levels[j])] = true;
    }
  }
}

std::int64_t CompositionCoverage::values() const { return std::ranges::count(values_, true); }
std::int64_t CompositionCoverage::pairs() const { return std::ranges::count(pairs_, true); }

std::int64_t CompositionCoverage::pairs_in_common(const CompositionCoverage& all) const {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < pairs_.size(); ++i) count += pairs_[i] && all.pairs_[i] ? 1 : 0;
  return count;
}

std::string CompositionCoverage::name_of(std::size_t index) const {
  const auto option = static_cast<std::size_t>(std::ranges::upper_bound(first_, index) - first_.begin()) - 1;
  return composed_options()[option].values[index - first_[option]];
}

std::vector<std::string> CompositionCoverage::missing(const CompositionCoverage& all, std::size_t most) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_values_; ++i) {
    if (all.values_[i] && !values_[i]) names.push_back(name_of(i));
  }
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    if (all.pairs_[i] && !pairs_[i]) names.push_back(name_of(i / num_values_) + " + " + name_of(i % num_values_));
  }
  names.resize(std::min(names.size(), most));
  return names;
}

CompositionCoverage reachable_pairs(std::int64_t draws) {
  CompositionCoverage all;
  DrawCounts counts;
  for (std::int64_t number = 0; number < draws; ++number) {
    all.add(draw_composition(0, number, counts, Decidable::no).levels);
  }
  return all;
}

}  // namespace tandem
