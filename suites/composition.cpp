// SPDX-License-Identifier: Apache-2.0
#include "suites/composition.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/config_fields.h"
#include "core/error.h"
#include "core/io/hash.h"
#include "core/io/json_field.h"
#include "optimized/context_parallel/zigzag.h"
#include "suites/kept_training.h"
#include "suites/one_step.h"

namespace tandem {
namespace {

constexpr const char* kSection = "composition";
constexpr const char* kRowShape = "row_shape";
constexpr const char* kAlgorithm = "algorithm";
constexpr std::array<std::pair<const char*, RowShape>, 3> kRowShapes = {
    {{"full", RowShape::full}, {"skewed", RowShape::skewed}, {"packed", RowShape::packed}}};

struct Number {
  const char* key;
  std::int64_t Composition::*member;
  std::int64_t low;
};
constexpr Number kNumbers[] = {{"row_tokens", &Composition::row_tokens, 0},
                               {"second_row_tokens", &Composition::second_row_tokens, 0},
                               {"adversary", &Composition::adversary, 0},
                               {"overflow_step", &Composition::overflow_step, -1},
                               {"overflow_rank", &Composition::overflow_rank, 0}};

std::string name_of(RowShape shape) {
  return std::ranges::find(kRowShapes, shape, &std::pair<const char*, RowShape>::second)->first;
}

// Whether `key` is one of the composition's own and was set. Throws InputError where the value is none of the key's.
bool set_own(Composition& composition, std::string_view key, const std::string& value, std::string_view source) {
  const auto refuse = [&](const std::string& wanted) {
    throw InputError(fmt::format("{} is {} in {}; it must be {}", key, value, source, wanted));
  };
  if (key == kRowShape) {
    const auto* const found = std::ranges::find_if(kRowShapes, [&](const auto& known) { return value == known.first; });
    if (found == kRowShapes.end()) refuse("one of: full, skewed, packed");
    composition.row_shape = found->second;
    return true;
  }
  if (key == kAlgorithm) {
    if (!find_algorithm(value)) refuse("one of: automatic, direct, ring, recursive, tree, hierarchical");
    composition.algorithm = value;
    return true;
  }
  for (const Number& number : kNumbers) {
    if (key != number.key) continue;
    std::int64_t parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    if (error != std::errc() || end != value.data() + value.size() || parsed < number.low || parsed > INT32_MAX) {
      refuse(fmt::format("an integer from {} to {}", number.low, INT32_MAX));
    }
    composition.*number.member = parsed;
    return true;
  }
  return false;
}

std::string text_of(const FieldValue& value) {
  return std::visit([](const auto& held) { return fmt::format("{}", held); }, value);
}

// Rows of the second step may be of another length.
class ComposedRows final : public WrappedSource {
 public:
  ComposedRows(std::shared_ptr<const BatchSource> rows, std::shared_ptr<const BatchSource> second)
      : WrappedSource(*rows), rows_(std::move(rows)), second_(std::move(second)) {}

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    return (step == 1 ? *second_ : *rows_).training_rows(step, global_rows, rows);
  }

