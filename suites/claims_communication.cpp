// SPDX-License-Identifier: Apache-2.0
// What is sent, what hides it, and what makes it less: C04, C15, C16.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/claims_parts.h"
#include "suites/compression_cases.h"
#include "suites/recomputation_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

constexpr double kUnlimited = 0;  // bytes a second of a link

// ---- C04

// From 2 ranks to 8 with the same global batch.
void add_split(const std::string& key, const std::string& axis, const std::function<ParallelDegrees(int)>& degrees,
               const RunContext& context, ClaimFindings& found) {
  constexpr double kForward = 0.08;
  const auto run_of = [&](int ranks) {
    return stated_run({.degrees = degrees(ranks),
                       .rows = 8,
                       .vocabulary = 64,
                       .dropout = 0.0,
                       .row_shape = RowShape::full,
                       .hidden = 48,
                       .heads = 8,
                       .mlp_hidden = 192},
                      kForward, stated_link(0, kUnlimited), context);
  };
  const StatedRun few = run_of(2);
  const StatedRun many = run_of(8);
  const double flops = step_flops(many.inputs).all / 8 / (step_flops(few.inputs).all / 2);
  found.figures.push_back({key + "_work", axis + ": work of a rank (FLOPs, busy time), 8 ranks over 2", kNoFigure, flops,
                           busy_seconds(many) / busy_seconds(few), "x"});
  found.figures.push_back({key + "_bytes", axis + ": bytes that a rank sends a step, 8 ranks over 2", kNoFigure,
                           programmed_bytes_per_rank(many.inputs) / programmed_bytes_per_rank(few.inputs),
                           bytes_per_rank_and_step(many.inputs, many.run) / bytes_per_rank_and_step(few.inputs, few.run), "x"});
}

ClaimFindings find_split(const RunContext& context) {
  ClaimFindings found;
  add_split(
      "data", "data parallel", [](int n) { return ParallelDegrees{.data = n}; }, context, found);
  add_split(
      "tensor", "tensor parallel", [](int n) { return ParallelDegrees{.tensor = n}; }, context, found);
  return found;
}

Claim split() {
  return {
      "C04",
      "2.2",
      "More parallelism shrinks the computing of a device but not its communication accordingly",
      "tandem run scaling data_parallel tensor_parallel",
      find_split,
      {{"data_work", Of::measured, Relation::at_most, 0.5, ClaimVerdict::does_not_hold, "Data ranks do not share the work."},
       {"tensor_work", Of::measured, Relation::at_most, 0.5, ClaimVerdict::does_not_hold, "Tensor ranks do not share the work."},
       {"data_bytes", Of::measured, Relation::at_least, 1, ClaimVerdict::does_not_hold,
        "Data ranks send less, the more they are."},
       {"tensor_bytes", Of::measured, Relation::at_least, 1, ClaimVerdict::does_not_hold,
        "Tensor ranks send less, the more they are."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "From 2 to 8 ranks the work of a rank falls to {:.2f} (data) and {:.2f} (tensor) of what it was, while "
            "the bytes that it sends grow {:.2f} and {:.2f} times: 2 b (n - 1)/n does not fall with n.",
            f.measured("data_work"), f.measured("tensor_work"), f.measured("data_bytes"), f.measured("tensor_bytes"));
      }};
}

// ---- C15

constexpr int kOverlapRanks = 3;
constexpr double kLayerSeconds = 0.006;  // forward, of a rank
constexpr double kLatencySeconds = 1e-3;

