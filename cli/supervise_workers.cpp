// SPDX-License-Identifier: Apache-2.0
#include "cli/supervise_workers.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "core/timeline.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/tiers.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/monitoring/metrics_jsonl.h"
#include "optimized/recovery/fault_injector.h"

namespace tandem {
namespace {

constexpr const char* kSharedFiles = "/dev/shm/vader_segment.";  // of Open MPI

// Of this supervisor's workers, and not of those of the next one of the same run.
std::string supervisor_mark() {
  static const std::string mark = fmt::format("TANDEM_SUPERVISOR={}-{}", getpid(), Timeline::now_ns());
  return mark;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

std::optional<std::int64_t> newest_on_disk(const std::filesystem::path& folder, std::int64_t beyond) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) return std::nullopt;
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    if (entry.step <= beyond) return std::nullopt;
    if (!find_damage(entry.folder, VerifyDepth::contents)) return entry.step;
  }
  return std::nullopt;
}

// A copy in the store is verified when it is fetched.
std::optional<std::int64_t> newest_in_store(const TrainPlan& plan) {
  if (plan.store == nullptr) return std::nullopt;
  try {
    const std::vector<std::int64_t> steps = list_remote_checkpoints(*plan.store);
    return steps.empty() ? std::nullopt : std::optional(steps.front());
  } catch (const Error& error) {
    note(fmt::format("the store is passed over: {}", error.what()));
    return std::nullopt;
  }
}

ProcessLauncherOptions process_options(const TrainArguments& arguments) {
  ProcessLauncherOptions options;
  options.mark = run_mark(arguments.output);
  options.shared_files = kSharedFiles;
  options.environment = {supervisor_mark()};
  options.stop_signal = arguments.world.transport == "threads" && !has_own_launcher(arguments) ? SIGTERM : SIGUSR1;
  return options;
}

void add(std::vector<std::string>& words, const char* option, const std::string& value) {
  if (value.empty()) return;
  words.emplace_back(option);
  words.push_back(value);
}

}  // namespace

RunLauncher::RunLauncher(const TrainArguments& arguments, const TrainPlan& plan, std::string heartbeat, bool goes_on)
    : arguments_(arguments),
      plan_(plan),
      heartbeat_(std::move(heartbeat)),
      processes_([&] {
        ProcessLauncherOptions options = process_options(arguments);
        options.command = [this](const Attempt& attempt) { return command(attempt); };
        return options;
      }()),
      goes_on_(goes_on),
      known_lost_(lost_ranks_of(plan).size()) {}

std::unique_ptr<Worker> RunLauncher::start(const Attempt& attempt) {
  steps_before_ = count_steps_in(metrics_file(arguments_));
  try {
    return processes_.start(attempt);
  } catch (const Error& error) {
    refusal_ = error.what();
    throw;
  }
}

std::vector<int> RunLauncher::lost_ranks() {
  std::vector<int> lost = lost_ranks_of(plan_);
  lost.erase(lost.begin(), lost.begin() + static_cast<std::ptrdiff_t>(std::min(known_lost_, lost.size())));
  known_lost_ += lost.size();
  return lost;
}

std::optional<std::int64_t> RunLauncher::newest_step() {
  const std::optional<std::int64_t> step = newest_step_of(plan_);
  goes_on_ = step.has_value();
  return step;
}

// The last line of the present attempt: after a rollback it is not the highest.
std::optional<std::int64_t> RunLauncher::steps_done() {
  const std::vector<StepMetrics> steps = steps_behind(metrics_file(arguments_), steps_before_);
  return steps.empty() ? std::nullopt : std::optional(steps.back().step);
}

std::vector<std::string> RunLauncher::command(const Attempt& attempt) const {
  std::vector<std::string> words;
  const int ranks = attempt.plan.parallel.world_size();
  if (has_own_launcher(arguments_)) {
    words = words_of(arguments_.supervise.launcher);
  } else if (arguments_.world.transport != "threads") {
    words = {"mpirun", "-n", std::to_string(ranks)};
    // To mpirun the two threads of a core are one place.
    if (2 * static_cast<unsigned>(ranks) > std::thread::hardware_concurrency()) words.emplace_back("--oversubscribe");
  }
  words.push_back(std::filesystem::read_symlink("/proc/self/exe").string());
  words.emplace_back("train");
  if (goes_on_) {
    add(words, "--resume", arguments_.output);
  } else if (!arguments_.resume.empty()) {
    add(words, "--resume", arguments_.resume);
  } else if (!arguments_.config_file.empty()) {
    words.push_back(arguments_.config_file);
  }
  add_run_arguments(words);
  if (!(attempt.plan == plan_.config.plan)) {
    add(words, "--set", fmt::format("data={}", attempt.plan.parallel.data));
    add(words, "--set", fmt::format("micro_batches={}", attempt.plan.batch.micro_batches));
  }
  add(words, "--attempt", std::to_string(attempt.number));
  add(words, "--heartbeat", heartbeat_);
  add(words, "--heartbeat-seconds", fmt::format("{}", arguments_.heartbeat_seconds));
  add(words, "--heartbeat-ranks", std::to_string(ranks));
  add(words, "--supervisor-process", std::to_string(getpid()));
  return words;
}

