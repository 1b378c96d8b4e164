// SPDX-License-Identifier: Apache-2.0
// What takes memory, what lifts the limit, and what that costs: C01, C02, C13, C14.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "reference/zero.h"
#include "suites/benefits.h"
#include "suites/claims_parts.h"
#include "suites/recomputation_cases.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

// Large enough that rounding blocks up to 64 bytes is nothing beside the model.
ParallelVariant of_size(int layers) {
  return {.rows = 16,
          .layers = layers,
          .vocabulary = 64,
          .dropout = 0.0,
          .row_shape = RowShape::full,
          .hidden = 48,
          .heads = 4,
          .mlp_hidden = 192};
}

double state_bytes(const EngineRun& run) {
  return rest_bytes(run, MemoryCategory::parameters) + rest_bytes(run, MemoryCategory::gradients) +
         rest_bytes(run, MemoryCategory::optimizer);
}

EngineRun one_step(const ParallelVariant& variant, const RunContext& context, std::int64_t steps = 1) {
  PairInputs inputs = inputs_of(variant, context);
  inputs.steps = steps;
  return engine_run(inputs, context);
}

// ---- C01

ClaimFindings find_footprint(const RunContext& context) {
  const ParallelVariant fp32 = of_size(6);
  ParallelVariant bf16 = fp32;
  bf16.precision = "bf16";
  ParallelVariant sharded = bf16;
  sharded.degrees.data = 4;
  const auto parameters = static_cast<double>(num_parameters(model_of(fp32)));
  const EngineRun in_fp32 = one_step(fp32, context);
  const EngineRun in_bf16 = one_step(bf16, context);
  ClaimFindings found;
  const auto add = [&](const std::string& key, const std::string& what, double stated, double predicted, double bytes) {
    found.figures.push_back({key, what, stated, predicted, bytes / parameters, "B/parameter"});
  };
  add("moments", "fp32 moments of Adam", 8, 8, rest_bytes(in_fp32, MemoryCategory::optimizer));
  add("optimizer", "moments and fp32 master copy, mixed precision", kNoFigure, 12,
      rest_bytes(in_bf16, MemoryCategory::optimizer));
  add("state_fp32", "model state in fp32: 4 + 4 + 8", kNoFigure, 16, state_bytes(in_fp32));
  add("state_bf16", "model state in bf16: 2 + 4 (sums in fp32) + 12", kNoFigure, 18, state_bytes(in_bf16));
  for (const int stage : {1, 2, 3}) {
    sharded.zero_stage = stage;
    const double owned = 1.0 / 4;
    const double predicted = (stage == 3 ? 2 * owned : 2) + (stage >= 2 ? 4 * owned : 4) + 12 * owned;
    add(fmt::format("state_zero{}", stage), fmt::format("the same with ZeRO {} on 4 ranks", stage), kNoFigure, predicted,
        state_bytes(one_step(sharded, context)));
  }
  const BytesByCategory forecast = forecast_memory(model_of(bf16), plan_of(bf16), OptimizerKind::adamw, bf16.row_tokens).device;
  double all = 0, peak = 0;
  for (const MemoryCategory category : {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer,
                                        MemoryCategory::activations, MemoryCategory::workspace}) {
    all += static_cast<double>(forecast[static_cast<std::size_t>(category)]);
    peak += peak_bytes(in_bf16, category);
  }
  found.figures.push_back(
      {"over_model", "all memory over the 16-bit parameters", kNoFigure, all / (2 * parameters), peak / (2 * parameters), "x"});
  return found;
}

Claim footprint() {
  return {
      "C01",
      "2.1",
      "Adam keeps about 8 bytes of fp32 moments a parameter; with gradients, copies and activations the footprint is far above "
      "the model",
      "tandem run loss_scaling/memory zero",
      find_footprint,
      {{"moments", Of::measured, Relation::at_least, 7.8, ClaimVerdict::imprecise, "The moments are less than stated."},
       {"moments", Of::measured, Relation::at_most, 8.2, ClaimVerdict::imprecise, "The moments are more than stated."},
       {"over_model", Of::measured, Relation::at_least, 4, ClaimVerdict::does_not_hold,
        "All of it is less than four times the model: not far above."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "Moments take {:.2f} B a parameter. In mixed precision the optimizer has the fp32 master copy as "
            "well, {:.2f} B, and the model state is {:.2f} B; everything together is {:.1f} x the bf16 model.",
            f.measured("moments"), f.measured("optimizer"), f.measured("state_bf16"), f.measured("over_model"));
      }};
}

