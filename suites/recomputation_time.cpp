// SPDX-License-Identifier: Apache-2.0
// What recomputation costs: steps of engines that keep everything and of engines that do not, turn by turn.
#include <ctime>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "core/quantile.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/machine.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"
#include "suites/parallel_cases.h"
#include "suites/recomputation_cases.h"

namespace tandem {
namespace {

constexpr int kRounds = 15;  // after the first, which finds its memory and its kernels

struct Variant {
  const char* mode;
  const char* attention;
};
// Each is compared with the first of its attention.
constexpr std::size_t kModes = 3;
constexpr std::array<Variant, 2 * kModes> kVariants = {Variant{"none", "blocked"},    {"selective", "blocked"},
                                                       {"full", "blocked"},           {"none", "materialized"},
                                                       {"selective", "materialized"}, {"full", "materialized"}};

PairInputs timed_inputs(const Variant& variant, const RunContext& context) {
  PairInputs inputs = inputs_of({.rows = 2,
                                 .layers = 4,
                                 .row_tokens = 128,
                                 .row_shape = RowShape::full,
                                 .recompute = {variant.mode, 1},
                                 .attention = variant.attention},
                                context);
  inputs.model.hidden = 256;
  inputs.model.heads = 8;
  inputs.model.mlp_hidden = 1024;
  inputs.model.sequence = 128;
  inputs.plan.threads_per_rank = 1;
  inputs.steps = kRounds + 1;
  return inputs;
}

// Seconds that this thread had a processor: of one rank with one thread that is its whole step, however busy the machine is.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// One rank and one thread with its own memory.
class Trainer {
 public:
  Trainer(PairInputs inputs, const RunContext& context, Communicator& comm)
      : inputs_(std::move(inputs)),
        kernels_(make_kernels(inputs_.plan, machine_of(context))),
        engine_({&comm, kernels_.get(), &arena_, nullptr, context.pitfalls, {}},
                {inputs_.model, inputs_.plan, own_optimizer(inputs_), inputs_.schedule, inputs_.steps, inputs_.seed, {}}) {
    engine_.store().initialise(inputs_.model, inputs_.initialization, inputs_.seed);
  }

  double step_seconds(std::int64_t step) {
    const Batch batch = inputs_.data->training_batch(step, inputs_.plan.batch.rows);
    const double begin = thread_seconds();
    (void)engine_.train_step(batch, step);
    return thread_seconds() - begin;
  }

 private:
  PairInputs inputs_;
  std::unique_ptr<Kernels> kernels_;
  Arena arena_{{.memory = &kernels_->memory()}};
  Engine engine_;
};

using Seconds = std::array<std::vector<double>, kVariants.size()>;

// [variant][round], turn by turn, so that what slows the machine down for a while slows all of them.
Seconds measure(const RunContext& context, int rounds) {
  Seconds seconds;
  run_world({.ranks = 1}, [&](Communicator& comm) {
    std::vector<std::unique_ptr<Trainer>> trainers;
    for (const Variant& variant : kVariants) {
      trainers.push_back(std::make_unique<Trainer>(timed_inputs(variant, context), context, comm));
    }
    for (std::int64_t round = 0; round <= rounds; ++round) {
      for (std::size_t v = 0; v < trainers.size(); ++v) {
        const double step = trainers[v]->step_seconds(round);
        if (round > 0) seconds[v].push_back(step);
      }
    }
  });
  return seconds;
}

double median_ratio(const std::vector<double>& of, const std::vector<double>& to) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < of.size(); ++i) ratios.push_back(of[i] / to[i]);
  return median(std::move(ratios));
}

double flops_ratio(const Variant& variant, const RunContext& context) {
  const StepFlops flops = step_flops(timed_inputs(variant, context));
  return flops.all / (flops.all - flops.recomputed);
}

// With a share w of the step outside products, of which recomputation repeats a part q, beside r of the products,
//   time - FLOPs ratio = (1 - w) (1 + r) + w (1 + q) - (1 + r) = w (q - r).
// w: a third. A step that keeps everything runs at two thirds of the peak of one thread's products
// (docs/techniques/recomputation.md), so that at least so much of it is products. q: half at most. Backward passes of norms, GELU
// and attention, loss and update, none of them repeated, take no less than the forward passes.
constexpr double kLargestOther = 1.0 / 3;
constexpr double kLargestRepeated = 0.5;

double largest_difference(double flops_ratio) {
  const double r = flops_ratio - 1;
  return kLargestOther * std::max(r, kLargestRepeated - r);
}

std::vector<Property> extra_time(const Seconds& seconds, const RunContext& context) {
  std::vector<Property> all;
  for (std::size_t none = 0; none < kVariants.size(); none += kModes) {
    double extra[kModes] = {};
    for (std::size_t mode = 1; mode < kModes; ++mode) {
      const Variant& variant = kVariants[none + mode];
      const double time = median_ratio(seconds[none + mode], seconds[none]);
      const double predicted = flops_ratio(variant, context);
      extra[mode] = time - 1;
      all.push_back(
          {fmt::format("time_off_flops_ratio/{}/{}", variant.attention, variant.mode), std::abs(time - predicted),
           Relation::at_most, largest_difference(predicted),
           fmt::format("{:.1f} ms a step, {:.3f} times that of none; FLOPs {:.3f} times; what is no product is in time alone",
                       1e3 * median(seconds[none + mode]), time, predicted),
           -1, ""});
    }
    const std::string attention = kVariants[none].attention;
    all.push_back({"extra_time/" + attention + "/full", extra[2], Relation::at_least, 0.1,
                   "half the extra FLOPs: what costs nothing was not computed again", -1, ""});
    all.push_back({"extra_time/" + attention + "/selective", extra[1], Relation::at_most, 0.6 * extra[2],
                   "selective repeats no large product, full repeats most of them", -1, ""});
  }
  return all;
}

}  // namespace

std::vector<Property> recomputation_times(const RunContext& context, int rounds) {
  return extra_time(measure(context, rounds), context);
}

void add_recomputation_time_cases(CaseList& cases) {
  Case result;
  const PairInputs shown = timed_inputs(kVariants[2], {});
  result.suite = "recomputation";
  result.name = "recomputation/time";
  result.summary = "extra time of a step beside the extra FLOPs of its program";
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::convergence;
  result.timed = true;
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    evidence.properties = recomputation_times(context, kRounds);
    return evidence;
  };
  cases.push_back(std::move(result));
}

}  // namespace tandem