ClaimFindings find_buckets(const RunContext& context) {
  ParallelVariant variant{.degrees = {.data = kOverlapRanks}, .rows = 6, .layers = 6};
  const std::int64_t layer = layer_bytes(model_of(variant));
  // The gradients of a layer are on their way for 0.8 of its backward pass.
  const double on_the_wire = 2.0 * (kOverlapRanks - 1) / kOverlapRanks * static_cast<double>(layer);
  const LinkProfile link = stated_link(kLatencySeconds, on_the_wire / (0.8 * 2 * kLayerSeconds - 2 * kLatencySeconds));
  const auto run_of = [&](std::int64_t bucket_bytes, bool overlap) {
    variant.bucket_bytes = bucket_bytes;
    variant.overlap.gradients = overlap;
    return stated_run(variant, kLayerSeconds * kOverlapRanks, link, context);
  };
  const StatedRun plain = run_of(layer, false);
  const StatedRun by_layer = run_of(layer, true);
  const StatedRun by_tensor = run_of(1, true);
  const StatedRun whole = run_of(0, true);
  ClaimFindings found;
  found.figures = {
      {"hidden", "share of exposed communication that overlap hides, a bucket a layer", kNoFigure,
       1 - by_layer.predicted_exposed_seconds / plain.predicted_exposed_seconds,
       1 - by_layer.exposed_seconds / plain.exposed_seconds, "share"},
      {"plain", "step without overlap", kNoFigure, plain.predicted_step_seconds, plain.step_seconds, "s"},
      {"by_layer", "step, a bucket a layer", kNoFigure, by_layer.predicted_step_seconds, by_layer.step_seconds, "s"},
      {"small", "a bucket for every tensor, over a bucket a layer", kNoFigure,
       by_tensor.predicted_step_seconds / by_layer.predicted_step_seconds, by_tensor.step_seconds / by_layer.step_seconds, "x"},
      {"large", "one bucket for all, over a bucket a layer", kNoFigure,
       whole.predicted_step_seconds / by_layer.predicted_step_seconds, whole.step_seconds / by_layer.step_seconds, "x"}};
  return found;
}

Claim buckets() {
  return {
      "C15",
      "5.1",
      "Gradients can be reduced layer by layer behind the backward pass; too large buckets leave no window, too small ones too "
      "many operations",
      "tandem run overlap/hidden overlap/bucket-size",
      find_buckets,
      {{"hidden", Of::measured, Relation::at_least, 0.4, ClaimVerdict::does_not_hold, "Less than half is hidden."},
       {"small", Of::measured, Relation::at_least, 1.1, ClaimVerdict::imprecise, "Small buckets cost nothing here."},
       {"large", Of::measured, Relation::at_least, 1.1, ClaimVerdict::imprecise, "One bucket for all costs nothing here."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "With a bucket a layer {:.0f} % of the exposed communication is hidden (predicted {:.0f} %) and a step "
            "of {:.0f} ms takes {:.0f}; a bucket for every tensor takes {:.2f} x as long, one for all {:.2f} x.",
            100 * f.measured("hidden"), 100 * f.predicted("hidden"), 1e3 * f.measured("plain"), 1e3 * f.measured("by_layer"),
            f.measured("small"), f.measured("large"));
      }};
}

// ---- C16

void add_convergence(CaseList& cases) { add_compression_convergence_cases(cases); }
void add_times(CaseList& cases) { add_compression_time_cases(cases); }

// Bytes of gradients that go over the wire, plain over coded.
void add_ratio(const std::string& codec, const RunContext& context, ClaimFindings& found) {
  CompressionConfig compression = compression_of(codec);
  compression.block = 256;
  compression.density = 0.02;
  const auto inputs_with = [&](const CompressionConfig& config) {
    PairInputs inputs = compressed_inputs({.degrees = {.data = 2}, .vocabulary = 64, .hidden = 48, .heads = 4, .mlp_hidden = 192},
                                          config, context);
    inputs.steps = 1;
    return inputs;
  };
  const auto sent = [&](const CompressionConfig& config) {
    return static_cast<double>(bytes_sent(engine_run(inputs_with(config), context).measured, Purpose::gradient));
  };
  const auto programmed = [&](const CompressionConfig& config) {
    return static_cast<double>(facts_of(inputs_with(config)).wire_bytes[static_cast<std::size_t>(Purpose::gradient)]);
  };
  found.figures.push_back({"ratio_" + codec, "bytes of gradients, plain over " + codec, kNoFigure,
                           programmed({}) / programmed(compression), sent({}) / sent(compression), "x"});
}

// Bandwidth at which coding takes as long as it saves, from the points of the case.
void add_crossover(const RunContext& context, ClaimFindings& found) {
  const CaseFigures pays(add_times, "compression/int8/pays/ranks2", context);
  double crossover = kNoFigure, last_bandwidth = 0, last_saved = 0;
  for (const double bandwidth : {1e8, 3e8, 1e9, 3e9, 1e10, 3e10}) {
    const double saved = pays(fmt::format("seconds_of_sum_saved at {:.0f} MB/s", bandwidth * 1e-6));
    if (last_saved > 0 && saved <= 0 && std::isnan(crossover)) {
      crossover = last_bandwidth * std::pow(bandwidth / last_bandwidth, last_saved / (last_saved - saved));
    }
    last_bandwidth = bandwidth;
    last_saved = saved;
  }
  found.figures.push_back({"crossover", "link below which int8 makes a sum of 16.8 MB faster here", kNoFigure,
                           crossover * 1e-9 / pays("crossover_over_lower_prediction"), crossover * 1e-9, "GB/s"});
  found.figures.push_back({"speed_up", "a step over 100 MB/s with int8, times as fast", kNoFigure, kNoFigure,
                           pays("step_speed_up at 100 MB/s"), "x"});
}