// ---- C02

struct Strategy {
  std::string key, what;
  ParallelVariant variant;  // layers are what is looked for
  int step = 1;             // layers come in multiples of
};

std::vector<Strategy> strategies() {
  const auto with = [](ParallelDegrees degrees, int zero, const std::string& recompute) {
    ParallelVariant variant = of_size(1);
    variant.degrees = degrees;
    variant.zero_stage = zero;
    variant.recompute.mode = recompute;
    if (degrees.pipeline > 1) variant.micro_batches = 4;
    return variant;
  };
  return {{"alone", "one rank", with({}, 0, "none"), 1},
          {"data", "data 4", with({.data = 4}, 0, "none"), 1},
          {"zero3", "data 4, ZeRO 3", with({.data = 4}, 3, "none"), 1},
          {"tensor", "tensor 4", with({.tensor = 4}, 0, "none"), 1},
          {"pipeline", "pipeline 4", with({.pipeline = 4}, 0, "none"), 4},
          {"combined", "data 2, tensor 2, ZeRO 3, recomputation", with({.data = 2, .tensor = 2}, 3, "full"), 1}};
}

double sum_of(const BytesByCategory& bytes) {
  double sum = 0;
  for (std::size_t c = 0; c < bytes.size(); ++c) {
    if (c != static_cast<std::size_t>(MemoryCategory::communication)) sum += static_cast<double>(bytes[c]);
  }
  return sum;
}

// The most layers within the budget: by forecast, then from there by the ledger of runs.
struct Largest {
  double predicted = 0, measured = 0;  // parameters
};

Largest largest_model(const Strategy& strategy, double budget, const RunContext& context) {
  const auto sized = [&](int units) {
    ParallelVariant variant = strategy.variant;
    variant.layers = units * strategy.step;
    return variant;
  };
  const auto forecast = [&](int units) {
    const ParallelVariant variant = sized(units);
    return sum_of(forecast_memory(model_of(variant), plan_of(variant), OptimizerKind::adamw, variant.row_tokens).device);
  };
  const auto ledger = [&](int units) { return sum_of(one_step(sized(units), context).measured.peak_bytes); };
  int units = 0;
  while (forecast(units + 1) <= budget) ++units;
  int confirmed = units;
  while (confirmed > 0 && ledger(confirmed) > budget) --confirmed;
  if (confirmed == units) {
    while (ledger(confirmed + 1) <= budget) ++confirmed;
  }
  const auto parameters = [&](int of) { return of == 0 ? 0.0 : static_cast<double>(num_parameters(model_of(sized(of)))); };
  return {parameters(units), parameters(confirmed)};
}

Claim budget(ClaimEffort effort) {
  const double bytes = effort == ClaimEffort::quick ? 3e6 : 5e6;
  const auto find = [bytes](const RunContext& context) {
    ClaimFindings found;
    Largest alone, best;
    double off = 0;
    for (const Strategy& strategy : strategies()) {
      const Largest largest = largest_model(strategy, bytes, context);
      if (strategy.key == "alone") alone = largest;
      if (largest.measured > best.measured) best = largest;
      off = std::max(off, std::abs(largest.measured / largest.predicted - 1));
      found.figures.push_back(
          {strategy.key, "largest model, " + strategy.what, kNoFigure, largest.predicted, largest.measured, "parameters"});
    }
    found.figures.insert(found.figures.begin(),
                         {{"lift", fmt::format("best of six strategies over one rank, {:.0f} MB", bytes * 1e-6), kNoFigure,
                           best.predicted / alone.predicted, best.measured / alone.measured, "x"},
                          {"off", "largest model, measured off predicted", kNoFigure, 0, off, "share"}});
    return found;
  };
  return {
      "C02",
      "2.1",
      "The memory budget of a device bounds the model, and combining parallel strategies lifts that bound",
      "tandem plan --model gpt3-175b --cluster dgx-a100 --gpus 1024",
      find,
      {{"lift", Of::measured, Relation::at_least, 2, ClaimVerdict::does_not_hold, "Four ranks lift the bound by less than two."},
       {"off", Of::measured, Relation::at_most, 0.25, ClaimVerdict::imprecise,
        "The formula is off by more than a quarter: memory does not bound the model as it says."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "One rank holds {:.0f} thousand parameters; plain data parallelism on four {:.1f} x that (fewer "
            "activations each), ZeRO 3 {:.1f} x, tensor {:.1f} x, pipeline {:.1f} x, combined with "
            "recomputation {:.1f} x.",
            f.measured("alone") * 1e-3, f.measured("data") / f.measured("alone"), f.measured("zero3") / f.measured("alone"),
            f.measured("tensor") / f.measured("alone"), f.measured("pipeline") / f.measured("alone"),
            f.measured("combined") / f.measured("alone"));
      }};
}

