// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/config.h"
#include "optimized/recovery/failure_detector.h"
#include "optimized/recovery/heartbeat_channel.h"
#include "optimized/recovery/incident_log.h"

namespace tandem {

/// Exit status of workers whose end another attempt would only repeat: the run has given itself up, and said why.
inline constexpr int kHopelessStatus = 5;

/// How an attempt ended by itself.
struct WorkerEnd {
  int status = 0;         ///< exit status, as of the command line (0 good, 2 input, 4 broke, 130 interrupted); else below
  int signal = 0;         ///< that killed it; 0: none
  std::string what = {};  ///< one line: the last that it said, or "killed by signal 9"
  bool said = false;      ///< `what` are its own words, and stand in its output
};

/// The workers of one attempt: a process with all ranks as threads, or a launcher of many.
class Worker {
 public:
  virtual ~Worker() = default;
  /// Nothing while it runs. Does not wait.
  [[nodiscard]] virtual std::optional<WorkerEnd> poll() = 0;
  /// Asks it to save and to end (SIGTERM).
  virtual void terminate() = 0;
  /// Ends all of it at once, children of children too; returns when nothing is left.
  virtual void kill() = 0;
};

struct Attempt {
  std::uint64_t number = 0;
  bool resume = false;  ///< there may be something to go on from
  TrainingPlan plan;    ///< of this attempt: smaller than the run's after a shrink
};

class Launcher {
 public:
  virtual ~Launcher() = default;
  [[nodiscard]] virtual std::unique_ptr<Worker> start(const Attempt& attempt) = 0;
  /// Ranks whose place is gone for good, of those that the last attempt had; asked after it has ended.
  [[nodiscard]] virtual std::vector<int> lost_ranks() { return {}; }
  /// Steps done by the present or last attempt, where they are known from more than its beats, which see them coarsely.
  [[nodiscard]] virtual std::optional<std::int64_t> steps_done() { return {}; }
  /// Newest step that a restart would find now, over all tiers; nothing: the beginning.
  [[nodiscard]] virtual std::optional<std::int64_t> newest_step() = 0;
};

struct SupervisorOptions {
  DetectorOptions detector;
  TrainingPlan plan;  ///< of the first attempt
  GptConfig model;
  int max_restarts = 10;       ///< in a row without a new step that the run had not done before; beyond it the run is given up
  double backoff_seconds = 1;  ///< before the first restart in a row; doubled for each further one
  double longest_backoff_seconds = 60;
  double terminate_seconds = 60;  ///< that a worker has to save after terminate(), before it is killed
  bool shrink = false;            ///< go on with fewer ranks where places are lost
  int least_ranks = 1;
  bool replace_slow = false;  ///< restart where a straggler is found; else it is only said
  PitfallSet pitfalls = {};
};

struct SupervisorReport {
  enum class End : std::uint8_t { finished, interrupted, gave_up, bad_input } end = End::finished;
  int status = 0;   ///< exit status of the last attempt; 128 and the signal where one ended it, ours included
  std::string why;  ///< one line; empty where finished
  std::uint64_t attempts = 0;
  std::vector<Incident> incidents;
  double wall_seconds = 0;    ///< how the parts of it are told apart: run_accounting.h
  double down_seconds = 0;    ///< from each detection to the first new step after it
  double redone_seconds = 0;  ///< of steps that were done again
  double useful_seconds = 0;  ///< of steps that counted
  std::int64_t lost_steps = 0;
  int failures = 0;
  [[nodiscard]] double goodput() const { return wall_seconds > 0 ? useful_seconds / wall_seconds : 0; }
};

/// Runs attempts until one finishes: watches beats and the worker's end, ends what is left, logs, waits, starts again. Returns
/// when the run is over; never hangs on a worker, never leaves one behind. `stop`: asks the worker to save and to end, and
/// returns. `clock` and `sleep` are given so that tests take no time; empty: the real ones.
[[nodiscard]] SupervisorReport supervise(const SupervisorOptions& options, Launcher& launcher, HeartbeatSource& beats,
                                         IncidentLog& log, const std::atomic<bool>& stop,
                                         const std::function<void(const Incident&)>& say = {},
                                         const std::function<std::int64_t()>& clock_ns = {},
                                         const std::function<void(double seconds)>& sleep = {});

}  // namespace tandem
