// SPDX-License-Identifier: Apache-2.0
// What fails, who notices, and what is lost: C05, C17, C18, C19.
#include <algorithm>

#include <fmt/format.h>

#include "suites/anomaly_cases.h"
#include "suites/checkpoint_cases.h"
#include "suites/claims_parts.h"
#include "suites/recovery_cases.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// ---- C05

ClaimFindings find_spread(const RunContext& context) {
  const CaseFigures spread(add_anomaly_cases, "anomaly/spread", context);
  const CaseFigures rollback(add_anomaly_cases, "anomaly/nan/data3/rollback", context);
  ClaimFindings found;
  found.figures = {{"steps", "steps until one NaN is in all weights, slowest of four layouts", kNoFigure, 2,
                    spread.largest("steps_until_everywhere"), "steps"},
                   {"steps_clipped", "the same under data 3 with clipping: through the norm, in the step itself", kNoFigure, 1,
                    spread("steps_until_everywhere (data 3)"), "steps"},
                   {"watched", "weights spoilt where the guard watches, worst layout", kNoFigure, 0,
                    spread.largest("share_not_finite_when_watched"), "share"},
                   {"lost_rollback", "steps lost where the run goes back, a checkpoint every 5 steps, confirmed by 4", kNoFigure,
                    9, rollback.largest("lost_steps"), "steps"}};
  return found;
}

Claim spread() {
  return {"C05",
          "2.3",
          "One undetected NaN can void days of computing",
          "tandem run anomaly/spread anomaly/nan",
          find_spread,
          {{"steps", Of::measured, Relation::at_most, 3, ClaimVerdict::does_not_hold, "It does not spread to all weights."},
           {"watched", Of::measured, Relation::at_most, 0, ClaimVerdict::imprecise, "Watching does not keep it out."},
           {"lost_rollback", Of::measured, Relation::at_most, 20, ClaimVerdict::imprecise,
            "Even with monitoring many steps are lost."}},
          [](const ClaimFindings& f) {
            return fmt::format(
                "A NaN in one gradient of one rank is in every weight after {:.0f} steps at most, and in every "
                "checkpoint from then on: all until somebody looks is void. Watched, {:.0f} % of the weights are "
                "spoilt and at most {:.0f} steps are lost.",
                f.measured("steps"), 100 * f.measured("watched"), f.measured("lost_rollback"));
          }};
}

// ---- C17

ClaimFindings find_asynchronous(int saves, const RunContext& context) {
  const CaseFigures times("checkpoint/time/blocking", checkpoint_blocking_times(context, saves));
  ClaimFindings found;
  found.figures = {{"gain", "blocking time of 100 MB, at once over in the background", kNoFigure, kNoFigure,
                    times("blocking_at_once_over_blocking"), "x"},
                   {"over_copy", "blocking time in the background over a plain copy in memory", kNoFigure, 1,
                    times("blocking_over_copy"), "x"}};
  double states = 0, broken = 0;
  for (const char* name : {"checkpoint/crash/keep1", "checkpoint/crash/keep2/pipeline2", "checkpoint/crash/again"}) {
    const CaseFigures crash(add_checkpoint_crash_cases, name, context);
    states += crash("states_judged");
    broken += crash("mixtures") + crash("lost_checkpoints") + crash("latest_names_a_part") + crash("parts_under_a_final_name");
  }
  found.figures.push_back(
      {"states", "states of the disk that a crash can leave, judged", kNoFigure, kNoFigure, states, "states"});
  found.figures.push_back(
      {"broken", "of them without a whole checkpoint, or with another than reported", kNoFigure, 0, broken, "states"});
  const CaseFigures store(add_checkpoint_fault_cases, "checkpoint/faults/slow_store", context);
  const CaseFigures down(add_checkpoint_fault_cases, "checkpoint/faults/store", context);
  found.figures.push_back({"waited", "steps that waited for an object store that does not answer", kNoFigure, 0,
                           store("training_waited_for_the_store"), "steps"});
  found.figures.push_back({"fetched", "fields that differ in what comes back from a store that failed before", kNoFigure, 0,
                           down.sum("fields_and_tensors_that_differ"), "fields"});
  found.not_measured = "An object store of a cloud, and the copy from a GPU into pinned host memory.";
  return found;
}

