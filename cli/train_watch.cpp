// SPDX-License-Identifier: Apache-2.0
#include "cli/train_watch.h"

#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "cli/live_view.h"
#include "harness/measurement.h"
#include "optimized/monitoring/sinks.h"
#include "optimized/recovery/fault_injector.h"
#include "optimized/recovery/heartbeat_channel.h"
#include "optimized/recovery/incident_log.h"

namespace tandem {
namespace {

std::string action_of(const AnomalyIncident& incident) {
  if (incident.repaired) return "retry";
  std::string text;
  if (incident.rolled_back_to) text = fmt::format("roll back to step {}", *incident.rolled_back_to);
  if (incident.skipped_batch) text += fmt::format("{}skip batch {}", text.empty() ? "" : ", ", *incident.skipped_batch);
  return text.empty() ? std::string(name(incident.decision)) : text;
}

Incident to_incident(const AnomalyIncident& anomaly, std::uint64_t attempt) {
  Incident incident;
  incident.kind = "anomaly";
  incident.what = anomaly.describe();
  if (!anomaly.findings.empty()) incident.rank = anomaly.findings.front().rank;
  incident.step = anomaly.step;
  incident.phase = name(RunPhase::train);
  incident.attempt = attempt;
  incident.action = action_of(anomaly);
  return incident;
}

void say_what_ends(const Fault& fault) {
  const bool hangs = fault.kind == FaultKind::hang;
  note(fmt::format("fault '{}': {}; with --supervise the run would be started again", to_string(fault),
                   hangs ? fmt::format("rank {} stands still from here on (Ctrl-C twice ends the program)", fault.rank)
                         : "kills this process now (signal 9)"));
}

void fill_shares(StepMetrics& metrics, const std::vector<Span>& spans) {
  const TimeSplit split = split_time(spans, 0, {});
  if (split.wall_ns <= 0) return;
  const auto wall = static_cast<double>(split.wall_ns);
  metrics.communication_share = static_cast<double>(split.communication_busy_ns) / wall;
  metrics.exposed_share = static_cast<double>(split.communication_exposed_ns) / wall;
  metrics.data_wait_share = static_cast<double>(split.data_ns) / wall;
}

}  // namespace

class TrainWatch::State {
 public:
  State(const TrainArguments& given, const Job& job) : arguments(given), leads(job.leads()) {
    const WorkerArguments& worker = given.worker;
    if (worker.heartbeat.empty()) return;
    board.emplace(std::max(1, worker.ranks));
    for (int rank = 0; rank < board->ranks(); ++rank) {
      if (job.processes() == 1 || job.rank() == rank) board->slot(rank).is_here = true;
    }
    sender = std::make_unique<HeartbeatSender>(parse_endpoint(worker.heartbeat), worker.attempt, given.heartbeat_seconds, *board);
  }

  void clear() {
    if (live) live->clear();
  }
  void open_sinks(const TrainPlan& plan);
  void make_faults(const TrainPlan& plan);
  void record(StepMetrics metrics, const std::vector<Span>& spans);
  void report(const AnomalyIncident& anomaly, const std::string& folder);

