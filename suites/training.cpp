// SPDX-License-Identifier: Apache-2.0
// Training end to end: golden trajectories, the entropy floor of a source whose entropy is known, real text, resume, generation.
// docs/techniques/training.md
#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "core/synthetic_corpus.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/world.h"
#include "optimized/data_pipeline/text_source.h"
#include "optimized/training/generate.h"
#include "optimized/training/trainer.h"
#include "reference/generation.h"
#include "suites/benefits.h"
#include "suites/golden_cases.h"
#include "suites/machine_of.h"
#include "suites/pair.h"
#include "suites/scratch_folder.h"
#include "suites/suites.h"
#include "suites/training_cases.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

Case training_case(const std::string& name, const std::string& summary, Criterion criterion, bool quick) {
  Case result;
  result.suite = "training";
  result.name = "training/" + name;
  result.summary = summary;
  result.criterion = criterion;
  result.quick = quick;
  return result;
}

// ---- the entropy floor

RunConfig floor_config(const RunContext& context, std::uint64_t seed) {
  RunConfig config;
  config.model.vocabulary = 32;
  config.model.sequence = 32;
  config.model.layers = 1;
  config.model.hidden = 48;
  config.model.heads = 3;
  config.plan.parallel.data = 2;
  config.plan.batch = {32, 1};
  config.plan.threads_per_rank = context.threads_per_rank;
  config.optimizer.learning_rate = 1e-2;
  config.optimizer.weight_decay = 0.0;
  config.schedule = {ScheduleKind::cosine, 20, 0, 0.05};
  config.steps = 300;
  config.evaluate_every_steps = 0;
  config.evaluate_batches = 16;
  config.seed = seed;
  return config;
}

Case entropy_floor_case(int seeds, bool quick) {
  Case result =
      training_case(fmt::format("entropy_floor/seeds{}", seeds),
                    "a small GPT reaches the known entropy rate of a Markov source within 3 %", Criterion::convergence, quick);
  result.model = floor_config({}, 1).model;
  result.plan = floor_config({}, 1).plan;
  result.execute = [seeds](const RunContext& context) {
    CaseEvidence evidence;
    for (int i = 0; i < seeds; ++i) {
      const RunConfig config = floor_config(context, context.seed + static_cast<std::uint64_t>(i));
      const SyntheticCorpus corpus(
          {.vocabulary = config.model.vocabulary, .sequence = config.model.sequence, .seed = config.seed});
      TrainOptions options;
      options.config = config;
      options.data = &corpus;
      options.poison = true;
      options.pitfalls = context.pitfalls;
      options.backend = context.backend;
      const double loss = train(options).validation_losses.back().second;
      const double floor = corpus.entropy_rate_nats();
      const std::string name = fmt::format("validation_loss_over_floor seed {}", config.seed);
      evidence.properties.push_back({name, loss / floor, Relation::at_most, 1.03,
                                     fmt::format("entropy rate {:.4f} nats, no model can do better; 3 % above it", floor), -1,
                                     ""});
      // Below the floor by more than the sampling error of the validation rows, something has seen its own targets.
      evidence.properties.push_back({name + " (lower end)", loss / floor, Relation::at_least, 0.97,
                                     "the floor less the sampling error of 16384 targets (four standard errors are below 3 %)",
                                     -1, ""});
    }
    return evidence;
  };
  return result;
}

// ---- real text

// Text that every Debian system carries.
const fs::path kText = "/usr/share/common-licenses/GPL-3";

RunConfig text_config(const RunContext& context) {
  RunConfig config;
  config.model.vocabulary = 256;
  config.model.sequence = 64;
  config.model.layers = 2;
  config.model.hidden = 64;
  config.model.heads = 4;
  config.plan.parallel.data = 2;
  config.plan.batch = {16, 1};
  config.plan.threads_per_rank = context.threads_per_rank;
  config.optimizer.learning_rate = 2e-3;
  config.schedule = {ScheduleKind::cosine, 20, 0, 0.1};
  config.steps = 300;
  config.evaluate_every_steps = 0;
  config.seed = context.seed;
  return config;
}

std::vector<Property> falls_in_windows(const std::vector<StepResult>& steps, std::size_t windows) {
  std::vector<Property> properties;
  double previous = 0;
  const std::size_t length = steps.size() / windows;
  for (std::size_t w = 0; w < windows; ++w) {
    double mean = 0;
    for (std::size_t i = w * length; i < (w + 1) * length; ++i) mean += steps[i].loss / static_cast<double>(length);
    if (w > 0) {
      properties.push_back({fmt::format("mean_loss window {}", w), mean, Relation::at_most, previous,
                            "mean loss of the window before it", static_cast<int>((w + 1) * length) - 1, ""});
    }
    previous = mean;
  }
  return properties;
}

