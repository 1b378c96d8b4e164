// SPDX-License-Identifier: Apache-2.0
// A state goes on where it was left, under the same layout or any other.
#include <cmath>

#include <fmt/format.h>

#include "optimized/checkpoint/catalogue.h"
#include "optimized/training/trainer.h"
#include "suites/checkpoint_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// ---- the same layout

constexpr std::int64_t kRunSteps = 12;
constexpr std::int64_t kSaveEvery = 3;

TrainOptions training(const ParallelVariant& variant, const RunContext& context, const PairInputs& inputs,
                      const fs::path& output) {
  TrainOptions options;
  options.config = run_config_of(inputs);
  options.config.plan = plan_of(variant);
  // The checkpoints after 3, 6 and 9 steps lie in the warm-up, in the decay and on the plateau behind it.
  options.config.schedule = {ScheduleKind::cosine, 5, 8, 0.25};
  options.config.steps = kRunSteps;
  options.config.evaluate_every_steps = 0;
  options.config.checkpoint_every_steps = kSaveEvery;
  options.data = inputs.data.get();
  options.data_name = "synthetic";
  options.output = output;
  options.poison = true;
  options.pitfalls = context.pitfalls;
  options.backend = context.backend;
  return options;
}

// What an engine has after loading, against what it had when it saved: put together from all ranks.
Property state_before_first_step(const ParallelVariant& variant, const RunContext& context, const TrainOptions& options,
                                 const fs::path& folder, std::int64_t step) {
  CheckpointScript script;
  script.inputs = inputs_of(variant, context);
  script.inputs.optimizer = options.config.optimizer;
  script.inputs.schedule = options.config.schedule;
  script.inputs.steps = options.config.steps;
  script.first_step = script.end = step;
  script.load = folder;
  const CheckpointRun loaded = run_checkpoints(script, context);
  return equal_states("fields_and_tensors_that_differ before the first step", reference::assemble(folder), loaded.end,
                      "parameters, moments, updates, learning rate, loss scale, fp8 histories, seed, data: all of them",
                      static_cast<int>(step) - 1);
}

Case resume_case(const std::string& name, const ParallelVariant& variant) {
  Case result =
      checkpoint_case("resume/" + name, "interrupted in warm-up, decay and plateau: bit for bit the run that was not", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-resume");
    const PairInputs inputs = inputs_of(variant, context);
    const TrainOptions options = training(variant, context, inputs, scratch.path() / "whole");
    const TrainReport whole = train(options);
    const reference::State end = reference::assemble(step_folder(options.output, kRunSteps));
    CaseEvidence evidence;
    for (std::int64_t step = kSaveEvery; step < kRunSteps; step += kSaveEvery) {
      const fs::path saved = step_folder(options.output, step);
      evidence.properties.push_back(state_before_first_step(variant, context, options, saved, step));
      TrainOptions again = training(variant, context, inputs, scratch.path() / fmt::format("from-{}", step));
      again.resume = saved;
      const TrainReport rest = train(again);
      const std::vector<StepResult> expected(whole.steps.begin() + step, whole.steps.end());
      evidence.properties.push_back({"steps_that_differ", steps_that_differ(expected, rest.steps), Relation::equal, 0.0,
                                     "loss, norm, clipping, learning rate and loss scale of every later step",
                                     static_cast<int>(step), ""});
      evidence.properties.push_back(equal_on_disk("fields_and_tensors_that_differ at the end", end,
                                                  step_folder(again.output, kRunSteps), "what both runs saved last",
                                                  static_cast<int>(kRunSteps) - 1));
    }
    return evidence;
  };
  return result;
}

// ---- from layout to layout

struct Layout {
  std::string name;
  ParallelVariant variant;
};

// One model for all, with experts, which every layout can hold.
std::vector<Layout> layouts() {
  ParallelVariant base = accumulating({.experts = 2});
  const auto with = [&](ParallelDegrees degrees, int zero_stage, const std::string& precision = "fp32") {
    ParallelVariant variant = base;
    variant.degrees = degrees;
    variant.zero_stage = zero_stage;
    variant.precision = precision;
    return variant;
  };
  return {{"data4", with({.data = 4}, 0)},         {"tensor2-data2", with({.data = 2, .tensor = 2}, 0)},
          {"pipeline2", with({.pipeline = 2}, 0)}, {"zero1", with({.data = 3}, 1)},
          {"zero3", with({.data = 4}, 3)},         {"expert2", with({.data = 2, .expert = 2}, 0)},
          {"bf16", with({.data = 2}, 0, "bf16")}};
}

