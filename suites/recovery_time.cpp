// SPDX-License-Identifier: Apache-2.0
// What failures cost: the supervisor's account of a simulated run against the reference's, and both against Daly's formula.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/checkpoint_interval.h"
#include "core/rng.h"
#include "reference/recovery.h"
#include "suites/recovery_cases.h"

namespace tandem {
namespace {

// On which everything happens, looks of the supervisor too: a sixteenth of a second, so that sums of seconds are exact.
constexpr std::int64_t kGridNs = 62'500'000;

std::int64_t on_grid(double seconds) { return std::llround(seconds * 1e9 / static_cast<double>(kGridNs)) * kGridNs; }
double in_seconds(std::int64_t ns) { return static_cast<double>(ns) / 1e9; }

struct SimulatedCosts {
  std::int64_t step_ns = 0, save_ns = 0, restart_ns = 0;
  std::int64_t every_steps = 1, steps = 0;
};

// A job whose steps, saves and restarts take their time on a clock of its own, and which dies at given times.
class SimulatedJob final : public Launcher, public HeartbeatSource {
 public:
  SimulatedJob(const SimulatedCosts& costs, std::vector<std::int64_t> failures_ns)
      : costs_(costs), failures_ns_(std::move(failures_ns)) {}

  [[nodiscard]] std::int64_t now_ns() const { return now_ns_; }
  void sleep(double seconds) { now_ns_ += std::max(kGridNs, on_grid(seconds)); }

  std::unique_ptr<Worker> start(const Attempt& attempt) override {
    attempt_ = attempt.number;
    done_ = kept_;
    dead_ = false;
    saving_ = false;
    ready_ = false;
    next_ns_ = now_ns_ + (attempt.number == 0 ? 0 : costs_.restart_ns);
    if (attempt.number == 0) begin_next();
    return std::make_unique<SimulatedWorker>(*this);
  }
  std::optional<std::int64_t> newest_step() override { return kept_; }

  std::vector<Heartbeat> receive() override {
    advance();
    Heartbeat beat;
    beat.attempt = attempt_;
    beat.sequence = ++sequence_;
    beat.step = done_;
    beat.phase = !ready_ ? RunPhase::restore : saving_ ? RunPhase::checkpoint : RunPhase::train;
    beat.progress = static_cast<std::uint64_t>(events_);
    return {beat};
  }

 private:
  class SimulatedWorker final : public Worker {
   public:
    explicit SimulatedWorker(SimulatedJob& job) : job_(job) {}
    std::optional<WorkerEnd> poll() override {
      job_.advance();
      if (job_.dead_) return WorkerEnd{0, 9, "killed by signal 9"};
      if (job_.done_ == job_.costs_.steps) return WorkerEnd{0, 0, ""};
      return std::nullopt;
    }
    void terminate() override {}
    void kill() override {}

   private:
    SimulatedJob& job_;
  };

  // Everything up to now: what ends as a failure comes has ended.
  void advance() {
    while (!dead_ && done_ < costs_.steps) {
      const bool fails = failed_ < failures_ns_.size() && failures_ns_[failed_] < next_ns_;
      const std::int64_t event_ns = fails ? failures_ns_[failed_] : next_ns_;
      if (event_ns > now_ns_) return;
      ++events_;
      if (fails) {
        ++failed_;
        dead_ = true;
      } else {
        end_event();
      }
    }
  }

  void end_event() {
    if (!ready_) {
      begin_next();
    } else if (saving_) {
      kept_ = done_;
      saving_ = false;
      next_ns_ += costs_.step_ns;
    } else {
      ++done_;
      saving_ = done_ % costs_.every_steps == 0 && done_ < costs_.steps;
      next_ns_ += saving_ ? costs_.save_ns : costs_.step_ns;
    }
  }
  void begin_next() {
    ready_ = true;
    next_ns_ += costs_.step_ns;
  }