// Share of characters that English text is made of: letters, blanks, line ends.
double share_of_text(const std::string& text) {
  const auto usual = std::count_if(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 128 && (std::isalpha(byte) != 0 || std::isspace(byte) != 0);
  });
  return static_cast<double>(usual) / static_cast<double>(text.size());
}

std::string sample_from(const fs::path& checkpoint_folder, const std::string& prompt, std::int64_t tokens) {
  std::string text;
  run_world({.ranks = 1}, [&](Communicator& comm) {
    const fs::path step_folder = find_checkpoint(checkpoint_folder);
    const CheckpointInfo info = read_checkpoint_info(step_folder);
    const TrainingPlan plan = on_one_rank(info.config.plan);
    Arena arena;
    const auto kernels = make_cpu_kernels({});
    const RankContext context{&comm, kernels.get(), &arena, nullptr, {}, {}};
    Engine engine(context, {info.config.model, plan, info.config.optimizer, {}, 1, 1});
    load_checkpoint(step_folder, info, engine);
    const std::vector<std::int32_t> ids = encode_bytes(prompt);
    text = decode_bytes(
        generate(context, info.config.model, engine.store(), ids, {.tokens = tokens, .temperature = 0.5, .seed = 1}));
  });
  return text;
}

Case text_case() {
  Case result = training_case("text", "real text: loss falls from window to window, and what is generated is text",
                              Criterion::convergence, true);
  result.model = text_config({}).model;
  result.plan = text_config({}).plan;
  result.unavailable = [](const RunContext&) -> std::optional<std::string> {
    if (fs::exists(kText)) return std::nullopt;
    return "this system does not carry " + kText.string();
  };
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("text");
    TrainOptions options;
    options.config = text_config(context);
    options.output = scratch.path();
    options.pitfalls = context.pitfalls;
    options.backend = context.backend;
    const auto source = open_text({kText}, {.sequence = options.config.model.sequence, .seed = context.seed});
    options.data = source.get();
    const TrainReport report = train(options);
    CaseEvidence evidence;
    evidence.properties = falls_in_windows(report.steps, 5);
    const double start = report.steps.front().loss;
    evidence.properties.push_back({"first_loss_over_ln_vocabulary", start / std::log(256.0), Relation::at_most, 1.05,
                                   "an untrained model is uniform: ln 256, within 5 %", 0, ""});
    const std::string sample = sample_from(scratch.path(), "The ", 400);
    evidence.properties.push_back({"letters_and_blanks_share", share_of_text(sample), Relation::at_least, 0.85,
                                   "93 % in the training text; 41 % of printable ASCII; 23 % of bytes", -1, ""});
    return evidence;
  };
  return result;
}

// ---- memory

// GPT-2 124M, batch 4 x 64: everything that a rank's arena holds at its fullest, against what must be kept.
Case memory_case() {
  RunConfig config;
  config.model = {.vocabulary = 50257, .sequence = 64, .layers = 12, .hidden = 768, .heads = 12};
  config.plan.batch = {4, 1};
  config.steps = 2;
  config.evaluate_every_steps = 0;
  config.evaluate_batches = 1;
  Case result =
      training_case("memory/gpt2_124m", "peak memory of a rank within 5 % of parameters, gradients, moments and activations",
                    Criterion::convergence, false);
  result.model = config.model;
  result.plan = config.plan;
  result.execute = [config](const RunContext& context) {
    const SyntheticCorpus corpus(
        {.vocabulary = config.model.vocabulary, .sequence = config.model.sequence, .seed = context.seed});
    TrainOptions options;
    options.config = config;
    options.config.plan.threads_per_rank = context.threads_per_rank;
    options.data = &corpus;
    options.pitfalls = context.pitfalls;
    options.backend = context.backend;
    const double peak = static_cast<double>(train(options).ledgers.front().peak_total());
    double predicted = 0;
    for (const std::int64_t bytes : predicted_peak(config.model, config.plan, OptimizerKind::adamw, config.model.sequence)) {
      predicted += static_cast<double>(bytes);
    }
    CaseEvidence evidence;
    evidence.properties.push_back(
        {"peak_bytes", peak, Relation::at_most, 1.05 * predicted,
         fmt::format("1.05 x {:.0f} bytes of parameters, gradients, moments and kept activations", predicted), -1, ""});
    return evidence;
  };
  return result;
}

// ---- resume