constexpr std::int64_t kSavedAt = 2;

// Loads, records what it holds, takes one step.
CheckpointRun one_step_from(const fs::path& folder, const Layout& layout, const RunContext& context, const fs::path& save = {}) {
  CheckpointScript script = saving_script(inputs_of(layout.variant, context), save, kSavedAt + 1, {});
  script.load = folder;
  script.first_step = kSavedAt;
  script.recorded_after = {kSavedAt};
  if (!save.empty()) script.saved_after = {kSavedAt};
  return run_checkpoints(script, context);
}

Case matrix_case(std::size_t from) {
  const Layout source = layouts()[from];
  Case result =
      checkpoint_case("matrix/from-" + source.name, "what it saves loads under every layout, itself included", source.variant);
  result.execute = [source](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-matrix");
    // The state comes from one rank, and the source saves it anew: every target then has a checkpoint of its own to be compared
    // with, as well as this one.
    ParallelVariant one_rank = source.variant;
    one_rank.degrees = {};
    one_rank.zero_stage = 0;
    one_rank.precision = "fp32";
    const CheckpointRun origin =
        run_checkpoints(saving_script(inputs_of(one_rank, context), scratch.path() / "origin", kSavedAt, {kSavedAt}), context);
    const reference::State& truth = origin.states.at(kSavedAt);
    one_step_from(scratch.path() / "origin", source, context, scratch.path() / "source");
    CaseEvidence evidence;
    // Another precision has another scale of the loss, a run's other length another rate: neither is of the tensors.
    const auto same_tensors = [&](const std::string& name, const reference::State& found, const std::string& why) {
      reference::State expected = found;
      expected.tensors = truth.tensors;
      expected.updates = truth.updates;
      evidence.properties.push_back(equal_states(name, expected, found, why, kSavedAt - 1));
    };
    same_tensors("tensors_that_differ on disk", reference::assemble(step_folder(scratch.path() / "source", kSavedAt)),
                 "whole parameters and moments, put together element by element");
    for (const Layout& target : layouts()) {
      const CheckpointRun loaded = one_step_from(scratch.path() / "source", target, context);
      same_tensors("tensors_that_differ in " + target.name, loaded.states.at(kSavedAt),
                   "whole parameters and moments of all ranks after loading");
      const CheckpointRun own = one_step_from(scratch.path() / "origin", target, context);
      evidence.properties.push_back({"steps_that_differ in " + target.name, steps_that_differ(own.steps, loaded.steps),
                                     Relation::equal, 0.0, "the step that the same state takes from a checkpoint of one rank",
                                     kSavedAt, ""});
      evidence.properties.push_back(equal_states("fields_and_tensors_that_differ after a step in " + target.name, own.end,
                                                 loaded.end, "what this layout makes of the same state", kSavedAt));
      evidence.properties.push_back({"copies_that_differ in " + target.name, loaded.copies_that_differ, Relation::equal, 0.0,
                                     "replicas load the same", kSavedAt - 1, ""});
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_checkpoint_resume_cases(CaseList& cases) {
  cases.push_back(resume_case("data2", accumulating({.degrees = {.data = 2}})));
  cases.push_back(resume_case("tensor2/pipeline2", accumulating({.degrees = {.tensor = 2, .pipeline = 2}})));
  ParallelVariant half = accumulating({.degrees = {.data = 3}, .precision = "fp16", .zero_stage = 2});
  half.loss_scale.growth_interval = 4;
  cases.push_back(resume_case("zero2/fp16", half));
  cases.push_back(resume_case("fp8", accumulating({.degrees = {.data = 2}, .precision = "fp8"})));
}

void add_checkpoint_layout_cases(CaseList& cases) {
  for (std::size_t i = 0; i < layouts().size(); ++i) cases.push_back(matrix_case(i));
}

}  // namespace tandem
