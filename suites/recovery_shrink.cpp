// SPDX-License-Identifier: Apache-2.0
// Ranks whose place is gone: the run goes on with those that are left, and its mathematics stays.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "optimized/recovery/shrink.h"
#include "reference/checkpoint.h"
#include "reference/recovery.h"
#include "suites/kept_training.h"
#include "suites/one_step.h"
#include "suites/recovery_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

std::int64_t largest_micro_batch(const TrainingPlan& plan) {
  return micro_batch_rows(plan.batch.rows, plan.parallel.data, 0, plan.batch.micro_batches, 0).size();
}

TrainingPlan shrunk(const PairInputs& inputs, int ranks, const PitfallSet& pitfalls) {
  const std::optional<TrainingPlan> plan = shrink_plan(inputs.plan, inputs.model, ranks, pitfalls);
  TANDEM_CHECK(plan.has_value(), "a plan for the ranks that are left");
  return *plan;
}

// ---- one step: the gradient of the same global batch

Case gradient_case(const ParallelVariant& variant, int ranks) {
  Case result = recovery_case(fmt::format("shrink/gradients{}", ranks),
                              fmt::format("with {} ranks left: gradients by name of the same global batch", ranks), variant);
  result.criterion = Criterion::rounding;
  result.execute = [variant, ranks](const RunContext& context) {
    const PairInputs whole = inputs_of(variant, context);
    PairInputs left = whole;
    left.plan = shrunk(whole, ranks, context.pitfalls);
    const GlobalBatch& batch = left.plan.batch;
    CaseEvidence evidence;
    evidence.truth = reference_evidence<double>(whole, 1, 1);
    evidence.yardstick = reference_evidence<float>(whole, left.plan.parallel.data, batch.micro_batches);
    const EngineRun run = engine_run(left, context);
    evidence.candidate = run.evidence;
    std::vector<std::int64_t> rows;
    for (const std::vector<std::int64_t>& of_rank : run.rows) rows.insert(rows.end(), of_rank.begin(), of_rank.end());
    std::ranges::sort(rows);
    double wrong = std::abs(static_cast<double>(std::ssize(rows) - whole.plan.batch.rows));
    for (std::size_t i = 0; i < rows.size(); ++i) wrong += rows[i] == static_cast<std::int64_t>(i) ? 0 : 1;
    evidence.properties = {
        {"rows_not_worked_on_once", wrong, Relation::equal, 0.0, "each row of the step on one of the ranks that are left", -1,
         ""},
        {"rows_at_once", static_cast<double>(largest_micro_batch(left.plan)), Relation::at_most,
         static_cast<double>(largest_micro_batch(whole.plan)), "memory of a micro-batch does not grow", -1, ""},
        {"micro_batches", static_cast<double>(batch.micro_batches), Relation::equal,
         static_cast<double>(reference::fewest_micro_batches(whole.plan.batch.rows, ranks, largest_micro_batch(whole.plan))),
         "the fewest for which that holds", -1, ""}};
    return evidence;
  };
  return result;
}

// ---- a run

// ||x - truth|| / ||truth|| over all parameters of the state in a step folder.
double parameter_error(const std::filesystem::path& folder, const reference::NamedTensors<double>& truth) {
  if (folder.empty()) return std::nan("");
  const reference::State state = reference::assemble(folder);
  double difference = 0;
  double norm = 0;
  for (const auto& [name, values] : truth) {
    const std::vector<std::byte>& bytes = state.tensors.at(name).bytes;
    if (bytes.size() != values.size() * sizeof(float)) return std::nan("");
    for (std::size_t i = 0; i < values.size(); ++i) {
      float value = 0;
      std::memcpy(&value, &bytes[i * sizeof(float)], sizeof(float));
      difference += (value - values[i]) * (value - values[i]);
      norm += values[i] * values[i];
    }
  }
  return std::sqrt(difference / norm);
}

