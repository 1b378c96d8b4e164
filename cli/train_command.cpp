// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/job.h"
#include "cli/output.h"
#include "cli/replay.h"
#include "cli/supervise.h"
#include "cli/terminal.h"
#include "cli/train_options.h"
#include "cli/train_report.h"
#include "cli/train_watch.h"
#include "core/synthetic_corpus.h"
#include "harness/chrome_trace.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/tiers.h"
#include "optimized/comm/nccl/nccl_world.h"
#include "optimized/comm/run_threads.h"
#include "optimized/machine.h"
#include "optimized/training/trainer.h"
#include "suites/pair.h"

namespace tandem {
namespace {

void print_header(const RunConfig& config, const BatchSource& source) {
  fmt::print("model: {:.2f} M parameters, {} layers, hidden {}, {} heads, vocabulary {}, sequence {}\n",
             static_cast<double>(num_parameters(config.model)) * 1e-6, config.model.layers, config.model.hidden,
             config.model.heads, config.model.vocabulary, config.model.sequence);
  fmt::print("plan:  {} rank(s) ({}) x {} thread(s), {} rows in {} micro-batch(es), {}\n", config.plan.parallel.world_size(),
             describe_layout(config.plan), config.plan.threads_per_rank, config.plan.batch.rows, config.plan.batch.micro_batches,
             config.plan.precision);
  fmt::print("data:  {}\n", source.describe());
}

void print_floor(const TrainReport& report, const BatchSource& source) {
  const auto* corpus = dynamic_cast<const SyntheticCorpus*>(&source);
  if (corpus == nullptr || report.validation_losses.empty() || !std::isfinite(report.validation_losses.back().second)) return;
  fmt::print("entropy rate of the source: {:.4f} nats; the validation loss is {:+.2f} % from this floor\n",
             corpus->entropy_rate_nats(), 100 * (report.validation_losses.back().second / corpus->entropy_rate_nats() - 1));
}

// `skipped`: steps so far.
std::string describe_step(std::int64_t step, const StepResult& result, double step_seconds, bool scaled, std::int64_t skipped) {
  std::string text =
      fmt::format("step {:>6}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:.0f} tokens/s", step + 1, result.loss,
                  std::abs(result.gradient_norm), result.learning_rate, static_cast<double>(result.valid_tokens) / step_seconds);
  if (scaled) text += fmt::format("  scale {:.12g}", result.loss_scale);
  if (skipped > 0) text += fmt::format("  {} skipped", skipped);
  return text;
}

// A run that ended but trained nothing that is of use.
std::optional<std::string> what_broke(const TrainReport& report) {
  // A step that was left out has cost nothing, and what the last ones say is what there is.
  constexpr std::int64_t kNever = -1;
  std::int64_t since = kNever;
  for (std::size_t i = 0; i < report.steps.size(); ++i) {
    const StepResult& step = report.steps[i];
    if (step.skipped) continue;
    if (std::isfinite(step.loss)) since = kNever;
    if (!std::isfinite(step.loss) && since == kNever) since = report.first_step + static_cast<std::int64_t>(i) + 1;
  }
  if (since != kNever) {
    return fmt::format(
        "the loss is not finite from step {} on; go back to a checkpoint before it, or start lower (learning_rate)", since);
  }
  const auto applied = std::count_if(report.steps.begin(), report.steps.end(), [](const StepResult& s) { return !s.skipped; });
  if (applied > 0 || report.steps.size() < 10) return std::nullopt;
  return fmt::format("no step of {} was applied: every gradient overflowed; lower loss_scale_initial", report.steps.size());
}

// Each is told with the next step, or at the end: then that of the last checkpoint is told once, with what to do.
class CheckpointProblems {
 public:
  CheckpointProblems() = default;
  CheckpointProblems(const CheckpointProblems&) = delete;
  CheckpointProblems& operator=(const CheckpointProblems&) = delete;
  ~CheckpointProblems() { tell(); }

  void add(const std::string& problem) { untold_.push_back(problem); }
  void tell() {
    for (const std::string& problem : std::exchange(untold_, {})) note(problem);
  }
  void tell_but(const std::string& last) {
    std::erase(untold_, last);
    tell();
  }
  [[nodiscard]] bool empty() const noexcept { return untold_.empty(); }

