// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/supervisor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "optimized/recovery/shrink.h"
#include "optimized/recovery/supervision.h"

namespace tandem {
namespace supervision {
namespace {

constexpr int kInputStatus = 2, kBrokenStatus = 4, kInterruptedStatus = 130;

}  // namespace

SupervisorReport Supervision::run() {
  const std::int64_t begin_ns = clock_ns_();
  for (;;) {
    if (stop_) {
      report_.status = kInterruptedStatus;
      close(SupervisorReport::End::interrupted, "preempted", "asked to stop while no worker was running");
      break;
    }
    Outcome outcome = attempt();
    const bool is_done = is_over(outcome) || !restart(std::move(outcome));
    if (is_done) break;
  }
  const std::int64_t end_ns = clock_ns_();
  accounting_.finish(end_ns);
  report_.wall_seconds = static_cast<double>(end_ns - begin_ns) / 1e9;
  report_.down_seconds = accounting_.down_seconds();
  report_.redone_seconds = accounting_.redone_seconds();
  report_.useful_seconds = accounting_.useful_seconds();
  return std::move(report_);
}

Outcome Supervision::attempt() {
  ++report_.attempts;
  std::unique_ptr<Worker> started;
  std::optional<WorkerEnd> refused;
  try {
    started = launcher_.start({.number = number_, .resume = number_ > 0, .plan = plan_});
  } catch (const InputError& error) {
    refused = {.status = kInputStatus, .what = error.what()};
  } catch (const IoError& error) {
    refused = {.status = kBrokenStatus, .what = error.what()};
  }
  Running worker(std::move(started));
  const std::int64_t now_ns = clock_ns_();
  detector_.begin_attempt(number_, plan_.parallel.world_size(), now_ns);
  accounting_.begin_attempt(number_, from_, now_ns);
  return refused ? ended(std::move(*refused), {}, now_ns) : watch(worker);
}

Outcome Supervision::watch(Running& worker) {
  for (;;) {
    const std::int64_t now_ns = clock_ns_();
    hear(now_ns);
    const std::vector<RankEvent> faults = tell_changes(now_ns);
    if (std::optional<WorkerEnd> end = worker.poll()) {
      // Its last beats may have come just before its end.
      hear(now_ns);
      learn_steps();
      return ended(std::move(*end), faults, now_ns);
    }
    if (!faults.empty()) {
      learn_steps();
      Outcome outcome = failed(faults, now_ns);
      // A straggler can still save, so that nothing that it has done is lost; perhaps it even finishes meanwhile.
      if (faults.front().state == RankState::slow) {
        outcome.end = end_gently(worker);
        if (status_of(outcome.end) == 0) outcome.kind = Outcome::Kind::ended;
      } else {
        worker.kill();
      }
      return outcome;
    }
    if (stop_) {
      Outcome outcome;
      outcome.end = end_gently(worker);
      if (status_of(outcome.end) != 0) outcome.kind = Outcome::Kind::stopped;
      return outcome;
    }
    sleep_(poll_seconds_);
  }
}

void Supervision::hear(std::int64_t now_ns) {
  bool has_first_step = false;
  for (const Heartbeat& beat : beats_.receive()) {
    detector_.hear(beat, now_ns);
    has_first_step = accounting_.hear(beat, now_ns) || has_first_step;
  }
  if (has_first_step && !unresolved_.empty()) resumed(now_ns);
}

void Supervision::learn_steps() {
  if (const std::optional<std::int64_t> steps = launcher_.steps_done()) accounting_.learn(*steps);
}

// False as soon as `is_enough`, asked each time that it looks. Counts what it sleeps, so that it ends with any clock.
bool Supervision::wait_out(double seconds, const std::function<bool()>& is_enough) {
  const auto looks = static_cast<std::int64_t>(std::ceil(seconds / poll_seconds_));
  for (std::int64_t look = 0; look < looks; ++look) {
    if (is_enough()) return false;
    sleep_(std::min(poll_seconds_, seconds - static_cast<double>(look) * poll_seconds_));
  }
  return true;
}

WorkerEnd Supervision::end_gently(Running& worker) {
  worker.terminate();
  std::optional<WorkerEnd> end;
  const auto has_ended = [&] {
    hear(clock_ns_());
    end = worker.poll();
    return end.has_value();
  };
  if (!wait_out(options_.terminate_seconds, has_ended)) return std::move(*end);
  worker.kill();
  return {.signal = kKilled, .what = fmt::format("the workers did not end within {:.3g} s: killed", options_.terminate_seconds)};
}

bool Supervision::is_over(const Outcome& outcome) {
  report_.status = status_of(outcome.end);
  if (outcome.kind == Outcome::Kind::failed) return false;
  using End = SupervisorReport::End;
  if (outcome.kind == Outcome::Kind::stopped) {
    close(End::interrupted, "preempted", "asked to stop: " + outcome.end.what, outcome.end.said);
  } else if (report_.status == 0) {
    close(End::finished, "finished",
          fmt::format("finished after {} attempt{}", report_.attempts, report_.attempts == 1 ? "" : "s"));
  } else if (report_.status == kInterruptedStatus) {
    close(End::interrupted, "preempted", outcome.end.what, outcome.end.said);
  } else if (report_.status == kHopelessStatus) {
    close(End::gave_up, "gave_up", outcome.end.what);
  } else if (report_.status == kInputStatus && number_ == 0) {
    close(End::bad_input, "bad_input", outcome.end.what);
  } else if (number_ == 0 && outcome.end.signal == 0 && report_.status != kBrokenStatus && !detector_.steps_done()) {
    // Nothing was heard of any rank: what starts them does not work, and will not the next time either.
    close(End::bad_input, "bad_input", fmt::format("no rank was started: {}", outcome.end.what));
  } else {
    return false;
  }
  return true;
}

// False: the run is given up.
bool Supervision::restart(Outcome outcome) {
  ++report_.failures;
  if (accounting_.has_new_step()) restarts_in_row_ = 0;
  accounting_.end_attempt();
  accounting_.failed(outcome.detected_ns);
  std::string refusal;
  if (restarts_in_row_ >= options_.max_restarts) {
    refusal = fmt::format("{} restart{} in a row without a new step", restarts_in_row_, restarts_in_row_ == 1 ? "" : "s");
  }
  const int ranks = plan_.parallel.world_size();
  if (refusal.empty()) refusal = shrink();
  std::string& action = outcome.incident.action;
  action = "give up";
  if (refusal.empty()) {
    from_ = launcher_.newest_step().value_or(0);
    const int ranks_now = plan_.parallel.world_size();
    action = ranks_now == ranks ? "restart" : fmt::format("shrink to {} ranks, restart", ranks_now);
    action += *from_ > 0 ? fmt::format(" from step {}", *from_) : " from the beginning";
  }
  unresolved_.push_back({.incident = report_.incidents.size(), .detected_ns = outcome.detected_ns});
  const std::string what = outcome.incident.what;
  tell(std::move(outcome.incident));
  if (!refusal.empty()) {
    close(SupervisorReport::End::gave_up, "gave_up", fmt::format("{}; the last failure: {}", refusal, what));
    return false;
  }
  ++restarts_in_row_;
  ++number_;
  back_off();
  return true;
}

// Makes the plan that of the ranks that are left, where some are lost for good. Returns why that cannot be; empty: it can.
std::string Supervision::shrink() {
  const std::vector<int> lost = launcher_.lost_ranks();
  if (lost.empty() || !options_.shrink) return {};
  const int ranks = plan_.parallel.world_size() - static_cast<int>(lost.size());
  std::optional<TrainingPlan> smaller;
  if (ranks > 0) smaller = shrink_plan(plan_, options_.model, ranks, options_.pitfalls);
  if (!smaller) return fmt::format("no plan for the {} ranks that are left", ranks);
  if (smaller->parallel.world_size() < options_.least_ranks) {
    return fmt::format("a plan for the {} ranks that are left has {}, and there must be {}", ranks,
                       smaller->parallel.world_size(), options_.least_ranks);
  }
  plan_ = std::move(*smaller);
  return {};
}

void Supervision::back_off() {
  const double doubled = options_.backoff_seconds * std::exp2(std::min(restarts_in_row_ - 1, 60));
  wait_out(std::min(options_.longest_backoff_seconds, doubled), [this] { return stop_.load(); });
}

}  // namespace supervision

SupervisorReport supervise(const SupervisorOptions& options, Launcher& launcher, HeartbeatSource& beats, IncidentLog& log,
                           const std::atomic<bool>& stop, const std::function<void(const Incident&)>& say,
                           const std::function<std::int64_t()>& clock_ns, const std::function<void(double seconds)>& sleep) {
  const std::function<std::int64_t()> clock = clock_ns ? clock_ns : Timeline::now_ns;
  const std::function<void(double)> pause =
      sleep ? sleep : [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
  return supervision::Supervision(options, launcher, beats, log, stop, say, clock, pause).run();
}

}  // namespace tandem