ClaimFindings find_compression(ClaimEffort effort, const RunContext& context) {
  const std::vector<std::string> codecs = effort == ClaimEffort::quick
                                              ? std::vector<std::string>{"top_k", "int8"}
                                              : std::vector<std::string>{"top_k", "int8", "int4", "sign"};
  ClaimFindings found;
  double worst_with = 0;
  for (const std::string& codec : codecs) {
    const CaseFigures figures(add_convergence, "compression/" + codec + "/convergence/seeds3", context);
    const std::string of = codec + ", 3 seeds";
    found.figures.push_back({"without_" + codec, "of what is learned, lost without feedback: " + of, kNoFigure, kNoFigure,
                             figures("cost_without_feedback"), "share"});
    found.figures.push_back(
        {"with_" + codec, "the same with feedback: " + of, kNoFigure, 0, figures("cost_with_feedback"), "share"});
    worst_with = std::max(worst_with, figures("cost_with_feedback"));
  }
  found.figures.push_back({"worst_with", "lost with feedback, worst codec", kNoFigure, 0, worst_with, "share"});
  add_ratio("int8", context, found);
  add_ratio("top_k", context, found);
  const CaseFigures laws(add_compression_cases, "compression/top_k/feedback/ranks5/fp32", context);
  found.figures.push_back({"not_conserved", "elements of which sent + kept is not what was given, top_k", kNoFigure, 0,
                           laws("elements_not_conserved_exactly"), "elements"});
  if (effort == ClaimEffort::quick) {
    RunContext few = context;
    few.repetitions = 3;
    const CaseFigures faster(add_times, "compression/int8/faster/ranks2", few);
    found.figures.push_back({"speed_up", "a step over 100 MB/s with int8, times as fast", kNoFigure, kNoFigure,
                             faster("step_speed_up at 100 MB/s"), "x"});
  } else {
    add_crossover(context, found);
  }
  return found;
}

Claim compression(ClaimEffort effort) {
  return {"C16",
          "5.2",
          "Gradients can be quantised to INT8 or lower, or only the Top-K sent; this adds bias and usually needs error feedback",
          "tandem run compression --full",
          [effort](const RunContext& context) { return find_compression(effort, context); },
          {{"worst_with", Of::measured, Relation::at_most, 0.15, ClaimVerdict::does_not_hold,
            "Even with feedback a codec costs more than a seventh of what is learned."},
           {"without_top_k", Of::measured, Relation::at_least, 0.1, ClaimVerdict::does_not_hold,
            "Top-K loses nothing without feedback."},
           {"not_conserved", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "Something is lost for good."},
           {"speed_up", Of::measured, Relation::at_least, 1.2, ClaimVerdict::imprecise,
            "Over a slow link a step is not faster with int8."},
           // INT8 needs feedback as well, if the claim is to hold for all that it names.
           {"without_int8", Of::measured, Relation::at_least, 0.02, ClaimVerdict::holds_within_limits,
            "Limit: feedback is needed by Top-K and by signs; INT8 in blocks of 256 loses next to nothing without it."}},
          [](const ClaimFindings& f) {
            std::string text = fmt::format(
                "Without feedback top_k loses {:.1f} % of what is learned in 200 steps of SGD, with it "
                "{:.1f} %; int8 {:.2f} and {:.2f} %. int8 sends {:.2f} x fewer bytes, top_k (2 %) {:.1f} x.",
                100 * f.measured("without_top_k"), 100 * f.measured("with_top_k"), 100 * f.measured("without_int8"),
                100 * f.measured("with_int8"), f.measured("ratio_int8"), f.measured("ratio_top_k"));
            for (const ClaimFigure& figure : f.figures) {
              if (figure.key == "crossover") text += fmt::format(" int8 pays below {:.1f} GB/s on this CPU.", figure.measured);
            }
            return text;
          }};
}

}  // namespace

std::vector<Claim> communication_claims(ClaimEffort effort) { return {split(), buckets(), compression(effort)}; }

}  // namespace tandem
