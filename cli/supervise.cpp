// SPDX-License-Identifier: Apache-2.0
#include "cli/supervise.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "cli/output.h"
#include "cli/run_folder.h"
#include "cli/store_options.h"
#include "cli/supervise_workers.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/recovery/shrink.h"

namespace tandem {
namespace {

// Address of this machine that others reach it by: of the first network that is not its own.
std::string address_of_this_machine() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return "127.0.0.1";
  std::string found = "127.0.0.1";
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* const address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()) == nullptr) continue;
    found = text.data();
    break;
  }
  freeifaddrs(first);
  return found;
}

// The run's folder is --out, or that of the run that is resumed.
TrainArguments with_folder(TrainArguments arguments) {
  if (arguments.output.empty() && !arguments.resume.empty() &&
      !parse_step_folder_name(std::filesystem::path(arguments.resume).filename().string())) {
    arguments.output = arguments.resume;
  }
  if (arguments.output.empty()) throw InputError("--supervise: a run that is started again needs checkpoints; give --out");
  if (!arguments.resume.empty() && !arguments.config_file.empty())
    throw InputError("--resume continues with the configuration of the checkpoint; leave CONFIG.json out and use --set");
  return arguments;
}

// Where this command's run stands: its own checkpoints, if there are any, come before what it was told to begin with. Copies in
// memory are left to the workers; what they were made with is the same.
TrainPlan resolve_run(const TrainArguments& arguments) {
  TrainArguments first = arguments;
  first.world = {};
  first.uses_memory = false;
  TrainPlan here;
  here.output = arguments.output;
  here.store = open_store_from_environment(arguments.store);
  if (newest_saved_step_of(here)) {
    first.resume = arguments.output;
    first.config_file.clear();
  }
  TrainPlan plan = resolve(first, Job(WorldSettings()));
  plan.memory = memory_place(arguments);
  return plan;
}

SupervisorOptions supervisor_options(const TrainArguments& arguments, const TrainPlan& plan, int ranks_left) {
  const SuperviseArguments& given = arguments.supervise;
  SupervisorOptions options;
  options.detector.beat_seconds = arguments.heartbeat_seconds;
  for (const RunPhase phase : {RunPhase::start, RunPhase::data, RunPhase::evaluate, RunPhase::checkpoint})
    options.detector.stall_seconds[static_cast<std::size_t>(phase)] = given.stall_seconds;
  options.detector.stall_seconds[static_cast<std::size_t>(RunPhase::restore)] = given.restore_seconds;
  options.plan = plan.config.plan;
  options.model = plan.config.model;
  options.max_restarts = given.max_restarts;
  options.backoff_seconds = given.backoff_seconds;
  options.shrink = given.elastic;
  if (const int ranks = options.plan.parallel.world_size(); given.least_ranks > ranks) {
    throw InputError(fmt::format("--min-ranks {}: the plan has {} rank{}; it can only shrink", given.least_ranks, ranks,
                                 ranks == 1 ? "" : "s"));
  }
  options.least_ranks = given.least_ranks;
  options.replace_slow = given.replace_slow;
  if (!given.elastic || ranks_left >= options.plan.parallel.world_size()) return options;
  std::optional<TrainingPlan> smaller = shrink_plan(options.plan, options.model, ranks_left);
  if (!smaller || smaller->parallel.world_size() < given.least_ranks) {
    throw InputError(fmt::format("--elastic: {} ranks of this run are left, and there is no plan for so few{}", ranks_left,
                                 smaller ? fmt::format(" with at least {} (--min-ranks)", given.least_ranks) : ""));
  }
  options.plan = std::move(*smaller);
  options.detector.ranks = options.plan.parallel.world_size();
  return options;
}

void say(const Incident& incident) {
  // What a worker has said itself stands above already.
  if (incident.kind == "bad_input" || incident.kind == "gave_up") return;
  if (incident.action == "give up") return;  // said again with the reason for that
  const bool has_action = !incident.action.empty() && incident.action != "none";
  if (incident.said && !has_action) return;
  const char* const what = incident.said ? "the workers have ended with the reason above" : incident.what.c_str();
  note(fmt::format("supervisor: {}{}", what, has_action ? "; " + incident.action : ""));
}

// Those of the log that this supervisor and its workers have added.
std::vector<Incident> incidents_since(const std::string& folder, std::size_t count) {
  std::vector<Incident> incidents;
  try {
    incidents = read_incidents(folder);
  } catch (const InputError&) {
    return {};
  }
  incidents.erase(incidents.begin(), incidents.begin() + static_cast<std::ptrdiff_t>(std::min(count, incidents.size())));
  return incidents;
}

