// SPDX-License-Identifier: Apache-2.0
// What prefetching is for: batches of a slow source are made while the step computes.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <fmt/format.h>

#include "optimized/comm/world.h"
#include "optimized/data_pipeline/prefetcher.h"
#include "optimized/data_pipeline/text_source.h"
#include "optimized/machine.h"
#include "suites/data_pipeline_cases.h"
#include "suites/one_step.h"
#include "suites/parallel_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

// Another source behind what each of its batches goes through first.
class Decorated final : public WrappedSource {
 public:
  Decorated(const BatchSource& source, std::function<void(std::int64_t step)> before)
      : WrappedSource(source), before_(std::move(before)) {}

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    before_(step);
    return inner().training_rows(step, global_rows, rows);
  }

 private:
  std::function<void(std::int64_t step)> before_;
};

// ---- ahead of the step

// Which steps the source has been asked for, and how to wait for one.
class Asked {
 public:
  void note(std::int64_t step) {
    const std::lock_guard lock(mutex_);
    newest_ = std::max(newest_, step);
    changed_.notify_all();
  }
  [[nodiscard]] bool comes(std::int64_t step, std::chrono::milliseconds deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, deadline, [&] { return newest_ >= step; });
  }
  [[nodiscard]] std::int64_t newest() {
    const std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t newest_ = -1;
};

// Without a clock: while a step computes, which is while nobody asks, the source is asked for those behind it.
Case ahead_case() {
  Case result =
      data_pipeline_case("prefetch/ahead", "the batches behind a step are made while it computes, and no more than these");
  result.execute = [](const RunContext& context) {
    constexpr std::int64_t kAhead = 3, kSteps = 12;
    constexpr std::chrono::milliseconds kDeadline{2000};
    const TextSource source(documents_of(skewed_lengths(50, 30, context.seed)), {.sequence = 8, .validation_fraction = 0}, {});
    Asked asked;
    const Decorated watched(source, [&](std::int64_t step) { asked.note(step); });
    double in_time = 0, too_far = 0, differ = 0;
    Prefetcher loader(
        watched,
        {.rows = 4, .first_step = 0, .last_step = kSteps, .batches = kAhead, .threads = 2, .pitfalls = context.pitfalls});
    for (std::int64_t step = 0; step < kSteps; ++step) {
      differ += same_batch(*loader.take(step), source.training_batch(step, 4)) ? 0 : 1;
      const std::int64_t last = std::min(step + kAhead, kSteps - 1);
      in_time += asked.comes(last, in_time == static_cast<double>(step) ? kDeadline : std::chrono::milliseconds(0)) ? 1 : 0;
      too_far += asked.newest() > last ? 1 : 0;
    }
    const PrefetchStatistics statistics = loader.statistics();
    return of_properties({exactly("steps_with_all_made_ahead", in_time, kSteps, "3 batches ahead, with nobody asking for them"),
                          exactly("steps_with_more", too_far, 0, "memory holds as many as were asked for"),
                          exactly("batches_made", static_cast<double>(statistics.made), kSteps, "each once"),
                          exactly("batches_that_differ", differ, 0, "prefetching changes when a batch is made, not what it is")});
  };
  return result;
}

// ---- in time

constexpr double kBatchSeconds = 0.008;  // of the slow source
constexpr double kStepSeconds = 0.012;   // of the step, asleep

struct TimedRun {
  std::vector<double> losses;
  double wait_share = 0;  ///< of the time of the steps
  double seconds = 0;
};

double asleep(const Operation& op) {
  return op.kind == OpKind::compute && op.part == Part::head_norm && op.phase == Phase::forward ? kStepSeconds : 0.0;
}

TimedRun timed_run(const PairInputs& inputs, const BatchSource& source, std::int64_t ahead, const RunContext& context) {
  constexpr std::int64_t kSteps = 25;
  TimedRun result;
  run_world({.ranks = 1}, [&](Communicator& comm) {
    const auto kernels = make_kernels(inputs.plan);
    Arena arena;
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}},
                  {inputs.model, inputs.plan, own_optimizer(inputs), inputs.schedule, kSteps, inputs.seed, asleep});
    engine.store().initialise(inputs.model, inputs.initialization, inputs.seed);
    Prefetcher loader(source, {.rows = inputs.plan.batch.rows,
                               .first_step = 0,
                               .last_step = kSteps,
                               .batches = ahead,
                               .threads = 1,
                               .pitfalls = context.pitfalls});
    // The first batch is waited for either way.
    std::shared_ptr<const Batch> batch = loader.take(0);
    const double before = loader.statistics().waited_seconds;
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t step = 0; step < kSteps; ++step) {
      if (step > 0) batch = loader.take(step);
      result.losses.push_back(engine.train_step(*batch, step).loss);
    }
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    result.wait_share = (loader.statistics().waited_seconds - before) / result.seconds;
  });
  return result;
}

Case hidden_case() {
  Case result = data_pipeline_case("prefetch/hidden",
                                   "a slow source and a step that takes longer: the share of a step spent waiting for "
                                   "data, prefetching and not; the same losses");
  result.timed = true;
  result.unavailable = [](const RunContext&) { return too_busy_to_time(); };
  const ParallelVariant variant{.layers = 1, .sgd_step_only = false};
  result.model = model_of(variant);
  result.plan = plan_of(variant);
  result.execute = [variant](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    const TextSource source(documents_of(skewed_lengths(80, 26, context.seed), inputs.model.vocabulary),
                            {.sequence = 17, .validation_fraction = 0, .seed = context.seed, .batching = Batching::bucketed}, {});
    const Decorated slow(source, [](std::int64_t) { std::this_thread::sleep_for(std::chrono::duration<double>(kBatchSeconds)); });
    const TimedRun without = timed_run(inputs, slow, 0, context);
    const TimedRun with = timed_run(inputs, slow, 2, context);
    double differ = 0;
    for (std::size_t i = 0; i < with.losses.size(); ++i) differ += with.losses[i] == without.losses[i] ? 0 : 1;
    const double expected = kBatchSeconds / (kBatchSeconds + kStepSeconds);
    return of_properties({exactly("losses_that_differ", differ, 0, "the same batches in the same order"),
                          {"data_wait_share without prefetching", without.wait_share, Relation::at_least, 0.5 * expected,
                           fmt::format("half of {2:.2f}: {0:.0f} ms for a batch, then {1:.0f} ms and the real work for the step",
                                       1e3 * kBatchSeconds, 1e3 * kStepSeconds, expected),
                           -1, ""},
                          {"data_wait_share with prefetching", with.wait_share, Relation::at_most, 0.05,
                           "a batch takes less time than a step: made by then; late wake-ups", -1, ""},
                          {"seconds_saved_a_step", (without.seconds - with.seconds) / static_cast<double>(with.losses.size()),
                           Relation::at_least, 0.5 * kBatchSeconds, "what a batch takes, once late wake-ups are off", -1, ""}});
  };
  return result;
}

}  // namespace

void add_data_pipeline_time_cases(CaseList& cases) {
  cases.push_back(ahead_case());
  cases.push_back(hidden_case());
}

}  // namespace tandem
