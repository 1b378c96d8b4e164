// SPDX-License-Identifier: Apache-2.0
// What recomputation costs and saves: C13.
#include <algorithm>

#include <fmt/format.h>

#include "reference/scaling.h"
#include "suites/benefits.h"
#include "suites/claims_parts.h"
#include "suites/recomputation_cases.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

// The model of the case recomputation/time, or as deep and not as wide: shares of activations do not depend on the width.
PairInputs inputs_with(const RecomputeConfig& recompute, std::int64_t hidden, const RunContext& context) {
  PairInputs inputs = inputs_of({.rows = 2,
                                 .layers = 4,
                                 .row_tokens = 128,
                                 .row_shape = RowShape::full,
                                 .recompute = recompute,
                                 .hidden = hidden,
                                 .heads = 8,
                                 .mlp_hidden = 4 * hidden},
                                context);
  inputs.model.sequence = 128;
  inputs.steps = 1;
  return inputs;
}

double extra_flops(const PairInputs& inputs) {
  const StepFlops flops = step_flops(inputs);
  return flops.recomputed / (flops.all - flops.recomputed);
}

double activation_bytes(const PairInputs& inputs, bool measured, const RunContext& context) {
  const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
  if (measured) return static_cast<double>(engine_run(inputs, context).measured.peak_bytes[activations]);
  return static_cast<double>(
      predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind, inputs.data->sequence())[activations]);
}

// One more forward pass of GPT-3 175B, in closed form.
double extra_flops_of_gpt3() {
  const reference::GptSize size{.rows = 1, .sequence = 2048, .layers = 96, .hidden = 12288, .vocabulary = 51200};
  return reference::gpt_step_flops(size, true) / reference::gpt_step_flops(size, false) - 1;
}

ClaimFindings find_recomputation(int rounds, const RunContext& context) {
  const CaseFigures times("recomputation/time", recomputation_times(context, rounds));
  ClaimFindings found;
  const auto add = [&](const std::string& key, const std::string& what, double stated, double predicted, double measured) {
    found.figures.push_back({key, what, stated, predicted, measured, "share"});
  };
  const auto flops = [&](const char* mode) { return extra_flops(inputs_with({mode, 1}, 256, context)); };
  add("time_full", "extra time of a step (predicted: extra FLOPs), full", 0.3, flops("full"), times("extra_time/blocked/full"));
  add("time_selective", "extra time of a step (predicted: extra FLOPs), selective", kNoFigure, flops("selective"),
      times("extra_time/blocked/selective"));
  const auto bytes = [&](const RecomputeConfig& recompute, bool measured) {
    return activation_bytes(inputs_with(recompute, 64, context), measured, context);
  };
  const double predicted = bytes({}, false), kept = bytes({}, true);
  const auto saved = [&](const std::string& key, const std::string& what, const RecomputeConfig& recompute) {
    add(key, "activation bytes saved, " + what, kNoFigure, 1 - bytes(recompute, false) / predicted,
        1 - bytes(recompute, true) / kept);
  };
  saved("saved_full", "full", {"full", 1});
  saved("saved_selective", "selective", {"selective", 1});
  saved("saved_every2", "full, every second layer kept", {"full", 2});
  add("flops_gpt3", "extra FLOPs of full recomputation, GPT-3 175B", 0.3, extra_flops_of_gpt3(), kNoFigure);
  const auto pays = [&](bool measured) {
    const auto of = [&](const char* key) { return measured ? found.measured(key) : found.predicted(key); };
    const double per_time = std::max(of("time_selective"), 1e-3);  // what costs nothing cannot be divided by
    return (of("saved_selective") / per_time) / (of("saved_full") / of("time_full"));
  };
  found.figures.push_back({"pays", "bytes saved per extra time, selective over full", kNoFigure, pays(false), pays(true), "x"});
  return found;
}

}  // namespace

Claim recomputation_claim(ClaimEffort effort) {
  const int rounds = effort == ClaimEffort::quick ? 3 : 9;
  return {"C13",
          "4.2",
          "Recomputation costs about 30 % more computing for a large memory saving; full saves most, selective pays best",
          "tandem run recomputation/time recomputation/published",
          [rounds](const RunContext& context) { return find_recomputation(rounds, context); },
          {{"flops_gpt3", Of::predicted, Relation::at_most, 0.36, ClaimVerdict::imprecise,
            "One more forward pass costs more than a third."},
           {"time_full", Of::measured, Relation::at_most, 0.45, ClaimVerdict::imprecise, "It costs far more than stated."},
           {"time_full", Of::measured, Relation::at_least, 0.1, ClaimVerdict::imprecise, "It costs far less than stated."},
           {"saved_full", Of::measured, Relation::at_least, 0.5, ClaimVerdict::does_not_hold,
            "Full recomputation saves less than half of the activations."},
           {"saved_selective", Of::measured, Relation::at_least, 0.1, ClaimVerdict::does_not_hold,
            "Selective recomputation saves next to nothing."},
           {"pays", Of::measured, Relation::at_least, 1, ClaimVerdict::imprecise,
            "Selective recomputation does not pay better than full here."},
           // 30 % as the price of recomputation in general: selective would have to cost as much.
           {"time_selective", Of::predicted, Relation::at_least, 0.2, ClaimVerdict::holds_within_limits,
            "Limit: about 30 % is the price of full recomputation alone, a third at most (one forward of three, the head is not "
            "repeated); selective costs a few per cent at most."}},
          [](const ClaimFindings& f) {
            return fmt::format(
                "Full: {:.1f} % more FLOPs and {:.1f} % more time here ({:.1f} % of FLOPs for GPT-3 175B) for {:.0f} % "
                "less activation memory; selective: {:.1f} % more time for {:.0f} % less.",
                100 * f.predicted("time_full"), 100 * f.measured("time_full"), 100 * f.predicted("flops_gpt3"),
                100 * f.measured("saved_full"), 100 * f.measured("time_selective"), 100 * f.measured("saved_selective"));
          }};
}

}  // namespace tandem