int finish(const TrainArguments& arguments, const SupervisedRun& run, const std::string& refusal) {
  using End = SupervisorReport::End;
  const SupervisorReport& report = run.report;
  if (report.end == End::bad_input) {
    if (!refusal.empty()) throw InputError(refusal);
    // Workers that refuse their input have said why.
    if (report.status != kBadInput) note(report.why);
    return kBadInput;
  }
  print_supervised(run);
  if (!arguments.json.empty()) write_output(arguments.json, supervised_json(run));
  switch (report.end) {
    case End::finished:
      if (run.newest_step >= run.steps) return kGood;
      note(fmt::format("the workers have ended without an error, but the newest checkpoint is of step {} of {}", run.newest_step,
                       run.steps));
      return kRunBroke;
    case End::interrupted:
      note(fmt::format("interrupted; the same command goes on from what was saved in {}", run.output));
      if (arguments.supervise.requeue) requeue_job();
      return kInterrupted;
    default:
      // Workers that gave themselves up have said so.
      if (report.status != kHopelessStatus) note(fmt::format("given up: {}", report.why));
      return kRunBroke;
  }
}

}  // namespace

int supervise_run(const TrainArguments& given, const std::atomic<bool>& stop) {
  const TrainArguments arguments = with_folder(given);
  std::signal(SIGPIPE, SIG_IGN);  // a reader who has seen enough is no reason to end a run, here and in the workers
  require_launcher(arguments);
  static_cast<void>(parse_faults(arguments.faults));
  require_writable(arguments.json, "--json");
  require_writable_folder(arguments.output, "--out");
  require_writable_metrics(arguments);
  const std::unique_ptr<RunGuardian> guardian = make_guardian(arguments);
  const std::string mark = run_mark(arguments.output);
  RunFolder folder(arguments.output, arguments.supervise.patience_seconds, stop, note);
  end_orphans(mark, arguments.supervise.patience_seconds, note);
  // What an earlier run has left in memory under this name is not this run's.
  const std::optional<MemoryTierPlace> memory = memory_place(arguments);
  if (memory && folder.first_ranks() == 0) clear_memory_tier(*memory);
  const TrainPlan plan = resolve_run(arguments);
  const std::optional<std::int64_t> newest = newest_step_of(plan);
  if (folder.first_ranks() == 0) folder.begin_with(plan.config.plan.parallel.world_size());
  if (newest) note(fmt::format("supervisor: the run in {} goes on from step {}", arguments.output, *newest));

  const int ranks_left = folder.first_ranks() - static_cast<int>(lost_ranks_of(plan).size());
  const SupervisorOptions options = supervisor_options(arguments, plan, ranks_left);
  const std::string host = has_own_launcher(arguments) ? address_of_this_machine() : "127.0.0.1";
  HeartbeatReceiver beats(host);
  RunLauncher launcher(arguments, plan, fmt::format("{}:{}", host, beats.port()), newest.has_value());
  const std::size_t before = incidents_since(arguments.output, 0).size();
  IncidentLog log(arguments.output);
  SupervisedRun run;
  const std::optional<std::size_t> steps_before = count_steps_in(metrics_file(arguments));
  run.report = supervise(options, launcher, beats, log, stop, say);
  count_steps(steps_behind(metrics_file(arguments), steps_before), run.report);
  run.incidents = incidents_since(arguments.output, before);
  run.output = arguments.output;
  run.newest_step = newest_step_of(plan).value_or(0);
  run.steps = plan.config.steps;
  run.checkpoint_every_steps = plan.config.checkpoint_every_steps;
  return finish(arguments, run, launcher.refusal());
}

void requeue_job() {
  const char* const job = std::getenv("SLURM_JOB_ID");
  if (job == nullptr || *job == '\0') return;
  std::string program = "scontrol", verb = "requeue", id = job;
  std::array<char*, 4> words = {program.data(), verb.data(), id.data(), nullptr};
  pid_t process = 0;
  int status = 0;
  const bool is_started = posix_spawnp(&process, program.c_str(), nullptr, nullptr, words.data(), environ) == 0;
  if (!is_started || waitpid(process, &status, 0) != process || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    note(fmt::format("scontrol requeue {} failed; put the job back into the queue by hand", id));
    return;
  }
  note(fmt::format("job {} is back in the queue", id));
}

}  // namespace tandem