Claim asynchronous(ClaimEffort effort) {
  const int saves = effort == ClaimEffort::quick ? 2 : 7;
  return {
      "C17",
      "6.1",
      "Asynchronous checkpoints through a host buffer and a background writer, with tiers, cut blocking time and stay reliable",
      "tandem run checkpoint --full",
      [saves](const RunContext& context) { return find_asynchronous(saves, context); },
      {{"gain", Of::measured, Relation::at_least, 2, ClaimVerdict::does_not_hold,
        "Training stands still about as long as with a checkpoint at once."},
       {"over_copy", Of::measured, Relation::at_most, 3, ClaimVerdict::imprecise,
        "Training stands still far longer than a copy in memory takes."},
       {"states", Of::measured, Relation::at_least, 60, ClaimVerdict::imprecise, "Too few states were judged."},
       {"broken", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "A crash can leave no whole checkpoint."},
       {"waited", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "Training waits for the store."},
       {"fetched", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "What the store gives back differs."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "Training stands still {:.2f} x as long as a copy in memory takes, {:.0f} x shorter than with a "
            "checkpoint at once; of {:.0f} states that a crash can leave {:.0f} have no whole checkpoint.",
            f.measured("over_copy"), f.measured("gain"), f.measured("states"), f.measured("broken"));
      }};
}

// ---- C18

ClaimFindings find_recovery(ClaimEffort effort, const RunContext& context) {
  ClaimFindings found;
  double differ = 0, lost = 0;
  for (const char* name :
       {"recovery/kill/data3", "recovery/kill/tensor2/data2", "recovery/kill/pipeline2", "recovery/kill/zero3"}) {
    const CaseFigures kill(add_recovery_cases, name, context);
    differ += kill("fields_and_tensors_that_differ at the end") + kill("steps_that_differ") + kill("steps_done_in_another_order");
    lost = std::max(lost, kill("lost_steps"));
    if (effort == ClaimEffort::quick) break;
  }
  const CaseFigures traces(add_recovery_cases, "recovery/detector/traces", context);
  const CaseFigures memory(add_recovery_cases, "recovery/memory/restart", context);
  const CaseFigures data(add_data_pipeline_cases, "data_pipeline/ledger/resume/stream", context);
  const CaseFigures quiet(add_recovery_cases, "recovery/no_alarm/load", context);
  found.figures = {
      {"delay", "silence until a dead rank is told (simulated clock)", kNoFigure, 3.75,
       3.5 + traces("latest_verdict_seconds (dead)"), "beats"},
      {"wrong", "of 200 random traces, verdicts other than the definition's", kNoFigure, 0, traces("traces_that_differ"),
       "traces"},
      {"alarms", "false alarms beside busy threads, lost beats and jitter", kNoFigure, 0,
       quiet("incidents of kind dead") + quiet("incidents of kind hung"), "alarms"},
      {"lost", "steps done again after three kills, a checkpoint every 3 steps", kNoFigure, 5, lost, "steps"},
      {"lost_memory", "lost steps with copies in memory over checkpoints alone", kNoFigure, 0.125,
       memory("lost_steps over those of checkpoints alone"), "x"},
      {"differ", "fields, tensors and steps that differ from the undisturbed run", kNoFigure, 0, differ, "of all"},
      {"data", "pairs of tokens lost or repeated over 15 interrupted runs", kNoFigure, 0, data("pairs_off_the_ledger"), "pairs"}};
  if (effort == ClaimEffort::usual) {
    const CaseFigures hang(add_recovery_cases, "recovery/hang/named", context);
    found.figures.push_back({"hang", "time until a hung rank is told, real run with limits of 0.4 s (disk: 0.8 s)", kNoFigure,
                             0.8, hang("latest_detection_seconds"), "s"});
  }
  found.not_measured = "Failures of real nodes and networks: workers are killed and stopped here.";
  return found;
}

Claim recovery(ClaimEffort effort) {
  return {
      "C18",
      "6.2",
      "Heartbeats find unresponsive nodes; restart from the newest checkpoint skips finished steps; saved loader state keeps the "
      "data order",
      "tandem run recovery --full",
      [effort](const RunContext& context) { return find_recovery(effort, context); },
      {{"delay", Of::measured, Relation::at_most, 4, ClaimVerdict::imprecise, "Dead ranks are told late."},
       {"wrong", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "Some failures are missed or made up."},
       {"alarms", Of::measured, Relation::at_most, 0, ClaimVerdict::imprecise, "Busy ranks are taken for dead."},
       {"lost", Of::measured, Relation::at_most, 9, ClaimVerdict::does_not_hold,
        "More is done again than lies between two checkpoints."},
       {"differ", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold,
        "The run does not end as the undisturbed one."},
       {"data", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "The order of the data is not kept."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "A dead rank is told after {:.2f} beats; three kills cost {:.0f} steps done again ({:.3f} x with copies "
            "in memory); {:.0f} fields, tensors or steps differ from the undisturbed run, {:.0f} pairs of tokens "
            "are lost or repeated.",
            f.measured("delay"), f.measured("lost"), f.measured("lost_memory"), f.measured("differ"), f.measured("data"));
      }};
}