 private:
  std::shared_ptr<const BatchSource> rows_, second_;
};

std::int64_t row_tokens_of(const Composition& composition) {
  return composition.row_tokens > 0 ? composition.row_tokens : composition.config.model.sequence;
}

std::shared_ptr<const BatchSource> rows_of(const Composition& composition, std::int64_t tokens) {
  const GptConfig& model = composition.config.model;
  return std::make_shared<SyntheticCorpus>(SyntheticOptions{.vocabulary = model.vocabulary,
                                                            .branching = std::min<std::int64_t>(8, model.vocabulary),
                                                            .sequence = tokens,
                                                            .seed = composition.config.seed,
                                                            .row_shape = composition.row_shape});
}

std::optional<std::string> same_inputs(const PairInputs& inputs) {
  const ParallelDegrees& degrees = inputs.plan.parallel;
  if (degrees.data * degrees.context == 1) return std::nullopt;
  std::set<std::uint64_t> different;
  std::size_t parts = 0;
  for (int data = 0; data < degrees.data; ++data) {
    const Batch rows =
        inputs.data->training_rows(0, inputs.plan.batch.rows, balanced_part(inputs.plan.batch.rows, degrees.data, data));
    for (int context = 0; rows.rows > 0 && context < degrees.context; ++context) {
      const Batch part = context_slice(rows, degrees.context, context);
      const std::uint64_t ids = hash64(std::as_bytes(std::span(part.ids)));
      different.insert(hash64(std::as_bytes(std::span(part.targets)), ids));
      ++parts;
    }
  }
  if (parts < 2) return "only one rank has rows";
  return different.size() > 1 ? std::nullopt : std::optional<std::string>("all ranks have the same rows");
}

// Rows of documents of one token each have nothing to predict, and no gradient.
bool learns_nothing(const PairInputs& inputs) {
  for (std::int64_t step = 0; step < std::max<std::int64_t>(1, inputs.steps); ++step) {
    if (inputs.data->training_batch(step, inputs.plan.batch.rows).valid_tokens() == 0) return true;
  }
  return false;
}

}  // namespace

Composition simplest_composition() {
  Composition simplest;
  GptConfig& model = simplest.config.model;
  model.vocabulary = 5;
  model.sequence = 4;
  model.layers = 1;
  model.hidden = 4;
  model.heads = 2;
  model.mlp_hidden = 6;
  model.capacity_factor = 1.1;  // some tokens find no room
  model.auxiliary_loss_weight = 0.1;
  RunConfig& config = simplest.config;
  config.plan.batch.rows = 2;
  config.plan.loss_scale.initial = 1024;  // low enough that nothing overflows
  config.optimizer.learning_rate = 3e-3;
  config.optimizer.epsilon = 1e-4;       // conditioning of the comparison: the sign of a tiny gradient must not decide an update
  config.optimizer.max_grad_norm = 0.5;  // clipping is active
  config.initialization = Initialization::scattered;
  config.steps = 1;
  return simplest;
}

void set_option(Composition& composition, std::string_view assignment) {
  const std::size_t equals = assignment.find('=');
  std::string_view key = assignment.substr(0, equals);
  if (key.starts_with("composition.")) key.remove_prefix(std::string_view("composition.").size());
  const bool own =
      equals != std::string_view::npos && set_own(composition, key, std::string(assignment.substr(equals + 1)), "--set");
  if (!own) set_option(composition.config, assignment);
}

std::string to_settings(const Composition& composition) {
  const Composition simplest = simplest_composition();
  std::string text;
  const auto add = [&](std::string_view key, const std::string& value, const std::string& plain) {
    if (value != plain) text += fmt::format("{}--set {}={}", text.empty() ? "" : " ", key, value);
  };
  for (const ConfigField& field : config_fields()) {
    if (!field.shorthand) add(field.key, text_of(field.get(composition.config)), text_of(field.get(simplest.config)));
  }
  add(kRowShape, name_of(composition.row_shape), name_of(simplest.row_shape));
  add(kAlgorithm, composition.algorithm, simplest.algorithm);
  for (const Number& number : kNumbers) {
    add(number.key, std::to_string(composition.*number.member), std::to_string(simplest.*number.member));
  }
  return text;
}

std::string to_json(const Composition& composition) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(to_json(composition.config));
  nlohmann::ordered_json own;
  own[kRowShape] = name_of(composition.row_shape);
  own[kAlgorithm] = composition.algorithm;
  for (const Number& number : kNumbers) own[number.key] = composition.*number.member;
  json[kSection] = own;
  return json.dump(2) + "\n";
}