  const TrainArguments& arguments;
  bool leads;
  std::optional<ProgressBoard> board;
  std::unique_ptr<HeartbeatSender> sender;  // reads the board
  std::unique_ptr<FaultInjector> faults;    // may silence the sender
  std::unique_ptr<MetricsSinks> sinks;
  std::optional<LiveView> live;
  std::optional<IncidentLog> log;
};

void TrainWatch::State::open_sinks(const TrainPlan& plan) {
  MetricsSinkOptions options;
  options.jsonl = arguments.metrics;
  options.tensorboard = arguments.tensorboard;
  options.prometheus = arguments.prometheus;
  options.hardware_without_sinks = arguments.live;
  options.on_problem = [this](const std::string& problem) {
    clear();
    note(problem);
  };
  const bool is_supervised = board.has_value();
  if (is_supervised && options.jsonl.empty() && !plan.output.empty())
    options.jsonl = std::filesystem::path(plan.output) / "metrics.jsonl";
  if (arguments.live) {
    if (std::optional<LiveView::Options> view = live_view_of_terminal()) live.emplace(std::move(*view));
  }
  if (options.jsonl.empty() && options.tensorboard.empty() && options.prometheus.empty() && !live) return;
  sinks = std::make_unique<MetricsSinks>(std::move(options));
  if (!sinks->prometheus_url().empty()) fmt::print("metrics: {}\n", sinks->prometheus_url());
}

void TrainWatch::State::make_faults(const TrainPlan& plan) {
  if (plan.faults.empty()) return;
  FaultInjectorOptions options;
  options.faults = plan.faults;
  options.checkpoints = plan.output;
  options.supervisor_process = arguments.worker.supervisor_process;
  // A supervisor says what has become of its workers; nobody else does.
  if (!board) options.before_end = say_what_ends;
  if (sender) options.lose_beats = [this](std::int64_t beats) { sender->lose(beats); };
  if (!plan.output.empty()) {
    options.struck_file = struck_file(plan.output);
    // Who starts from the beginning by hand wants to see them again.
    std::error_code ignored;
    if (!board && !plan.resume && leads) std::filesystem::remove(options.struck_file, ignored);
  }
  faults = std::make_unique<FaultInjector>(std::move(options));
}

void TrainWatch::State::record(StepMetrics metrics, const std::vector<Span>& spans) {
  fill_shares(metrics, spans);
  sinks->record(metrics);
  if (live) live->show(metrics, sinks->hardware().get());
}

// A log that cannot be written is said, and no reason to end a run.
void TrainWatch::State::report(const AnomalyIncident& anomaly, const std::string& folder) {
  const std::string text = anomaly.describe();
  clear();
  fmt::print("incident: {}\n", text);
  std::fflush(stdout);
  if (sinks) sinks->incident(text);
  if (folder.empty()) return;
  try {
    if (!log) log.emplace(folder);
    log->append(to_incident(anomaly, arguments.worker.attempt));
  } catch (const IoError& error) {
    note(error.what());
  }
}

TrainWatch::TrainWatch(const TrainArguments& arguments, const Job& job) : state_(std::make_unique<State>(arguments, job)) {}
TrainWatch::~TrainWatch() = default;

void TrainWatch::enter(RunPhase phase) {
  if (!state_->board) return;
  for (int rank = 0; rank < state_->board->ranks(); ++rank) {
    if (state_->board->slot(rank).is_here) state_->board->slot(rank).enter(phase);
  }
}

void TrainWatch::attach(TrainOptions& options, const TrainPlan& plan) {
  State* const state = state_.get();
  const int ranks = plan.config.plan.parallel.world_size();
  if (state->board) {
    TANDEM_CHECK(state->board->ranks() >= ranks, fmt::format("{} of {} ranks are watched", state->board->ranks(), ranks));
    options.board = &*state->board;
  }
  options.attempt = state->arguments.worker.attempt;
  options.memory = plan.memory;
  state->make_faults(plan);
  options.faults = state->faults.get();
  if (!state->leads) return;
  state->open_sinks(plan);
  if (state->sinks) {
    options.on_metrics = [state](const StepMetrics& metrics, const std::vector<Span>& spans) { state->record(metrics, spans); };
  }
  options.on_incident = [state, folder = plan.output](const AnomalyIncident& anomaly) { state->report(anomaly, folder); };
}

bool TrainWatch::is_live() const noexcept { return state_->live.has_value(); }

void TrainWatch::clear() { state_->clear(); }

void TrainWatch::say(const std::string& line) {
  state_->clear();
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void TrainWatch::finish() {
  if (state_->live) state_->live->finish();
}

}  // namespace tandem