// ---- C19

ClaimFindings find_monitors(ClaimEffort effort, const RunContext& context) {
  const CaseFigures table(add_anomaly_cases, "anomaly/table", context);
  const CaseFigures clean(add_anomaly_cases, "anomaly/clean/steps600", context);
  const CaseFigures poison(add_anomaly_cases, "anomaly/poison/rollback", context);
  std::vector<double> gradients, activations, state;
  double missed = 0;
  for (std::uint64_t i = 0; i < (effort == ClaimEffort::quick ? 1 : 3); ++i) {
    RunContext own = context;
    own.seed = context.seed + i;
    const CaseFigures bits(add_anomaly_cases, "anomaly/bits/trials4", own);
    gradients.push_back(bits("detection_rate (gradients)"));
    activations.push_back(bits("detection_rate (activations)"));
    state.push_back(bits("detection_rate (weights)"));
    state.push_back(bits("detection_rate (moments)"));
    missed = std::max(missed, bits.largest("worst_change_of_the_loss_not_found"));
  }
  ClaimFindings found;
  found.figures = {
      {"found", "scripted faults that the monitor meant for them sees first", kNoFigure, 1,
       mean_of(table.values("first_monitor_is_one_that_should")), "share"},
      {"delay", "steps until the slowest is seen", kNoFigure, 4, table.largest("delay_steps"), "steps"},
      {"alarms", "false alarms in 600 clean steps", kNoFigure, 0, clean("false_alarms"), "alarms"},
      {"differ", "fields that differ, after rollback, from the run that never saw the batch", kNoFigure, 0,
       poison("fields_and_tensors_that_differ (garbage)"), "fields"},
      {"loss", "validation loss over that of the run with the clean batch", kNoFigure, 1,
       poison("validation_loss_over_undisturbed"), "x"},
      {"bits_gradients", "single turned bits found, gradients", kNoFigure, kNoFigure, mean_of(gradients), "share"},
      {"bits_activations", "single turned bits found, activations", kNoFigure, kNoFigure, mean_of(activations), "share"},
      {"bits_state", "single turned bits found, weights and moments, by comparing copies", kNoFigure, 1, mean_of(state), "share"},
      {"missed", "worst change of the loss by a bit that was not found", kNoFigure, kNoFigure, missed, "share"}};
  return found;
}

Claim monitors(ClaimEffort effort) {
  return {
      "C19",
      "6.3",
      "Watching loss, gradient norms and activation ranges lets a run roll back to the last healthy checkpoint and skip "
      "suspicious batches",
      "tandem run anomaly --full",
      [effort](const RunContext& context) { return find_monitors(effort, context); },
      {{"found", Of::measured, Relation::at_least, 1, ClaimVerdict::does_not_hold, "Some scripted faults are not seen."},
       {"delay", Of::measured, Relation::at_most, 4, ClaimVerdict::imprecise, "Some are seen late."},
       {"alarms", Of::measured, Relation::at_most, 0, ClaimVerdict::imprecise, "Clean runs are rolled back."},
       {"differ", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "A rollback leaves something behind."},
       {"loss", Of::measured, Relation::at_most, 1.02, ClaimVerdict::does_not_hold, "The loss does not recover."},
       // All faults, not the large ones alone.
       {"bits_gradients", Of::measured, Relation::at_least, 0.5, ClaimVerdict::holds_within_limits,
        "Limit: only what is large is seen by these three; most single turned bits in gradients and activations are not (and are "
        "hardly felt), and those in weights and moments are found by comparing copies of them, which the statement does not "
        "name."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "{:.0f} % of the scripted faults are seen first by the monitor meant for them, within {:.0f} steps, with "
            "{:.0f} false alarms in 600 steps; after the rollback nothing differs and the validation loss is "
            "{:.3f} x. Of single turned bits {:.0f} % in gradients are found, {:.0f} % in weights and moments.",
            100 * f.measured("found"), f.measured("delay"), f.measured("alarms"), f.measured("loss"),
            100 * f.measured("bits_gradients"), 100 * f.measured("bits_state"));
      }};
}

}  // namespace

std::vector<Claim> reliability_claims(ClaimEffort effort) {
  return {spread(), asynchronous(effort), recovery(effort), monitors(effort)};
}

}  // namespace tandem