double loss_error(const RecoveryRun& run, const std::vector<double>& truth) {
  double worst = 0;
  for (const DoneStep& done : run.done) {
    const double expected = truth.at(static_cast<std::size_t>(done.step));
    const double error = std::abs(done.result.loss - expected) / std::abs(expected);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

Property within(const std::string& name, double error, double undisturbed, double floor) {
  return {name,
          error,
          Relation::at_most,
          4 * std::max(undisturbed, floor),
          fmt::format("4 max(the undisturbed run's own error {:.2g}, eps sqrt(K) {:.2g}), against the double reference",
                      undisturbed, floor),
          -1,
          ""};
}

// Steps that count, as the rows that the attempts dealt: each sample once.
double samples_not_once(const RecoveryRun& run, std::int64_t rows, std::int64_t steps) {
  std::map<std::int64_t, std::uint64_t> last_attempt;
  for (const DoneStep& done : run.done) last_attempt[done.step] = done.attempt;
  std::map<std::int64_t, int> seen;
  for (const auto& [step, attempt] : last_attempt) {
    const std::int64_t dealt = run.attempts.at(attempt).rows;
    for (std::int64_t row = 0; row < dealt; ++row) ++seen[step * rows + row];
  }
  double wrong = 0;
  for (const reference::DealtSample& sample : reference::deal(rows, std::vector<int>(static_cast<std::size_t>(steps), 1),
                                                              std::vector<int>(static_cast<std::size_t>(steps), 1))) {
    wrong += seen[sample.place] == 1 ? 0 : 1;
  }
  return wrong;
}

Case run_case_of(const std::string& name, const ParallelVariant& variant, const std::vector<std::string>& faults,
                 const std::vector<std::int64_t>& during, const std::vector<int>& ranks) {
  Case result =
      recovery_case("shrink/" + name, "places are lost for good: the run goes on with fewer ranks, on the same curve", variant);
  result.execute = [variant, faults, during, ranks](const RunContext& context) {
    const ScratchFolder scratch("recovery-shrink");
    RecoveryScript script = recovery_script(variant, context);
    script.shrink = true;
    script.faults = faults;
    const RecoveryRun run = run_supervised(script, context, scratch.path() / "run");
    const RecoveryRun undisturbed = run_undisturbed(script, context, scratch.path() / "undisturbed");
    const auto truth_record = kept_training<double>(reference_run(script.inputs));
    const reference::TrainingRecord<double>& truth = *truth_record;
    const double floor = std::ldexp(1.0, -24) * std::sqrt(static_cast<double>(script.inputs.model.mlp_hidden));
    CaseEvidence evidence;
    std::vector<Property>& properties = evidence.properties;
    properties = follows_ledger(script, {during}, run);
    double other_ranks = run.attempts.size() == ranks.size() ? 0 : 1;
    for (std::size_t i = 0; i < std::min(ranks.size(), run.attempts.size()); ++i) {
      other_ranks += run.attempts[i].ranks == ranks[i] ? 0 : 1;
    }
    double other_tokens = 0;
    double other_rates = 0;
    for (const DoneStep& done : run.done) {
      const StepResult& expected = undisturbed.done.at(static_cast<std::size_t>(done.step)).result;
      other_tokens += done.result.valid_tokens == expected.valid_tokens ? 0 : 1;
      other_rates += done.result.learning_rate == expected.learning_rate ? 0 : 1;
    }
    properties.push_back({"attempts_with_other_ranks", other_ranks, Relation::equal, 0.0, "as many as are left", -1, ""});
    properties.push_back({"steps_with_other_tokens", other_tokens, Relation::equal, 0.0, "the global batch stays", -1, ""});
    properties.push_back(
        {"steps_with_another_learning_rate", other_rates, Relation::equal, 0.0, "the schedule counts steps, not ranks", -1, ""});
    properties.push_back({"samples_not_seen_once", samples_not_once(run, script.inputs.plan.batch.rows, script.inputs.steps),
                          Relation::equal, 0.0, "in the steps that count, of all that an undisturbed run sees", -1, ""});
    properties.push_back(within("loss_error", loss_error(run, truth.losses), loss_error(undisturbed, truth.losses), floor));
    properties.push_back(within("parameter_error", parameter_error(run.last, truth.parameters),
                                parameter_error(undisturbed.last, truth.parameters), floor));
    return evidence;
  };
  return result;
}

}  // namespace

void add_recovery_shrink_cases(CaseList& cases) {
  const ParallelVariant four{.degrees = {.data = 4}};
  cases.push_back(gradient_case(four, 3));
  cases.push_back(gradient_case(four, 2));
  cases.push_back(run_case_of("data4-3-2", four, {"lose@step=5,rank=3", "lose@step=9,rank=1"}, {4, 8}, {4, 3, 2}));
  cases.push_back(run_case_of("tensor2", {.degrees = {.data = 2, .tensor = 2}}, {"lose@step=5,rank=1"}, {4}, {4, 2}));
}

}  // namespace tandem
