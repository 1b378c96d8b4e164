// SPDX-License-Identifier: Apache-2.0
// What a checkpoint must keep of a run in 16 bits or less, and what master copies are for.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

constexpr std::int64_t kSavedAfter = 5;
constexpr std::int64_t kSteps = 12;

Script resume_script(const ParallelVariant& variant, const RunContext& context) {
  Script script;
  script.inputs = inputs_of(variant, context);
  script.inputs.steps = kSteps;
  script.inputs.schedule = {ScheduleKind::cosine, 2, 0, 0.1};
  if (variant.loss_scale.growth_interval > kSteps) return script;
  // Two before the checkpoint, of which the second leaves a count of one good step; one after it.
  script.overflows = [](int rank, std::int64_t step) { return rank == 0 && (step == 0 || step == 3 || step == 8); };
  return script;
}

// Steps of both runs after the checkpoint that differ in anything.
double steps_that_differ(const ScriptedRun& whole, const ScriptedRun& resumed) {
  double differing = 0;
  for (std::size_t rank = 0; rank < whole.steps.size(); ++rank) {
    for (const RankStep& step : resumed.steps[rank]) {
      const RankStep& other = whole.steps[rank][static_cast<std::size_t>(step.step)];
      const bool same = step.state_hash == other.state_hash && step.scaler == other.scaler && step.updates == other.updates &&
                        step.fp8 == other.fp8 && step.result.skipped == other.result.skipped &&
                        step.result.learning_rate == other.result.learning_rate && step.result.loss == other.result.loss &&
                        step.result.loss_scale == other.result.loss_scale;
      differing += same ? 0 : 1;
    }
  }
  return differing;
}

std::vector<Property> loaded_state(const ScriptedRun& whole, const ScriptedRun& resumed) {
  double stale = 0;
  double other_state = 0;
  for (std::size_t rank = 0; rank < resumed.start.size(); ++rank) {
    const RankStep& saved = whole.steps[rank][kSavedAfter - 1];
    const RankStep& loaded = resumed.start[rank];
    stale += static_cast<double>(loaded.stale_copies);
    const bool same = loaded.state_hash == saved.state_hash && loaded.scaler == saved.scaler && loaded.fp8 == saved.fp8 &&
                      loaded.updates == saved.updates;
    other_state += same ? 0 : 1;
  }
  return {{"stored_unlike_master_after_load", stale, Relation::equal, 0.0,
           "what a rank computes with is its rounded master copy, element by element", kSavedAfter - 1, ""},
          {"ranks_with_another_state_after_load", other_state, Relation::equal, 0.0,
           "parameters, masters, moments, update count, scale, counter, skipped steps, fp8 histories", kSavedAfter - 1, ""}};
}

Case resume_case(const std::string& name, ParallelVariant variant, std::int64_t growth_interval) {
  variant.loss_scale.growth_interval = growth_interval;
  Case result = loss_scaling_case("resume/" + name, "bit for bit after a resume, with overflows before and after it",
                                  Criterion::bitwise, variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("mixed-resume");
    Script script = resume_script(variant, context);
    script.save = scratch.path();
    script.save_after = kSavedAfter;
    ScriptedRun whole = run_script(script, context, "uninterrupted");
    script.save.clear();
    script.save_after = -1;
    script.load = scratch.path();
    script.first_step = kSavedAfter;
    ScriptedRun resumed = run_script(script, context, "resumed");
    CaseEvidence evidence;
    evidence.properties = loaded_state(whole, resumed);
    evidence.properties.push_back({"steps_that_differ", steps_that_differ(whole, resumed), Relation::equal, 0.0,
                                   "state, scale, counter, decision, learning rate and loss of every later step", -1, ""});
    evidence.properties.push_back(ranks_agree(resumed));
    // The series of a resumed run are shorter; they are compared step by step above.
    for (Evidence* side : {&whole.evidence, &resumed.evidence}) {
      std::erase_if(side->stages, [](const StageEvidence& stage) {
        return stage.tensors.front().name.find(" of steps ") != std::string::npos;
      });
    }
    evidence.truth = std::move(whole.evidence);
    evidence.candidate = std::move(resumed.evidence);
    return evidence;
  };
  return result;
}

// A checkpoint of a run that had no scale, or another kind of it, starts the plan's.
Case other_precision_case() {
  const ParallelVariant variant{.precision = "fp16"};
  Case result = loss_scaling_case("resume/fp32_to_fp16", "a run in fp32 goes on in fp16 with the plan's first scale",
                                  Criterion::convergence, variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("mixed-resume");
    ParallelVariant before = variant;
    before.precision = "fp32";
    Script script;
    script.inputs = inputs_of(before, context);
    script.inputs.steps = script.save_after = 2;
    script.save = scratch.path();
    const ScriptedRun wide = run_script(script, context, "before");
    Script next;
    next.inputs = inputs_of(variant, context);
    next.inputs.steps = 4;
    next.first_step = 2;
    next.load = scratch.path();
    const ScriptedRun run = run_script(next, context, "after");
    CaseEvidence evidence;
    evidence.properties = {
        {"scale_after_load", run.start.front().scaler.scale, Relation::equal, variant.loss_scale.initial,
         "fp32 had no scale to hand on", 1, ""},
        {"stored_unlike_master_after_load", static_cast<double>(run.start.front().stale_copies), Relation::equal, 0.0,
         "masters are the fp32 weights, what is stored is rounded", 1, ""},
        {"updates_after_load", static_cast<double>(run.start.front().updates), Relation::equal, 2.0, "those made in fp32", 1, ""},
        {"first_loss_over_the_last", run.steps.front().front().result.loss / wide.steps.front().back().result.loss,
         Relation::at_most, 1.5, "training goes on where it was", 2, ""}};
    return evidence;
  };
  return result;
}

