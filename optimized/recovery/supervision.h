// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "optimized/recovery/run_accounting.h"
#include "optimized/recovery/supervisor.h"

/// The inside of supervise().
namespace tandem::supervision {

inline constexpr int kSignalStatus = 128, kKilled = 9;
[[nodiscard]] inline int status_of(const WorkerEnd& end) { return end.signal != 0 ? kSignalStatus + end.signal : end.status; }

/// Workers are never left behind, whatever throws.
class Running {
 public:
  explicit Running(std::unique_ptr<Worker> worker) : worker_(std::move(worker)) {}
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    try {
      kill();
    } catch (const Error&) {
      // Only where something else is on its way out already, which says more.
    }
  }

  [[nodiscard]] std::optional<WorkerEnd> poll() {
    std::optional<WorkerEnd> end = worker_ ? worker_->poll() : std::nullopt;
    if (end) worker_.reset();
    return end;
  }
  void terminate() { worker_->terminate(); }
  void kill() {
    if (const std::unique_ptr<Worker> worker = std::exchange(worker_, nullptr)) worker->kill();
  }

 private:
  std::unique_ptr<Worker> worker_;
};

/// How an attempt ended, and what is to be said of it where it failed.
struct Outcome {
  enum class Kind : std::uint8_t { ended, failed, stopped } kind = Kind::ended;
  WorkerEnd end;
  Incident incident;
  std::int64_t detected_ns = 0;
};

/// One run. Borrows everything.
class Supervision {
 public:
  Supervision(const SupervisorOptions& options, Launcher& launcher, HeartbeatSource& beats, IncidentLog& log,
              const std::atomic<bool>& stop, const std::function<void(const Incident&)>& say,
              const std::function<std::int64_t()>& clock_ns, const std::function<void(double)>& sleep)
      : options_(options),
        launcher_(launcher),
        beats_(beats),
        log_(log),
        stop_(stop),
        say_(say),
        clock_ns_(clock_ns),
        sleep_(sleep),
        detector_(options.detector),
        plan_(options.plan),
        poll_seconds_(std::clamp(options.detector.beat_seconds / 8, 0.001, 0.1)) {}

  SupervisorReport run();

 private:
  Outcome attempt();
  Outcome watch(Running& worker);
  void hear(std::int64_t now_ns);
  void learn_steps();
  void resumed(std::int64_t now_ns);
  std::vector<RankEvent> tell_changes(std::int64_t now_ns);
  Outcome ended(WorkerEnd end, const std::vector<RankEvent>& faults, std::int64_t now_ns) const;
  Outcome failed(const std::vector<RankEvent>& faults, std::int64_t now_ns) const;
  bool wait_out(double seconds, const std::function<bool()>& is_enough);
  WorkerEnd end_gently(Running& worker);
  bool is_over(const Outcome& outcome);
  bool restart(Outcome outcome);
  std::string shrink();
  void back_off();
  void close(SupervisorReport::End end, const char* kind, std::string what, bool said = false);
  void tell(Incident incident);

  const SupervisorOptions& options_;
  Launcher& launcher_;
  HeartbeatSource& beats_;
  IncidentLog& log_;
  const std::atomic<bool>& stop_;
  const std::function<void(const Incident&)>& say_;
  const std::function<std::int64_t()>& clock_ns_;
  const std::function<void(double)>& sleep_;
  FailureDetector detector_;
  TrainingPlan plan_;
  double poll_seconds_;

  // A failure that no step has followed yet.
  struct Unresolved {
    std::size_t incident = 0;
    std::int64_t detected_ns = 0;
  };
  RunAccounting accounting_;
  std::uint64_t number_ = 0;
  std::optional<std::int64_t> from_;
  int restarts_in_row_ = 0;
  std::vector<Unresolved> unresolved_;
  bool log_has_failed_ = false;
  SupervisorReport report_;
};

}  // namespace tandem::supervision
