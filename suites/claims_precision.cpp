// SPDX-License-Identifier: Apache-2.0
// What 16 bits halve, what vanishes in them, and what lifts it again: C10, C11, C12.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/cluster.h"
#include "suites/benefits.h"
#include "suites/claims_parts.h"
#include "suites/loss_scaling_cases.h"
#include "suites/loss_scaling_run.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

// ---- C10

constexpr int kTurns = 3;

PairInputs sized_for_products(const std::string& precision, const RunContext& context) {
  PairInputs inputs = inputs_of({.rows = 4,
                                 .layers = 2,
                                 .vocabulary = 128,
                                 .row_tokens = 64,
                                 .dropout = 0.0,
                                 .row_shape = RowShape::full,
                                 .precision = precision,
                                 .hidden = 256,
                                 .heads = 4,
                                 .mlp_hidden = 1024},
                                context);
  inputs.model.sequence = 64;
  return inputs;
}

ClaimFindings find_halving(std::int64_t steps, const RunContext& context) {
  struct Side {
    double activations = 0, predicted = 0, seconds = 0;
  };
  const auto side = [&](const std::string& precision) {
    PairInputs inputs = sized_for_products(precision, context);
    inputs.steps = steps;
    const EngineRun run = engine_run(inputs, context);
    const BytesByCategory predicted = predicted_peak(inputs.model, inputs.plan, inputs.optimizer.kind, 64);
    const std::vector<double>& seconds = run.measured.step_seconds;
    return Side{peak_bytes(run, MemoryCategory::activations),
                static_cast<double>(predicted[static_cast<std::size_t>(MemoryCategory::activations)]),
                *std::min_element(seconds.begin(), seconds.end())};
  };
  // By turns, the least of each: what else the machine does only adds to it.
  Side wide = side("fp32"), narrow = side("bf16");
  for (int turn = 1; turn < kTurns; ++turn) {
    wide.seconds = std::min(wide.seconds, side("fp32").seconds);
    narrow.seconds = std::min(narrow.seconds, side("bf16").seconds);
  }
  const ClusterSpec cluster = read_cluster("dgx-a100");
  const double bf16 = cluster.device.peak_flops.at("bf16");
  ClaimFindings found;
  found.figures = {
      {"activations", "activation bytes, bf16 over fp32", 0.5, narrow.predicted / wide.predicted,
       narrow.activations / wide.activations, "x"},
      {"time", "step time, bf16 over fp32, on this CPU", 0.5, kNoFigure, narrow.seconds / wide.seconds, "x"},
      {"tf32", "time of products, bf16 over TF32, A100", 0.5, cluster.device.peak_flops.at("tf32") / bf16, kNoFigure, "x"},
      {"fp32", "time of products, bf16 over fp32, A100", 0.5, cluster.device.peak_flops.at("fp32") / bf16, kNoFigure, "x"}};
  found.not_measured = "A GPU's 16-bit matrix units.";
  return found;
}

Claim halving(ClaimEffort effort) {
  const std::int64_t steps = effort == ClaimEffort::quick ? 3 : 5;
  return {"C10",
          "4.1",
          "16-bit forward and backward passes halve activation memory and the cost of computing",
          "tandem run loss_scaling --full",
          [steps](const RunContext& context) { return find_halving(steps, context); },
          {{"activations", Of::measured, Relation::at_most, 0.6, ClaimVerdict::does_not_hold,
            "Activations do not become half as large."},
           {"activations", Of::measured, Relation::at_least, 0.45, ClaimVerdict::imprecise,
            "Activations become less than half as large."},
           {"time", Of::measured, Relation::at_most, 0.9, ClaimVerdict::holds_within_limits,
            "Limit: this CPU multiplies 16-bit numbers no faster."},
           {"fp32", Of::predicted, Relation::at_least, 0.25, ClaimVerdict::holds_within_limits,
            "Limit: half is exact for memory alone. Computing gets cheaper by what the device's units say, and only in products: "
            "norms, "
            "loss, update and the fp32 master do not."}},
          [](const ClaimFindings& f) {
            return fmt::format(
                "Activations take {:.3f} of those in fp32 (statistics stay fp32). A step takes {:.2f} of the time on this "
                "CPU; products on an A100 {:.2f} of TF32's and {:.2f} of fp32's.",
                f.measured("activations"), f.measured("time"), f.predicted("tf32"), f.predicted("fp32"));
          }};
}

// ---- C11

void add_underflow(CaseList& cases) { add_underflow_cases(cases); }

