// SPDX-License-Identifier: Apache-2.0
// What is on disk is the state at the call, whatever training did meanwhile, and written once.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/checkpoint_interval.h"
#include "core/io/safetensors.h"
#include "core/rng.h"
#include "suites/checkpoint_cases.h"
#include "suites/checkpoint_files.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSteps = 5;

double num_problems(const CheckpointRun& run) {
  double count = 0;
  for (const std::vector<std::string>& of_rank : run.problems) count += static_cast<double>(of_rank.size());
  return count;
}

// Beside each checkpoint the plain way saves the same state, and gives it back.
void add_comparisons(const CheckpointRun& run, const fs::path& folder, const fs::path& plain, const std::string& label,
                     std::vector<Property>& properties) {
  for (const auto& [steps, state] : run.states) {
    const fs::path beside = plain / fmt::format("{}-{}", label, steps);
    reference::save(beside, state);
    properties.push_back(equal_on_disk(fmt::format("fields_and_tensors_that_differ ({})", label), reference::load(beside),
                                       step_folder(folder, steps), "a checkpoint is the state at the call, bit for bit",
                                       static_cast<int>(steps) - 1));
  }
  properties.push_back({fmt::format("problems ({})", label), num_problems(run), Relation::equal, 0.0, "nothing failed", -1, ""});
  double elsewhere = 0;
  for (const fs::path& newest : run.newest) elsewhere += newest == step_folder(folder, run.states.rbegin()->first) ? 0 : 1;
  properties.push_back({fmt::format("ranks_with_another_newest ({})", label), elsewhere, Relation::equal, 0.0,
                        "every rank knows what was published last", -1, ""});
}

Case content_case(const std::string& name, const ParallelVariant& variant, const std::string& codec = "none") {
  Case result = checkpoint_case(
      "content/" + name, "written in the background of training, written at once, saved the plain way: the same bits", variant);
  result.plan.compression.codec = codec;
  result.execute = [variant, codec](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-content");
    PairInputs inputs = inputs_of(variant, context);
    inputs.plan.compression.codec = codec;
    CheckpointScript script = saving_script(inputs, scratch.path() / "background", kSteps, {1, 3});
    const CheckpointRun background = run_checkpoints(script, context);
    script.checkpoints.folder = scratch.path() / "at_once";
    script.checkpoints.asynchronous = false;
    const CheckpointRun at_once = run_checkpoints(script, context);
    CaseEvidence evidence;
    add_comparisons(background, scratch.path() / "background", scratch.path(), "background", evidence.properties);
    add_comparisons(at_once, scratch.path() / "at_once", scratch.path(), "at once", evidence.properties);
    evidence.properties.push_back({"steps_that_differ", steps_that_differ(at_once.steps, background.steps), Relation::equal, 0.0,
                                   "training does not notice that it is saved", -1, ""});
    evidence.properties.push_back({"copies_that_differ", background.copies_that_differ, Relation::equal, 0.0,
                                   "of each element that several ranks hold one is saved", -1, ""});
    return evidence;
  };
  return result;
}

// The writers stand still until training is two steps further.
Case slow_disk_case(const ParallelVariant& variant) {
  Case result =
      checkpoint_case("slow_disk", "a disk that is two steps behind: what lands on it is the state at the call", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-slow");
    Gate gate;
    HookedFiles files([&](const FileCall&) { gate.pass(); });
    CheckpointScript script = saving_script(inputs_of(variant, context), scratch.path(), 7, {1, 4});
    script.checkpoints.files = &files;
    script.settled_before = {4};
    script.before_save = [&](int, std::int64_t) { gate.shut(); };
    script.after_step = [&](int, std::int64_t steps_done, const Checkpointer&) {
      if (steps_done == 3 || steps_done == 6) gate.open();
    };
    const CheckpointRun run = run_checkpoints(script, context);
    const CheckpointRun undisturbed = run_checkpoints(saving_script(inputs_of(variant, context), {}, 7, {}), context);
    CaseEvidence evidence;
    add_comparisons(run, scratch.path(), scratch.path() / "plain", "two steps behind", evidence.properties);
    const auto changed = static_cast<double>(reference::differences(run.states.at(1), run.states.at(4)).size());
    evidence.properties.push_back({"fields_and_tensors_that_moved", changed, Relation::at_least,
                                   static_cast<double>(run.states.at(1).tensors.size()),
                                   "save, step, save: every tensor is another", -1, ""});
    evidence.properties.push_back({"training_waited_for_the_disk", gate.given_up() ? 1.0 : 0.0, Relation::equal, 0.0,
                                   "save() returns, and steps go on, while no request to the disk is answered", -1, ""});
    evidence.properties.push_back({"steps_that_differ", steps_that_differ(undisturbed.steps, run.steps), Relation::equal, 0.0,
                                   "those of a run that saves nothing", -1, ""});
    return evidence;
  };
  return result;
}