void RunLauncher::add_run_arguments(std::vector<std::string>& words) const {
  const TrainArguments& from = arguments_;
  add(words, "--data", from.data);
  add(words, "--data-cache", from.cache.folder);
  add(words, "--data-cache-gib", fmt::format("{}", from.cache.gib));
  if (from.steps > 0) add(words, "--steps", std::to_string(from.steps));
  for (const std::string& setting : from.settings) add(words, "--set", setting);
  add(words, "--out", from.output);
  add(words, "--store", from.store);
  add(words, "--trace", from.trace);
  add(words, "--backend", from.backend);
  add(words, "--transport", from.world.transport);
  add(words, "--link", from.world.link);
  add(words, "--algorithm", from.world.algorithm);
  if (from.world.adversary) add(words, "--adversary", std::to_string(*from.world.adversary));
  if (from.world.deadline_seconds > 0) add(words, "--deadline", fmt::format("{}", from.world.deadline_seconds));
  for (const std::string& fault : from.faults) add(words, "--fault", fault);
  if (plan_.memory) add(words, "--memory-tier", plan_.memory->folder.string());
  if (from.ranks_per_node > 0) add(words, "--ranks-per-node", std::to_string(from.ranks_per_node));
  add(words, "--metrics", from.metrics);
  add(words, "--tensorboard", from.tensorboard);
  add(words, "--prometheus", from.prometheus);
  if (from.live) words.emplace_back("--live");
}

std::unique_ptr<RunGuardian> make_guardian(const TrainArguments& arguments) {
  ::unsetenv("TANDEM_SUPERVISOR");  // of a supervisor that this one is a worker of
  constexpr double kSaving = 3;     // as long as a worker may save that its supervisor has asked to stop
  return std::make_unique<RunGuardian>(supervisor_mark(), kSaving * arguments.supervise.patience_seconds, kSharedFiles);
}

std::string run_mark(const std::string& output) {
  const std::string name = std::filesystem::weakly_canonical(std::filesystem::absolute(output)).string();
  return "TANDEM_RUN=" + to_hex(hash64(std::as_bytes(std::span(name))));
}

std::string metrics_file(const TrainArguments& arguments) {
  return arguments.metrics.empty() ? (std::filesystem::path(arguments.output) / "metrics.jsonl").string() : arguments.metrics;
}

std::optional<std::size_t> count_steps_in(const std::string& file) {
  std::error_code unknown;
  const bool is_missing = !std::filesystem::exists(file, unknown) && !unknown;
  if (is_missing) return 0;
  try {
    return read_metrics(file).steps.size();
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<StepMetrics> steps_behind(const std::string& file, std::optional<std::size_t> count) {
  if (!count) return {};  // which of them are new is not known
  std::vector<StepMetrics> steps;
  try {
    steps = read_metrics(file).steps;
  } catch (const Error&) {
    return {};  // none were written, or the file is not ours
  }
  steps.erase(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(std::min(*count, steps.size())));
  return steps;
}

std::optional<std::int64_t> newest_step_of(const TrainPlan& plan) {
  const std::optional<std::int64_t> in_memory = plan.memory ? newest_in_memory(*plan.memory) : std::nullopt;
  const std::optional<std::int64_t> elsewhere = newest_saved_step_of(plan, in_memory.value_or(-1));
  return elsewhere ? elsewhere : in_memory;
}

std::optional<std::int64_t> newest_saved_step_of(const TrainPlan& plan, std::int64_t beyond) {
  std::optional<std::int64_t> stored = newest_in_store(plan);
  if (stored && *stored <= beyond) stored.reset();
  const std::optional<std::int64_t> on_disk = newest_on_disk(plan.output, stored.value_or(beyond));
  return on_disk ? on_disk : stored;
}

std::vector<int> lost_ranks_of(const TrainPlan& plan) {
  FaultInjectorOptions options;
  options.faults = plan.faults;
  options.struck_file = struck_file(plan.output);
  return FaultInjector(std::move(options)).lost_ranks();
}

bool has_own_launcher(const TrainArguments& arguments) { return !arguments.supervise.launcher.empty(); }

void require_launcher(const TrainArguments& arguments) {
  if (arguments.world.transport == "threads" || has_own_launcher(arguments) || has_mpi()) return;
  throw InputError(
      fmt::format("--transport {} --supervise: this build has no MPI for mpirun to start the workers; give --launcher",
                  arguments.world.transport));
}

}  // namespace tandem