Composition composition_from_json(const std::string& text, const std::string& source_name) {
  const nlohmann::json json = parse_json_object(text, source_name);
  Composition composition = simplest_composition();
  // What the file does not say is simple: a configuration is read into all defaults, and its own keys alone are taken over.
  nlohmann::json config = json;
  config.erase(kSection);
  const RunConfig read = config_from_json(config.dump(), source_name);
  for (const ConfigField& field : config_fields()) {
    const auto section = config.find(field.section);
    if (section == config.end() || !section->contains(field.key)) continue;
    if (field.shorthand) {
      field.set(composition.config, (*section)[field.key].get<double>());
    } else {
      field.set(composition.config, field.get(read));
    }
  }
  if (!json.contains(kSection)) return composition;
  const nlohmann::json& own = json[kSection];
  if (!own.is_object()) throw InputError(fmt::format("{}: {} must be an object", source_name, kSection));
  for (const auto& [key, value] : own.items()) {
    const std::string written = value.is_string() ? value.get<std::string>() : value.dump();
    if (!set_own(composition, key, written, source_name))
      throw InputError(fmt::format("unknown key '{}.{}' in {}", kSection, key, source_name));
  }
  return composition;
}

Composition read_composition(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw InputError(fmt::format("cannot read {}", file.string()));
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  return composition_from_json(text, file.string());
}

std::optional<std::string> refusal(const Composition& composition) {
  const RunConfig& config = composition.config;
  try {
    validate(config.model);
    require_legal(config.plan, config.model);
    const auto demand = [](bool good, const std::string& reason) {
      if (!good) throw InputError("this composition cannot run: " + reason);
    };
    demand(config.steps <= kMostComposedSteps,
           fmt::format("steps = {}; rounding is judged over at most {}", config.steps, kMostComposedSteps));
    const std::int64_t longest = std::max(composition.row_tokens, composition.second_row_tokens);
    demand(longest <= config.model.sequence,
           fmt::format("rows of {} tokens, the model has {} positions", longest, config.model.sequence));
    demand(composition.second_row_tokens <= row_tokens_of(composition), "second_row_tokens is more than row_tokens");
    if (composition.overflow_step < 0) return std::nullopt;
    demand(scales_loss_dynamically(config.plan), "overflow_step needs a dynamic loss scale, which halves and goes on");
    demand(composition.overflow_step + 1 < config.steps, "overflow_step needs a step behind it");
    demand(composition.overflow_rank < config.plan.parallel.world_size(), "there is no rank overflow_rank");
  } catch (const InputError& error) {
    return error.what();
  }
  return std::nullopt;
}

PairInputs inputs_of(const Composition& composition) {
  const RunConfig& config = composition.config;
  PairInputs inputs;
  inputs.model = config.model;
  inputs.plan = config.plan;
  inputs.optimizer = config.optimizer;
  inputs.schedule = config.schedule;
  inputs.steps = config.steps;
  inputs.seed = config.seed;
  inputs.initialization = config.initialization;
  inputs.data = rows_of(composition, row_tokens_of(composition));
  if (composition.second_row_tokens > 0) {
    inputs.data = std::make_shared<ComposedRows>(inputs.data, rows_of(composition, composition.second_row_tokens));
  }
  return inputs;
}

RunContext context_of(const Composition& composition, const RunContext& context) {
  // Longer than an operation on these small models takes, short enough for hundreds of them.
  constexpr double kLongestDelaySeconds = 1e-4;
  RunContext result = context;
  result.threads_per_rank = composition.config.plan.threads_per_rank;
  result.world.algorithm = *find_algorithm(composition.algorithm);
  result.world.adversary.reset();
  if (composition.adversary > 0) {
    result.world.adversary = AdversaryScript{static_cast<std::uint64_t>(composition.adversary), kLongestDelaySeconds};
  }
  return result;
}

std::optional<std::string> undecidable(const Composition& composition) {
  const PairInputs inputs = inputs_of(composition);
  if (auto reason = same_inputs(inputs)) return reason;
  // A norm of two numbers leaves their order alone: its gradients are differences of equal terms, all rounding.
  if (inputs.model.hidden < 3) return "a width below 3 has no gradient through its norms";
  if (learns_nothing(inputs)) return "a batch has no target";
  if (inputs.model.experts < 2) return std::nullopt;
  reference::TrainingRun run = reference_run(inputs);
  run.steps = std::max<std::int64_t>(1, inputs.steps);
  const double margin = kept_training<double>(run)->smallest_margin;
  if (margin >= decided_margin(inputs.plan)) return std::nullopt;
  return fmt::format("a choice of an expert is {:.1e} from a tie", margin);
}

}  // namespace tandem