std::int64_t tensor_bytes(const fs::path& file) {
  const SafetensorsFile tensors(file);
  std::int64_t bytes = 0;
  for (const SafetensorsEntry& entry : tensors.entries()) bytes += entry.size_bytes();
  return bytes;
}

// Counted in the files, whatever the writer says of itself.
Case share_case(const std::string& name, const ParallelVariant& variant) {
  Case result =
      checkpoint_case("bytes/" + name, "replicas share the writing: the state is written once, in equal parts", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-bytes");
    const CheckpointRun run = run_checkpoints(saving_script(inputs_of(variant, context), scratch.path(), 1, {1}), context);
    std::int64_t state_bytes = 0;
    for (const auto& [tensor, values] : run.states.at(1).tensors) state_bytes += std::ssize(values.bytes);
    std::int64_t total = 0;
    std::int64_t largest = 0;
    double misreported = 0;
    for (std::size_t rank = 0; rank < run.times.size(); ++rank) {
      const std::int64_t bytes = tensor_bytes(step_folder(scratch.path(), 1) / fmt::format("shard-{:05}.safetensors", rank));
      total += bytes;
      largest = std::max(largest, bytes);
      misreported += run.times[rank].back().bytes == bytes ? 0 : 1;
    }
    const auto ranks = static_cast<double>(run.times.size());
    CaseEvidence evidence;
    evidence.properties = {
        {"bytes_written_over_state", static_cast<double>(total) / static_cast<double>(state_bytes), Relation::equal, 1.0,
         "parameters and both moments once; with every replica writing it would be the number of replicas", -1, ""},
        {"largest_share_times_ranks", static_cast<double>(largest) * ranks / static_cast<double>(state_bytes), Relation::at_most,
         1 + ranks * sizeof(float) * static_cast<double>(run.states.at(1).tensors.size()) / static_cast<double>(state_bytes),
         "shares differ by at most one element of each tensor, parameters and moments", -1, ""},
        {"ranks_that_report_other_bytes", misreported, Relation::equal, 0.0, "times() says what is in the file", -1, ""}};
    return evidence;
  };
  return result;
}

// ---- how often to save

// Useful share of a run that works `interval`, saves, and falls back to the last save at each of its failures, whose times are
// the same for every interval.
double simulated_goodput(const CheckpointCosts& costs, double interval, std::uint64_t seed) {
  constexpr int kFailures = 20000;
  CounterRng random(seed, "failures", 0);
  double useful = 0;
  double seconds = 0;
  bool restarted = false;
  for (int failure = 0; failure < kFailures; ++failure) {
    const double until_failure = -costs.failure_seconds * std::log1p(-random.next_unit());
    const double rest = until_failure - (restarted ? costs.restart_seconds : 0);
    if (rest > 0) useful += interval * std::floor(rest / (interval + costs.save_seconds));
    seconds += until_failure;
    restarted = true;
  }
  return useful / seconds;
}

