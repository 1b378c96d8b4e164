// SPDX-License-Identifier: Apache-2.0
#include "reference/recovery.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/batch.h"
#include "core/error.h"
#include "reference/data_parallel.h"
#include "reference/mixed_precision.h"

namespace tandem::reference {

ExecutionLedger execute(const FailureScript& script) {
  ExecutionLedger ledger;
  std::int64_t next = 0;
  for (std::size_t attempt = 0;; ++attempt) {
    ledger.begins.push_back(next);
    const bool fails = attempt < script.during.size();
    const std::int64_t end = fails ? script.during[attempt] : script.steps;
    TANDEM_CHECK(end >= next || fails, "an attempt ends behind its begin");
    for (std::int64_t step = next; step < end; ++step) ledger.steps.push_back({attempt, step, true});
    if (!fails) return ledger;
    const std::int64_t done = std::max(next, end);
    std::int64_t kept = 0;
    for (const RestartTier& tier : script.tiers) {
      if (!tier.outlives_failure) continue;
      const std::int64_t unusable = attempt < tier.unusable.size() ? tier.unusable[attempt] : 0;
      kept = std::max(kept, (done / tier.every_steps - unusable) * tier.every_steps);
    }
    for (ExecutedStep& executed : ledger.steps) {
      if (executed.step < kept || !executed.counts) continue;
      executed.counts = false;
      ++ledger.lost_steps;
    }
    next = kept;
  }
}

namespace {

// The clock of account(): things take their time, unless a failure comes first.
class FailingClock {
 public:
  explicit FailingClock(const std::vector<double>& failures) : failures_(failures) {}
  // Seconds that it took: all of them, or those until the failure that broke it off.
  double take(double seconds, bool& failed) {
    failed = next_ < failures_.size() && failures_[next_] < now_ + seconds;
    const double until = failed ? std::max(now_, failures_[next_]) : now_ + seconds;
    if (failed) ++next_;
    const double taken = until - now_;
    now_ = until;
    return taken;
  }
  [[nodiscard]] double now() const { return now_; }

 private:
  const std::vector<double>& failures_;
  std::size_t next_ = 0;
  double now_ = 0;
};

}  // namespace

TimeLedger account(const RunCosts& costs, const std::vector<double>& failure_seconds) {
  TimeLedger ledger;
  FailingClock clock(failure_seconds);
  std::int64_t done = 0;
  std::int64_t kept = 0;
  while (done < costs.steps) {
    bool failed = false;
    const double step = clock.take(costs.step_seconds, failed);
    if (failed) {
      ledger.broken_seconds += step;
    } else {
      ++done;
      if (done % costs.every_steps == 0 && done < costs.steps) {
        const double save = clock.take(costs.save_seconds, failed);
        (failed ? ledger.broken_seconds : ledger.save_seconds) += save;
        if (!failed) kept = done;
      }
    }
    if (!failed) continue;
    ++ledger.failures;
    ledger.lost_steps += done - kept;
    ledger.redone_seconds += static_cast<double>(done - kept) * costs.step_seconds;
    done = kept;
    for (bool again = true; again; ledger.failures += again ? 1 : 0) {
      ledger.down_seconds += clock.take(costs.restart_seconds, again);
    }
  }
  ledger.wall_seconds = clock.now();
  ledger.useful_seconds = static_cast<double>(costs.steps) * costs.step_seconds;
  return ledger;
}

std::vector<DealtSample> deal(std::int64_t rows, const std::vector<int>& ranks_of_step,
                              const std::vector<int>& micro_batches_of_step) {
  std::vector<DealtSample> dealt;
  // The first `total % parts` of the parts have one more.
  const auto size_of_part = [](std::int64_t total, std::int64_t parts, std::int64_t part) {
    return total / parts + (part < total % parts ? 1 : 0);
  };
  std::int64_t place = 0;
  for (std::size_t step = 0; step < ranks_of_step.size(); ++step) {
    for (int rank = 0; rank < ranks_of_step[step]; ++rank) {
      const std::int64_t own = size_of_part(rows, ranks_of_step[step], rank);
      for (int micro_batch = 0; micro_batch < micro_batches_of_step[step]; ++micro_batch) {
        const std::int64_t count = size_of_part(own, micro_batches_of_step[step], micro_batch);
        for (std::int64_t i = 0; i < count; ++i) {
          dealt.push_back({static_cast<std::int64_t>(step), rank, micro_batch, place++});
        }
      }
    }
  }
  return dealt;
}

int fewest_micro_batches(std::int64_t rows, int ranks, std::int64_t most_rows) {
  TANDEM_CHECK(most_rows > 0, "a micro-batch has rows");
  for (int micro_batches = 1;; ++micro_batches) {
    std::map<std::pair<int, int>, std::int64_t> rows_of;
    for (const DealtSample& sample : deal(rows, {ranks}, {micro_batches})) ++rows_of[{sample.rank, sample.micro_batch}];
    const bool fits = std::ranges::all_of(rows_of, [&](const auto& entry) { return entry.second <= most_rows; });
    if (fits) return micro_batches;
  }
}

template <class Real>
RunState<Real> initial_state(const TrainingRun& run) {
  return {0, initial_parameters<Real>(run.model, run.initialization, run.seed), initial_optimizer_state<Real>(run.model),
          LossScaler(run.loss_scale, run.numerics)};
}

template <class Real>
std::vector<double> go_on(const TrainingRun& run, RunState<Real>& state, std::int64_t until) {
  TANDEM_CHECK(!run.numerics.fp8, "the histories of fp8 are no part of this state");
  std::vector<double> losses;
  StepNumerics numerics{rounding_of(run.numerics), 1.0, run.numerics.accumulate, run.numerics.reduce};
  numerics.rounding.probabilities = run.materialized_attention;
  for (; state.next_step < until; ++state.next_step) {
    const DropoutStep dropout{run.seed, static_cast<std::uint32_t>(state.next_step)};
    numerics.loss_scale = state.scaler.scale();
    auto step = data_parallel_gradients<Real>(run.model, stored_parameters(run.numerics, state.parameters),
                                              run.batch(state.next_step), run.layout, dropout, numerics);
    losses.push_back(step.loss);
    const bool overflowed = !all_finite(step.gradients);
    if (!state.scaler.finish_step(overflowed)) continue;
    unscale(step.gradients, numerics.loss_scale);
    scale(step.gradients, clip_coefficient(global_norm(step.gradients), run.optimizer.max_grad_norm));
    const double rate = learning_rate(run.optimizer, run.schedule, state.optimizer.updates, run.steps);
    optimizer_step(run.model, run.optimizer, rate, step.gradients, state.parameters, state.optimizer);
    round_all(run.numerics.master, state.parameters);
  }
  return losses;
}

template RunState<float> initial_state(const TrainingRun&);
template RunState<double> initial_state(const TrainingRun&);
template std::vector<double> go_on(const TrainingRun&, RunState<float>&, std::int64_t);
template std::vector<double> go_on(const TrainingRun&, RunState<double>&, std::int64_t);

}  // namespace tandem::reference