 private:
  std::vector<std::string> untold_;
};

// A supervisor goes on by itself, and what the store has not got lies in the folder.
std::string what_to_do(const TrainArguments& arguments, const TrainPlan& plan, const TrainReport& report) {
  const std::int64_t done = report.first_step + static_cast<std::int64_t>(report.steps.size());
  const auto newest = parse_step_folder_name(report.checkpoint.filename().string());
  if (!arguments.worker.heartbeat.empty() || newest == done) return {};
  if (!newest) return "; no step is saved: mend this, and start again";
  return fmt::format("; step {} is saved: mend this, and go on from it with --resume {}", *newest, plan.output);
}

// Why a run that was told to end itself did so.
std::string why_given_up(const TrainReport& report) {
  return report.incidents.empty() ? "a step is not as it should be" : report.incidents.back().describe();
}

int interrupted(const TrainArguments& arguments, const TrainPlan& plan, const TrainReport& report) {
  note(fmt::format("interrupted after step {}{}", report.first_step + static_cast<std::int64_t>(report.steps.size()),
                   report.checkpoint.empty() ? "; nothing was saved (no --out)" : "; continue with --resume " + plan.output));
  if (arguments.supervise.requeue && !report.checkpoint.empty()) requeue_job();
  return kInterrupted;
}

// After the run, whose memory is free again, on a card that is as warm as it was.
std::optional<GpuPeaks> gpu_peaks(const TrainArguments& arguments) {
  try {
    return measure_gpus(arguments.backend, arguments.world.transport);
  } catch (const Error& error) {
    note(fmt::format("the GPU's peak was not measured: {}", error.what()));
    return std::nullopt;
  }
}

// An attempt before this one may have ended with its last checkpoint on this disk alone.
int nothing_to_do(const TrainPlan& plan, const TrainReport& report) {
  fmt::print("nothing to do: the checkpoint is at step {} of {} (--steps)\n", report.first_step, plan.config.steps);
  if (plan.store == nullptr || !plan.resume || plan.resume->parent_path() != std::filesystem::path(plan.output)) return kGood;
  try {
    const std::vector<std::int64_t> stored = list_remote_checkpoints(*plan.store);
    if (std::ranges::find(stored, report.first_step) != stored.end()) return kGood;
    upload_checkpoint(*plan.store, *plan.resume);
    fmt::print("it was not in {}, and is now\n", plan.store->describe());
    return kGood;
  } catch (const Error& error) {
    note(fmt::format("the last checkpoint is not safe: it was not uploaded: {}; it is complete in {}; mend this, and start again",
                     error.what(), plan.resume->string()));
    return kRunBroke;
  }
}

// What is left to say and to keep when the steps are done.
int finish(const TrainArguments& arguments, const TrainPlan& plan, const BatchSource& source, const TrainReport& report,
           CheckpointProblems& problems) {
  if (report.gave_up) {
    note("given up: " + why_given_up(report));
    return arguments.worker.heartbeat.empty() ? kRunBroke : kHopelessStatus;
  }
  if (report.steps.empty()) return nothing_to_do(plan, report);
  TrainSummary summary = summarise_training(report, plan.config, source.sequence());
  if (const std::optional<GpuPeaks> peaks = gpu_peaks(arguments)) summary.peak_flops_per_second = peaks->of(plan.config.plan);
  print_train_summary(report, summary);
  for (const std::string& text : report.kernels.notes) fmt::print("note: {}\n", text);
  print_floor(report, source);
  if (!report.checkpoint.empty()) fmt::print("checkpoint: {}\n", report.checkpoint.string());
  if (!arguments.trace.empty()) write_chrome_trace(arguments.trace, report.spans_by_rank);
  if (!arguments.json.empty()) write_output(arguments.json, train_report_json(report, summary, plan.config, plan.data));
  if (report.last_checkpoint_failed && !report.checkpoint_problems.empty()) {
    problems.tell_but(report.checkpoint_problems.back());
    note(fmt::format("the last checkpoint is not safe: {}{}", report.checkpoint_problems.back(),
                     what_to_do(arguments, plan, report)));
    return kRunBroke;
  }
  problems.tell();
  if (const std::optional<std::string> broken = what_broke(report)) {
    note(*broken);
    return kRunBroke;
  }
  return report.interrupted ? interrupted(arguments, plan, report) : kGood;
}

void require_processes(const TrainingPlan& plan, const WorldSettings& world, const Job& job) {
  if (world.transport == "threads" || plan.parallel.world_size() <= job.processes()) return;
  throw InputError(
      fmt::format("the plan has {0} ranks, but the job has {1} process{2}; start it with mpirun -n {0}, or lower a degree of the "
                  "plan (--set data, tensor, pipeline or context)",
                  plan.parallel.world_size(), job.processes(), job.processes() == 1 ? "" : "es"));
}

// A run that has shrunk leaves them on purpose.
void say_who_is_idle(const TrainArguments& arguments, const TrainingPlan& plan, const Job& job) {
  const int ranks = plan.parallel.world_size(), idle = job.processes() - ranks;
  if (arguments.world.transport == "threads" || idle <= 0 || arguments.worker.attempt > 0 || !job.leads()) return;
  note(
      fmt::format("the job has {} processes, the plan {} rank{}: {} of them {} nothing to do; raise a degree of the plan (--set "
                  "data), or start fewer",
                  job.processes(), ranks, ranks == 1 ? "" : "s", idle, idle == 1 ? "has" : "have"));
}

// What has been kept in memory is of another run where this one begins.
void clear_old_memory(const TrainPlan& plan, const Job& job) {
  if (!plan.memory || plan.resume) return;
  const int ranks_per_node = plan.memory->ranks_per_node;
  if (job.leads() || (ranks_per_node > 0 && job.rank() % ranks_per_node == 0)) clear_memory_tier(*plan.memory);
  static_cast<void>(job.of_leader(std::string()));  // nobody saves before it is gone
}

void add_reports(TrainOptions& options, TrainWatch& watch, ProgressLine& progress, const TrainPlan& plan,
                 CheckpointProblems& problems) {
  const std::int64_t total = plan.config.steps;
  const std::int64_t every = std::max<std::int64_t>(1, total / 20);
  options.on_step = [&, total, every, skipped = std::int64_t{0}](std::int64_t step, const StepResult& result,
                                                                 double step_seconds) mutable {
    skipped += result.skipped ? 1 : 0;
    if (!problems.empty()) {
      progress.clear();
      watch.clear();
      problems.tell();
    }
    if (watch.is_live()) return;
    progress.show(step + 1, total, fmt::format("loss {:.4f}", result.loss));
    if (step != 0 && (step + 1) % every != 0 && step + 1 != total) return;
    progress.clear();
    watch.say(describe_step(step, result, step_seconds, scales_loss(plan.config.plan), skipped));
  };
  options.on_evaluation = [&](std::int64_t done, double loss) {
    progress.clear();
    watch.say(fmt::format("step {:>6}  validation loss {:.4f}", done, loss));
  };
  options.on_checkpoint_problem = [&](const std::string& problem) { problems.add(problem); };
}

// A thread that hangs cannot be ended, and what it has of the run cannot be had without it.
void end_at_once(const std::string& reason) {
  note(reason);
  _exit(kRunBroke);
}

int train_here(const TrainArguments& arguments, const std::atomic<bool>& stop) {
  on_hung_rank(end_at_once);
  if (!arguments.worker.heartbeat.empty()) std::signal(SIGPIPE, SIG_IGN);  // whoever reads, it is not for them that we train
  const WorldSettings world = to_world_settings(arguments.world, arguments.backend);
  const Job job(world);
  TrainWatch watch(arguments, job);
  if (!arguments.resume.empty()) watch.enter(RunPhase::restore);
  const TrainPlan plan = resolve(arguments, job);
  DataCache cache = arguments.cache;
  const std::unique_ptr<BatchSource> source = open_data(plan.data, plan.config, cache);
  require_processes(plan.config.plan, world, job);
  say_who_is_idle(arguments, plan.config.plan, job);
  job.on_leader([&] {
    require_writable(arguments.trace, "--trace");
    require_writable(arguments.json, "--json");
    require_writable_folder(plan.output, "--out");
    require_writable_metrics(arguments);
    print_header(plan.config, *source);
    if (world != WorldSettings()) fmt::print("world: {}\n", world.describe());
    if (world.transport == "nccl") fmt::print("note:  {}\n", nccl_description());
    std::fflush(stdout);
  });
  clear_old_memory(plan, job);
  CheckpointProblems problems;
  ProgressLine progress;
  TrainOptions options;
  options.config = plan.config;
  options.data = source.get();
  options.data_name = plan.data;
  options.output = plan.output;
  options.store = plan.store;
  options.data_may_change = !arguments.data.empty();
  options.resume = plan.resume;
  options.stop = &stop;
  options.world = world;
  options.backend = arguments.backend;
  options.device = device_of(world.transport);
  if (!arguments.trace.empty()) options.kept_spans = 0;
  watch.attach(options, plan);
  add_reports(options, watch, progress, plan, problems);
  const TrainReport report = train(options);
  progress.clear();
  watch.finish();
  if (cache.tokens && job.leads()) fmt::print("{}\n", describe(cache.tokens->cache_counts()));
  return job.agree_on_status(job.leads() ? finish(arguments, plan, *source, report, problems) : kGood);
}

int train_action(const TrainArguments& arguments, const std::atomic<bool>& stop) {
  static_cast<void>(to_world_settings(arguments.world, arguments.backend));
  require_backend(arguments.backend);
  if (!arguments.replay.empty()) return replay_incident(arguments);
  return arguments.supervise.on ? supervise_run(arguments, stop) : train_here(arguments, stop);
}

}  // namespace

void add_train_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("train", "Train a GPT on text or on a synthetic source");
  const auto arguments = std::make_shared<TrainArguments>();
  add_train_options(*command, *arguments);
  command->callback([&line, arguments, command] {
    require_options_that_count(*command, *arguments);
    arguments->uses_memory = command->count("--memory-tier") > 0;
    arguments->names_cache = command->count("--data-cache") + command->count("--data-cache-gib") > 0;
    line.action = [&line, arguments] { return train_action(*arguments, line.stop); };
  });
}

}  // namespace tandem