Case interval_case() {
  Case result =
      checkpoint_case("interval", "the advised time between checkpoints wastes least, by a run with failures at random", {});
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    for (const double save : {1.0, 20.0, 200.0}) {
      CheckpointCosts costs;
      costs.save_seconds = save;
      costs.restart_seconds = 60;
      costs.failure_seconds = 4000;
      const double advised = daly_interval_seconds(costs);
      double best = 0;
      for (double factor = 0.25; factor <= 4; factor *= 1.1) {
        best = std::max(best, simulated_goodput(costs, factor * advised, context.seed));
      }
      const double here = simulated_goodput(costs, advised, context.seed);
      // Of the time that a segment takes, the standard deviation is at most its mean's order; one failure in 20000 is one sample.
      const double noise = 4 / std::sqrt(20000.0);
      evidence.properties.push_back({fmt::format("goodput_of_the_advised_interval_over_the_best (save {:.0f} s)", save),
                                     here / best, Relation::at_least, 1 - noise * (1 - best),
                                     "waste at the optimum is flat; what is left is the noise of 20000 failures", -1, ""});
      evidence.properties.push_back({fmt::format("goodput_formula_error (save {:.0f} s)", save),
                                     std::abs(goodput(costs, advised) / here - 1), Relation::at_most, noise,
                                     "four standard errors of 20000 failures", -1, ""});
      const double twice = simulated_goodput(costs, 4 * advised, context.seed);
      evidence.properties.push_back({fmt::format("waste_at_4_times_the_interval_over_waste (save {:.0f} s)", save),
                                     (1 - twice) / (1 - here), Relation::at_least, 1.3,
                                     "to first order (4 + 1/4) / 2 of the waste; less where the waste is no longer small", -1,
                                     ""});
    }
    return evidence;
  };
  return result;
}

}  // namespace

Case checkpoint_case(const std::string& name, const std::string& summary, const ParallelVariant& variant) {
  return property_case("checkpoint", name, summary, model_of(variant), plan_of(variant));
}

ParallelVariant accumulating(ParallelVariant variant) {
  variant.micro_batches = 2;
  return variant;
}

CheckpointScript saving_script(const PairInputs& inputs, const fs::path& folder, std::int64_t steps,
                               const std::set<std::int64_t>& saved_after) {
  CheckpointScript script;
  script.inputs = inputs;
  script.inputs.steps = steps;
  script.checkpoints.folder = folder;
  script.saved_after = saved_after;
  return script;
}

void add_checkpoint_cases(CaseList& cases) {
  cases.push_back(content_case("data3", accumulating({.degrees = {.data = 3}})));
  cases.push_back(content_case("tensor2/data2", accumulating({.degrees = {.data = 2, .tensor = 2}})));
  cases.push_back(content_case("pipeline2", accumulating({.degrees = {.pipeline = 2}, .layers = 3})));
  cases.push_back(content_case("zero3", accumulating({.degrees = {.data = 3}, .zero_stage = 3})));
  cases.push_back(content_case("expert2", accumulating({.degrees = {.data = 2, .expert = 2}, .experts = 4})));
  cases.push_back(content_case("bf16", accumulating({.degrees = {.data = 2}, .precision = "bf16", .zero_stage = 1})));
  ParallelVariant half = accumulating({.degrees = {.data = 2}, .precision = "fp16"});
  half.loss_scale.growth_interval = 2;
  cases.push_back(content_case("fp16", half));
  cases.push_back(content_case("fp8", accumulating({.degrees = {.data = 2}, .precision = "fp8"})));
  cases.push_back(content_case("top_k", accumulating({.degrees = {.data = 3}}), "top_k"));
  cases.push_back(content_case("offload", accumulating({.degrees = {.data = 2}, .zero_stage = 2, .offload = "optimizer"})));
  cases.push_back(slow_disk_case(accumulating({.degrees = {.data = 2}})));
  cases.push_back(share_case("data4", accumulating({.degrees = {.data = 4}})));
  cases.push_back(share_case("zero1", accumulating({.degrees = {.data = 4}, .zero_stage = 1})));
  add_checkpoint_resume_cases(cases);
  add_checkpoint_layout_cases(cases);
  add_checkpoint_crash_cases(cases);
  add_checkpoint_damage_cases(cases);
  add_checkpoint_fault_cases(cases);
  add_checkpoint_hugging_face_cases(cases);
  cases.push_back(interval_case());
  add_checkpoint_time_cases(cases);
}

}  // namespace tandem