// ---- C14

ClaimFindings find_sharding(const RunContext& context) {
  ParallelVariant variant = of_size(4);
  variant.rows = 8;
  ClaimFindings found;
  double whole = 0;
  double worst = 0;
  for (const int ranks : {1, 2, 4, 8}) {
    variant.degrees.data = ranks;
    variant.zero_stage = ranks > 1 ? 1 : 0;
    const double bytes = rest_bytes(one_step(variant, context), MemoryCategory::optimizer);
    if (ranks == 1) {
      whole = bytes;
      continue;
    }
    worst = std::max(worst, bytes / whole * ranks);
    found.figures.push_back({fmt::format("share{}", ranks),
                             fmt::format("optimizer bytes of a rank over unsharded, N = {}", ranks), 1.0 / ranks, 1.0 / ranks,
                             bytes / whole, "x"});
  }
  const auto wire = [&](int stage) {
    variant.degrees.data = 4;
    variant.zero_stage = stage;
    PairInputs inputs = inputs_of(variant, context);
    inputs.steps = 1;
    const EngineRun run = engine_run(inputs, context);
    return std::pair(static_cast<double>(bytes_sent(run.measured, Purpose::gradient)),
                     static_cast<double>(bytes_sent(run.measured, Purpose::parameter)));
  };
  const auto plain = wire(0);
  const auto sharded = wire(1);
  std::rotate(found.figures.begin(), found.figures.end() - 1, found.figures.end());
  found.figures.push_back({"worst_share", "N x share, worst N", 1, 1, worst, "x"});
  found.figures.push_back({"gathered", "bytes of the all-gather over those of the plain all-reduce", kNoFigure, 0.5,
                           sharded.second / plain.first, "x"});
  found.figures.push_back({"extra_bytes", "all bytes on the wire over those of the plain all-reduce, less 1", 0.5, 0,
                           (sharded.first + sharded.second) / plain.first - 1, "share"});
  return found;
}

Claim sharding() {
  return {
      "C14",
      "4.3",
      "Optimizer sharding cuts optimizer memory to about 1/N at the price of one all-gather",
      "tandem run zero",
      find_sharding,
      {{"worst_share", Of::measured, Relation::at_most, 1.1, ClaimVerdict::does_not_hold,
        "A rank keeps more than 1/N of the optimizer's state."},
       {"gathered", Of::measured, Relation::at_least, 0.45, ClaimVerdict::does_not_hold,
        "The parameters are not gathered by an all-gather of all of them."},
       {"extra_bytes", Of::measured, Relation::at_least, 0.25, ClaimVerdict::imprecise,
        "The all-gather is no price on top: the all-reduce becomes a reduce-scatter, and both together send what it sent. Only "
        "stage 3 sends more, half as much again."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "A rank of 2, 4, 8 keeps {:.3f}, {:.3f}, {:.3f} of the optimizer's state; the all-gather sends {:.2f} "
            "x the bytes of the plain all-reduce, all together {:+.1f} %.",
            f.measured("share2"), f.measured("share4"), f.measured("share8"), f.measured("gathered"),
            100 * f.measured("extra_bytes"));
      }};
}

}  // namespace

std::vector<Claim> memory_claims(ClaimEffort effort) {
  return {footprint(), budget(effort), recomputation_claim(effort), sharding()};
}

}  // namespace tandem