ClaimFindings find_underflow(const RunContext& context) {
  const CaseFigures shares(add_underflow, "loss_scaling/underflow/shares", context);
  const CaseFigures outcome(add_underflow, "loss_scaling/outcome/tiny_gradients", context);
  const CaseFigures sketch(add_underflow, "loss_scaling/literal_sketch", context);
  const std::string engine = fmt::format(" (engine, seed {})", context.seed);
  ClaimFindings found;
  found.figures = {{"vanish", "gradients zero or subnormal in fp16 at scale 1, usual model", kNoFigure, 0.5,
                    shares("zero_or_subnormal_share_fp16_scale_1 (usual model)"), "share"},
                   {"vanish_scaled", "gradients zero or subnormal in fp16 at scale 2^16", kNoFigure, 0,
                    shares("zero_or_subnormal_share_fp16_scaled (usual model)"), "share"},
                   {"vanish_bf16", "gradients zero or subnormal in bf16", kNoFigure, 0,
                    shares("zero_or_subnormal_share_bf16 (usual model)"), "share"},
                   {"vanish_tiny", "at scale 1, model with tiny gradients", kNoFigure, 1,
                    shares("zero_or_subnormal_share_fp16_scale_1 (tiny gradients)"), "share"},
                   {"loss_unscaled", "final loss over that in fp32, fp16 without scale (predicted: guessing)", kNoFigure,
                    std::log(16.0) / outcome("loss_fp32" + engine), outcome("loss_fp16_unscaled_over_fp32" + engine), "x"},
                   {"loss_scaled", "final loss over that in fp32, fp16 with dynamic scaling", kNoFigure, 1,
                    outcome("loss_fp16_scaled_over_fp32" + engine), "x"},
                   {"loss_bf16", "final loss over that in fp32, bf16 without scale", kNoFigure, 1,
                    outcome("loss_bf16_over_fp32" + engine), "x"},
                   {"skips_rule", "skipped of 140 steps, count of stable steps reset at each growth", kNoFigure, 0,
                    sketch("skips_of_the_rule in training"), "steps"},
                   {"skips_sketch", "skipped of 140 steps, count never reset, as sketches print it", kNoFigure, 45,
                    sketch("skips_of_the_sketch in training"), "steps"}};
  return found;
}

Claim underflow() {
  return {
      "C11",
      "4.1",
      "Lower precision makes gradients underflow; dynamic loss scaling (halve and skip on overflow, double after a stable run) "
      "is "
      "needed",
      "tandem run loss_scaling/underflow loss_scaling/outcome loss_scaling/literal_sketch --full",
      find_underflow,
      {{"vanish", Of::measured, Relation::at_least, 0.1, ClaimVerdict::does_not_hold, "Hardly any gradient vanishes in fp16."},
       {"vanish_scaled", Of::measured, Relation::at_most, 0.02, ClaimVerdict::does_not_hold, "The scale does not lift them."},
       {"loss_unscaled", Of::measured, Relation::at_least, 1.5, ClaimVerdict::does_not_hold,
        "Training without a scale ends as well as with one."},
       {"loss_scaled", Of::measured, Relation::at_most, 1.05, ClaimVerdict::does_not_hold,
        "Training with a scale ends worse than in fp32."},
       // Lower precision in general: bf16 would have to underflow as well.
       {"vanish_bf16", Of::measured, Relation::at_least, 0.01, ClaimVerdict::holds_within_limits,
        "Limit: this is fp16; in bf16, with the exponents of fp32, nothing underflows and no scale is needed."},
       {"skips_sketch", Of::measured, Relation::at_most, 5, ClaimVerdict::holds_within_limits,
        "Limit: the count of stable steps must begin anew at each growth, or the scale grows at every step."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "{:.0f} % of the activation gradients are zero or subnormal in fp16 at scale 1, {:.2f} % at 2^16, "
            "{:.0f} % in bf16. A task of tiny gradients ends at {:.1f} x the loss of fp32 without a scale, at "
            "{:.2f} x with one.",
            100 * f.measured("vanish"), 100 * f.measured("vanish_scaled"), 100 * f.measured("vanish_bf16"),
            f.measured("loss_unscaled"), f.measured("loss_scaled"));
      }};
}

// ---- C12

// Steps that a scale of 2^26 makes overflow, far beyond fp16 and far within bf16, and the loss at the end.
struct ScaledRun {
  double skipped = 0, loss = 0;
};

ScaledRun scaled_run(const std::string& precision, const std::string& mode, double initial, const RunContext& context) {
  ParallelVariant variant{.micro_batches = 2, .dropout = 0.0, .precision = precision};
  variant.loss_scale.mode = mode;
  variant.loss_scale.initial = initial;
  Script script;
  script.inputs = inputs_of(variant, context);
  script.inputs.steps = 24;
  const ScriptedRun run = run_script(script, context, precision + " " + mode);
  return {static_cast<double>(run.skipped()), run.evidence.losses.back()};
}