  SimulatedCosts costs_;
  std::vector<std::int64_t> failures_ns_;
  std::size_t failed_ = 0;
  std::int64_t now_ns_ = 0, next_ns_ = 0, done_ = 0, kept_ = 0, events_ = 0;
  std::uint64_t attempt_ = 0, sequence_ = 0;
  bool dead_ = false, saving_ = false, ready_ = false;
};

std::vector<std::int64_t> random_failures(const RunContext& context, double mean_seconds, double until_seconds) {
  CounterRng random(context.seed, "job failures");
  std::vector<std::int64_t> failures;
  for (double now = 0; now < until_seconds;) {
    now += -mean_seconds * std::log1p(-random.next_unit());
    failures.push_back(on_grid(now));
  }
  return failures;
}

struct SimulatedAccount {
  SupervisorReport report;
  reference::TimeLedger ledger;
};

SimulatedAccount simulate(const RunContext& context, const SimulatedCosts& costs, const std::vector<std::int64_t>& failures_ns) {
  SimulatedJob job(costs, failures_ns);
  SupervisorOptions options;
  options.detector.beat_seconds = 0.5;  // eight looks a beat
  options.detector.stall_seconds.fill(1e6);
  options.detector.pitfalls = options.pitfalls = context.pitfalls;
  options.backoff_seconds = options.longest_backoff_seconds = 0;
  options.max_restarts = 1000;
  IncidentLog log{std::filesystem::path()};
  const std::atomic<bool> stop{false};
  SimulatedAccount account;
  account.report = supervise(
      options, job, job, log, stop, {}, [&job] { return job.now_ns(); }, [&job](double seconds) { job.sleep(seconds); });
  std::vector<double> failures;
  failures.reserve(failures_ns.size());
  for (const std::int64_t ns : failures_ns) failures.push_back(in_seconds(ns));
  account.ledger = reference::account(
      {in_seconds(costs.step_ns), in_seconds(costs.save_ns), in_seconds(costs.restart_ns), costs.every_steps, costs.steps},
      failures);
  return account;
}

Case goodput_case() {
  Case result = recovery_case(
      "goodput", "a long simulated run with failures at random: lost steps and time by the ledger, goodput by Daly", {});
  result.execute = [](const RunContext& context) {
    CheckpointCosts model;
    model.save_seconds = 2;
    model.restart_seconds = 6;
    model.failure_seconds = 300;
    const auto interval = static_cast<std::int64_t>(std::lround(daly_interval_seconds(model)));
    const SimulatedCosts costs{on_grid(1), on_grid(model.save_seconds), on_grid(model.restart_seconds), interval, 50000};
    const SimulatedAccount account = simulate(context, costs, random_failures(context, model.failure_seconds, 200000));
    const SupervisorReport& report = account.report;
    const reference::TimeLedger& ledger = account.ledger;
    const double failures = ledger.failures;
    const double predicted = goodput(model, static_cast<double>(interval));
    // Beats see when a step has ended; of each failure, one step or save is on either side of a boundary.
    const double resolution = failures * (1 + model.save_seconds + in_seconds(kGridNs));
    const auto near = [&](const std::string& name, double value, double expected, double limit, const std::string& why) {
      return Property{name,
                      std::abs(value - expected),
                      Relation::at_most,
                      limit,
                      fmt::format("{:.6g} against {:.6g}: {}", value, expected, why),
                      -1,
                      ""};
    };
    CaseEvidence evidence;
    evidence.properties = {
        {"failures", static_cast<double>(report.failures), Relation::equal, failures, "the ledger's", -1, ""},
        {"enough_failures", failures, Relation::at_least, 150.0, "for a mean", -1, ""},
        {"lost_steps", static_cast<double>(report.lost_steps), Relation::equal, static_cast<double>(ledger.lost_steps),
         "the ledger's", -1, ""},
        near("wall_seconds", report.wall_seconds, ledger.wall_seconds, in_seconds(kGridNs), "one look"),
        near("down_seconds", report.down_seconds, ledger.down_seconds, failures * (1 + in_seconds(kGridNs)),
             "and the first step after each restart"),
        near("redone_seconds", report.redone_seconds, ledger.redone_seconds, resolution, "a step or save of each failure"),
        near("useful_seconds", report.useful_seconds, ledger.useful_seconds + ledger.save_seconds, resolution,
             "steps and saves that count, a step or save of each failure"),
        near("goodput", report.goodput(), (ledger.useful_seconds + ledger.save_seconds) / ledger.wall_seconds,
             resolution / ledger.wall_seconds, "with the saves"),
        near("goodput_of_the_ledger", ledger.goodput(), predicted, 4 * (1 - predicted) / std::sqrt(failures),
             fmt::format("Daly's model with a checkpoint every {} s; four standard errors of {:.0f} failures", interval,
                         failures))};
    return evidence;
  };
  return result;
}

}  // namespace

void add_recovery_time_cases(CaseList& cases) { cases.push_back(goodput_case()); }

}  // namespace tandem