// ---- master copies

// Elements that 16-bit storage would show to have moved: their rounded value is another.
double moved_share(const ScriptedRun& run, DType storage) {
  const StageEvidence& before = run.evidence.stages.front();
  double moved = 0;
  double all = 0;
  for (const StageEvidence& stage : run.evidence.stages) {
    if (stage.stage != "script_parameters") continue;
    for (std::size_t t = 0; t < stage.tensors.size(); ++t) {
      for (std::size_t i = 0; i < stage.tensors[t].values.size(); ++i) {
        const auto rounded = [&](double value) { return round_to(static_cast<float>(value), storage); };
        moved += rounded(stage.tensors[t].values[i]) != rounded(before.tensors[t].values[i]) ? 1 : 0;
        all += 1;
      }
    }
  }
  return moved / all;
}

// What the next step computes with is the rounded master copy, whatever updates that. A few steps later losses hardly tell.
Case stored_copies_case(const std::string& precision) {
  const ParallelVariant shown{.degrees = {.data = 2}, .precision = precision};
  Case result = loss_scaling_case(fmt::format("stored_copies/{}", precision),
                                  "stored parameters follow their masters after every update of either optimizer",
                                  Criterion::convergence, shown);
  result.execute = [shown](const RunContext& context) {
    CaseEvidence evidence;
    for (const OptimizerKind optimizer : {OptimizerKind::sgd, OptimizerKind::adamw}) {
      for (const std::string offload : {"none", "optimizer"}) {
        ParallelVariant variant = shown;
        variant.optimizer = optimizer;
        variant.offload = offload;
        variant.zero_stage = offload == "none" ? 0 : 1;
        Script script;
        script.inputs = inputs_of(variant, context);
        script.inputs.steps = 3;
        const ScriptedRun run = run_script(script, context, offload);
        const std::string label = fmt::format("{}, offload {}", optimizer == OptimizerKind::sgd ? "sgd" : "adamw", offload);
        const auto& steps = run.steps.front();
        const double moved = (steps[0].state_hash != run.start.front().state_hash) +
                             (steps[1].state_hash != steps[0].state_hash) + (steps[2].state_hash != steps[1].state_hash);
        evidence.properties.push_back({fmt::format("rank_steps_with_stale_copies ({})", label),
                                       count_steps(run, [](const RankStep& s) { return s.stale_copies != 0; }), Relation::equal,
                                       0.0, "round(master), element by element", -1, ""});
        evidence.properties.push_back(
            {fmt::format("steps_that_moved ({})", label), moved, Relation::equal, 3.0, "no step is skipped", -1, ""});
      }
    }
    return evidence;
  };
  return result;
}

Case small_updates_case(const std::string& precision) {
  const ParallelVariant variant{.dropout = 0.0, .precision = precision};
  Case result = loss_scaling_case(fmt::format("small_updates/{}", precision),
                                  "100 updates, each below half a unit in the last place, move as many weights as in fp32",
                                  Criterion::convergence, variant);
  result.execute = [variant](const RunContext& context) {
    const auto run_in = [&](const std::string& which) {
      ParallelVariant own = variant;
      own.precision = which;
      Script script;
      script.inputs = inputs_of(own, context);
      script.inputs.steps = 100;
      script.inputs.schedule = {};
      script.inputs.optimizer.learning_rate = 0.015 * unit_roundoff(numerics_from_precision(variant.precision).storage);
      script.inputs.optimizer.epsilon = 1e-8;
      return run_script(script, context, which);
    };
    const DType storage = numerics_from_precision(variant.precision).storage;
    const double in_fp32 = moved_share(run_in("fp32"), storage);
    const double here = moved_share(run_in(variant.precision), storage);
    CaseEvidence evidence;
    evidence.properties = {
        {"weights_moved_of_those_in_fp32", here / in_fp32, Relation::at_least, 0.99,
         fmt::format(
             "{:.3f} of all weights moved here, {:.3f} in fp32, both seen in the storage's precision: masters add updates up",
             here, in_fp32),
         -1, ""},
        {"weights_moved_in_fp32", in_fp32, Relation::at_least, 0.5, "the learning rate is not so small that nothing would move",
         -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_mixed_resume_cases(CaseList& cases) {
  cases.push_back(resume_case("fp16", {.micro_batches = 2, .precision = "fp16"}, 3));
  cases.push_back(resume_case("data2/tensor2/fp16", {.degrees = {.data = 2, .tensor = 2}, .precision = "fp16"}, 3));
  cases.push_back(resume_case("data3/zero3/fp16", {.degrees = {.data = 3}, .precision = "fp16", .zero_stage = 3}, 3));
  cases.push_back(resume_case("data2/zero1/offload/fp16",
                              {.degrees = {.data = 2}, .precision = "fp16", .zero_stage = 1, .offload = "optimizer"}, 3));
  cases.push_back(resume_case("bf16", {.precision = "bf16"}, 2000));
  cases.push_back(resume_case("data2/fp8", {.degrees = {.data = 2}, .precision = "fp8"}, 2000));
  cases.push_back(other_precision_case());
  cases.push_back(stored_copies_case("bf16"));
  cases.push_back(stored_copies_case("fp16"));
  cases.push_back(small_updates_case("bf16"));
  cases.push_back(small_updates_case("fp16"));
}

}  // namespace tandem