ClaimFindings find_steadiness(std::uint64_t seeds, const RunContext& context) {
  double skipped_fp16 = 0, skipped_bf16 = 0, failed_fp16 = 0, failed_bf16 = 0, needs = 0, off_fp16 = 0, off_bf16 = 0;
  for (std::uint64_t i = 0; i < seeds; ++i) {
    RunContext own = context;
    own.seed = context.seed + i;
    skipped_fp16 += scaled_run("fp16", "dynamic", 0x1p26, own).skipped;
    skipped_bf16 += scaled_run("bf16", "dynamic", 0x1p26, own).skipped;
    const double unscaled = scaled_run("bf16", "none", 1, own).loss;
    needs = std::max(needs, std::abs(unscaled / scaled_run("bf16", "static", 1024, own).loss - 1));
    const CaseFigures outcome(add_underflow, "loss_scaling/outcome/tiny_gradients", own);
    const std::string engine = fmt::format(" (engine, seed {})", own.seed);
    failed_fp16 += outcome("loss_fp16_unscaled_over_fp32" + engine) < 1.5 ? 0 : 1;
    failed_bf16 += outcome("loss_bf16_over_fp32" + engine) < 1.5 ? 0 : 1;
    off_fp16 = std::max(off_fp16, std::abs(outcome("loss_fp16_scaled_over_fp32" + engine) - 1));
    off_bf16 = std::max(off_bf16, std::abs(outcome("loss_bf16_over_fp32" + engine) - 1));
  }
  const auto all = static_cast<double>(seeds);
  ClaimFindings found;
  found.figures = {
      {"failed_fp16", "runs without a scale that learn nothing, fp16, of all seeds", kNoFigure, 1, failed_fp16 / all, "share"},
      {"failed_bf16", "runs without a scale that learn nothing, bf16, of all seeds", kNoFigure, 0, failed_bf16 / all, "share"},
      {"skipped_fp16", "skipped of 24 steps from a scale of 2^26, fp16, mean of seeds", kNoFigure, kNoFigure, skipped_fp16 / all,
       "steps"},
      {"skipped_bf16", "skipped of 24 steps from a scale of 2^26, bf16, mean of seeds", kNoFigure, 0, skipped_bf16 / all,
       "steps"},
      {"scale_changes", "what a scale changes of the final loss in bf16, worst seed", kNoFigure, 0, needs, "share"},
      {"off_fp16", "final loss off that of fp32, scaled fp16, worst seed", kNoFigure, kNoFigure, off_fp16, "share"},
      {"off_bf16", "final loss off that of fp32, bf16 (three bits of mantissa fewer), worst seed", kNoFigure, kNoFigure, off_bf16,
       "share"}};
  return found;
}

Claim steadiness(ClaimEffort effort) {
  const std::uint64_t seeds = effort == ClaimEffort::quick ? 1 : 3;
  return {
      "C12",
      "4.1",
      "BF16 is steadier than FP16 for its range (the article's sketch scales a bf16 loss all the same)",
      "tandem run loss_scaling/outcome/tiny_gradients/reference --full",
      [seeds](const RunContext& context) { return find_steadiness(seeds, context); },
      {{"failed_fp16", Of::measured, Relation::at_least, 0.3, ClaimVerdict::does_not_hold,
        "fp16 without a scale trains as well."},
       {"failed_bf16", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "bf16 fails as well."},
       {"skipped_fp16", Of::measured, Relation::at_least, 1, ClaimVerdict::does_not_hold, "fp16 overflows no more than bf16."},
       {"skipped_bf16", Of::measured, Relation::at_most, 0, ClaimVerdict::does_not_hold, "bf16 overflows."},
       {"scale_changes", Of::measured, Relation::at_least, 0.02, ClaimVerdict::imprecise,
        "The sketch's scale on a bf16 loss is not needed: a power of two drops out of everything but fp16's range."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "Without a scale fp16 learns nothing in {:.0f} % of the seeds, bf16 fails in {:.0f} %; from a scale of "
            "2^26 fp16 skips {:.1f} of 24 steps, bf16 {:.0f}. A scale of 1024 changes the final loss in bf16 by "
            "{:.3f} %.",
            100 * f.measured("failed_fp16"), 100 * f.measured("failed_bf16"), f.measured("skipped_fp16"),
            f.measured("skipped_bf16"), 100 * f.measured("scale_changes"));
      }};
}

}  // namespace

std::vector<Claim> precision_claims(ClaimEffort effort) { return {halving(effort), underflow(), steadiness(effort)}; }

}  // namespace tandem