std::vector<double> state_of(const Engine& engine) {
  std::vector<double> all;
  const ParameterStore& store = engine.store();
  for (const OwnedPart& part : store.parts()) {
    for (const TensorView view : {store.master(part), store.first_moment(part), store.second_moment(part)}) {
      if (!view) continue;
      const std::vector<double> values = ParameterStore::values_of(store.memory(), view);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

// Trains steps [first, last) on one rank, from a checkpoint where one is named; keeps the state after each step.
Evidence stretch(const RunConfig& config, const BatchSource& data, const RunContext& run, const std::string& side,
                 std::int64_t first, std::int64_t last, const fs::path& load, const fs::path& save, std::int64_t save_after) {
  Evidence evidence;
  evidence.side = side;
  evidence.unit_roundoff = unit_roundoff(DType::f32);
  evidence.input_hashes = {1};
  run_world({.ranks = 1}, [&](Communicator& comm) {
    TrainingPlan plan;
    plan.threads_per_rank = run.threads_per_rank;
    const auto kernels = make_kernels(plan, machine_of(run));
    Arena arena({.poison = true, .memory = &kernels->memory()});
    Engine engine({&comm, kernels.get(), &arena, nullptr, run.pitfalls, {}},
                  {config.model, config.plan, config.optimizer, config.schedule, config.steps, config.seed});
    if (load.empty()) {
      engine.store().initialise(config.model, Initialization::scattered, config.seed);
    } else {
      const fs::path folder = find_checkpoint(load);
      load_checkpoint(folder, read_checkpoint_info(folder), engine);
    }
    std::vector<double> losses;
    for (std::int64_t step = load.empty() ? 0 : first; step < last; ++step) {
      if (step >= first) {
        evidence.stages.push_back(
            {fmt::format("state before step {}", step), static_cast<int>(step), {{"state", state_of(engine), 1.0, false}}});
      }
      const StepResult result = engine.train_step(data.training_batch(step, config.plan.batch.rows), step);
      if (step >= first) losses.push_back(result.loss);
      if (step + 1 == save_after) (void)save_checkpoint(save, engine, {config, save_after, "synthetic"});
    }
    evidence.stages.push_back(
        {"state after the last step", static_cast<int>(last) - 1, {{"state", state_of(engine), 1.0, false}}});
    evidence.stages.push_back({std::string(kLosses), static_cast<int>(last) - 1, {{"loss", losses, 1.0, false}}});
    evidence.losses = losses;
  });
  evidence.replica_hashes = {1};
  return evidence;
}

Case resume_case() {
  Case result = training_case("resume/fp32", "every field of state and four further steps after a resume, bit for bit",
                              Criterion::bitwise, true);
  result.execute = [](const RunContext& context) {
    RunConfig config = floor_config(context, context.seed);
    config.model.residual_dropout = config.model.attention_dropout = config.model.embedding_dropout = 0.1;
    config.plan.parallel.data = 1;
    config.plan.batch = {5, 2};
    config.steps = 9;
    const SyntheticCorpus corpus({.vocabulary = 32, .sequence = 32, .seed = context.seed, .row_shape = RowShape::skewed});
    const ScratchFolder scratch("resume");
    CaseEvidence evidence;
    evidence.truth = stretch(config, corpus, context, "uninterrupted", 5, 9, {}, scratch.path(), 5);
    evidence.candidate = stretch(config, corpus, context, "resumed", 5, 9, scratch.path(), {}, -1);
    return evidence;
  };
  return result;
}

// ---- generation

Case generation_case() {
  Case result =
      training_case("generation/fp64", "a key-value cache generates the tokens of whole forward passes, past the context too",
                    Criterion::convergence, true);
  result.execute = [](const RunContext& context) {
    GptConfig model = floor_config(context, 1).model;
    model.sequence = 12;
    model.layers = 2;
    TrainingPlan plan;
    plan.precision = "fp64";
    plan.numerics = numerics_from_precision("fp64");
    const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5};
    const auto parameters = reference::initial_parameters<double>(model, Initialization::scattered, context.seed);
    CaseEvidence evidence;
    for (const double temperature : {0.0, 1.0}) {
      const auto expected = reference::generate<double>(model, parameters, prompt,
                                                        {.tokens = 20, .temperature = temperature, .seed = context.seed});
      run_world({.ranks = 1}, [&](Communicator& comm) {
        const auto kernels = make_kernels(plan, machine_of(context));
        Arena arena({.poison = true, .memory = &kernels->memory()});
        const RankContext rank{&comm, kernels.get(), &arena, nullptr, context.pitfalls, {}};
        Engine engine(rank, {model, plan, {}, {}, 1, 1});
        engine.store().initialise(model, Initialization::scattered, context.seed);
        const auto actual =
            generate(rank, model, engine.store(), prompt, {.tokens = 20, .temperature = temperature, .seed = context.seed});
        double different = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) different += actual[i] != expected[i] ? 1 : 0;
        evidence.properties.push_back({fmt::format("different_tokens temperature {}", temperature), different, Relation::equal,
                                       0.0, "the reference makes a whole forward pass for every token", -1, ""});
      });
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_training_cases(CaseList& cases, const SuiteOptions& options) {
  add_golden_cases(cases, options);
  cases.push_back(training_pair_case());
  cases.push_back(resume_case());
  cases.push_back(generation_case());
  cases.push_back(entropy_floor_case(1, true));
  cases.push_back(entropy_floor_case(3, false));
  cases.push_back(text_case());
  cases.push_back(memory_case());
}

}  // namespace tandem
