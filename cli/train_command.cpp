// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/data_source.h"
#include "cli/job.h"
#include "cli/output.h"
#include "cli/run_options.h"
#include "cli/store_options.h"
#include "cli/terminal.h"
#include "cli/train_report.h"
#include "core/synthetic_corpus.h"
#include "harness/chrome_trace.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/checkpoint/tiers.h"
#include "optimized/training/trainer.h"
#include "suites/pair.h"

namespace tandem {
namespace {

struct TrainArguments {
  std::string config_file;
  std::string data;
  std::int64_t steps = 0;
  std::vector<std::string> settings;
  std::string resume;
  std::string output;
  std::string store;
  std::string trace;
  std::string json;
  DataCache cache;
  WorldArguments world;
};

// Starts from the checkpoint's configuration, the file's, or the defaults; --set and --steps come last.
struct Plan {
  RunConfig config;
  std::string data;
  std::optional<std::filesystem::path> resume;
  std::string output;  // folder of checkpoints; empty: none
  std::shared_ptr<ObjectStore> store;
};

// Everything else may change on the way: layout, precision, dropout, schedule. What the checkpoint's numbers mean may not.
void require_same_run(const RunConfig& saved, const RunConfig& wanted) {
  GptConfig model = wanted.model;
  model.embedding_dropout = saved.model.embedding_dropout;
  model.attention_dropout = saved.model.attention_dropout;
  model.residual_dropout = saved.model.residual_dropout;
  if (!(model == saved.model)) {
    throw InputError("--resume: --set may not change the model of the checkpoint, only its dropout; start a new run for another");
  }
  if (wanted.optimizer.kind != saved.optimizer.kind) {
    throw InputError(
        "--resume: --set optimizer may not change; the checkpoint holds the state of the one that it was saved with");
  }
  if (wanted.plan.batch.rows != saved.plan.batch.rows) {
    throw InputError(fmt::format(
        "--resume: --set rows may not change: the run was saved with {}, and its place in the data is counted in steps of "
        "so many; leave it and use micro_batches to fit the memory",
        saved.plan.batch.rows));
  }
}

void note(const std::string& line) { fmt::print(stderr, "tandem: {}\n", line); }

// The newest checkpoint that verifies, over all tiers: looked for by the first process alone, since this reads all of them.
std::filesystem::path newest_checkpoint(const TrainArguments& arguments, const ObjectStore* store, const Job& job) {
  std::string found;
  job.on_leader([&] {
    const std::filesystem::path folder = arguments.resume;
    found = (store != nullptr ? find_newest_checkpoint(folder, store, note) : find_checkpoint(folder, note)).string();
  });
  return job.of_leader(found);
}

void require_work_for_all(const TrainingPlan& plan) {
  if (plan.parallel.data > plan.batch.rows) {
    throw InputError(fmt::format(
        "plan.data is {} but a step has only {} rows (plan.rows), so some ranks would never work; raise rows or lower data",
        plan.parallel.data, plan.batch.rows));
  }
  if (plan.batch.micro_batches > plan.batch.rows) {
    throw InputError(
        fmt::format("plan.micro_batches is {} but a step has only {} rows (plan.rows), so some would be empty; raise rows or "
                    "lower micro_batches",
                    plan.batch.micro_batches, plan.batch.rows));
  }
}

Plan resolve(const TrainArguments& arguments, const Job& job) {
  Plan plan;
  plan.data = "synthetic";
  plan.output = arguments.output;
  plan.store = open_store_from_environment(arguments.store);
  if (!arguments.resume.empty()) {
    if (!arguments.config_file.empty())
      throw InputError("--resume continues with the configuration of the checkpoint; leave CONFIG.json out and use --set");
    plan.resume = newest_checkpoint(arguments, plan.store.get(), job);
    // A run goes on where it was, unless it is told to branch off.
    if (plan.output.empty() && *plan.resume != std::filesystem::path(arguments.resume)) plan.output = arguments.resume;
    const CheckpointInfo info = read_checkpoint_info(*plan.resume);
    plan.config = info.config;
    plan.data = info.data;
  } else if (!arguments.config_file.empty()) {
    plan.config = read_config(arguments.config_file);
  }
  const RunConfig saved = plan.config;
  for (const std::string& setting : arguments.settings) set_option(plan.config, setting);
  if (plan.resume) require_same_run(saved, plan.config);
  if (arguments.steps > 0) plan.config.steps = arguments.steps;
  if (!arguments.data.empty()) plan.data = arguments.data;
  if (plan.store != nullptr && plan.output.empty())
    throw InputError("--store copies checkpoints from a folder: give --out as well");
  validate(plan.config.model);
  require_legal(plan.config.plan, plan.config.model);
  require_work_for_all(plan.config.plan);
  return plan;
}

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
  if (corpus == nullptr || report.validation_losses.empty()) return;
  fmt::print("entropy rate of the source: {:.4f} nats; the validation loss is {:+.2f} % from this floor\n",
             corpus->entropy_rate_nats(), 100 * (report.validation_losses.back().second / corpus->entropy_rate_nats() - 1));
}

// `skipped`: steps so far.
void print_step(std::int64_t step, const StepResult& result, double step_seconds, bool scaled, std::int64_t skipped) {
  fmt::print("step {:>6}  loss {:.4f}  norm {:.3f}  lr {:.2e}  {:.0f} tokens/s", step + 1, result.loss,
             std::abs(result.gradient_norm), result.learning_rate, static_cast<double>(result.valid_tokens) / step_seconds);
  if (scaled) fmt::print("  scale {:.12g}", result.loss_scale);
  if (skipped > 0) fmt::print("  {} skipped", skipped);
  fmt::print("\n");
  std::fflush(stdout);
}

// A run that ended but trained nothing that is of use.
std::optional<std::string> what_broke(const TrainReport& report) {
  for (std::size_t i = 0; i < report.steps.size(); ++i) {
    if (std::isfinite(report.steps[i].loss)) continue;
    return fmt::format(
        "the loss is not finite from step {} on; go back to a checkpoint before it, or start lower (learning_rate)",
        report.first_step + static_cast<std::int64_t>(i) + 1);
  }
  const auto applied = std::count_if(report.steps.begin(), report.steps.end(), [](const StepResult& s) { return !s.skipped; });
  if (applied > 0 || report.steps.size() < 10) return std::nullopt;
  return fmt::format("no step of {} was applied: every gradient overflowed; lower loss_scale_initial", report.steps.size());
}

// What is left to say and to keep when the steps are done.
int finish(const TrainArguments& arguments, const Plan& plan, const BatchSource& source, const TrainReport& report) {
  if (report.steps.empty()) {
    fmt::print("nothing to do: the checkpoint is at step {} of {} (--steps)\n", report.first_step, plan.config.steps);
    return kGood;
  }
  const TrainSummary summary = summarise_training(report, plan.config, source.sequence());
  print_train_summary(report, summary);
  for (const std::string& note : report.kernels.notes) fmt::print("note: {}\n", note);
  print_floor(report, source);
  if (!report.checkpoint.empty()) fmt::print("checkpoint: {}\n", report.checkpoint.string());
  if (!arguments.trace.empty()) write_chrome_trace(arguments.trace, report.spans_by_rank);
  if (!arguments.json.empty()) write_output(arguments.json, train_report_json(report, summary, plan.config, plan.data));
  if (report.last_checkpoint_failed && !report.checkpoint_problems.empty()) {
    fmt::print(stderr, "tandem: the last checkpoint is not safe: {}\n", report.checkpoint_problems.back());
    return kRunBroke;
  }
  if (const std::optional<std::string> broken = what_broke(report)) {
    fmt::print(stderr, "tandem: {}\n", *broken);
    return kRunBroke;
  }
  if (!report.interrupted) return kGood;
  fmt::print(stderr, "tandem: interrupted after step {}{}\n", report.first_step + static_cast<std::int64_t>(report.steps.size()),
             report.checkpoint.empty() ? "; nothing was saved (no --out)" : "; continue with --resume " + plan.output);
  return kInterrupted;
}

void require_processes(const TrainingPlan& plan, const WorldSettings& world, const Job& job) {
  if (world.transport == "threads" || plan.parallel.world_size() <= job.processes()) return;
  throw InputError(
      fmt::format("the plan has {0} ranks, but the job has {1} process{2}; start it with mpirun -n {0}, or lower --set",
                  plan.parallel.world_size(), job.processes(), job.processes() == 1 ? "" : "es"));
}

int train_action(const TrainArguments& arguments, const std::atomic<bool>& stop) {
  const WorldSettings world = to_world_settings(arguments.world);
  const Job job(world);
  const Plan plan = resolve(arguments, job);
  DataCache cache = arguments.cache;
  const std::unique_ptr<BatchSource> source = open_data(plan.data, plan.config, cache);
  require_processes(plan.config.plan, world, job);
  job.on_leader([&] {
    require_writable(arguments.trace, "--trace");
    require_writable(arguments.json, "--json");
    require_writable_folder(plan.output, "--out");
    print_header(plan.config, *source);
    if (world != WorldSettings()) fmt::print("world: {}\n", world.describe());
  });
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
  const std::int64_t total = plan.config.steps;
  const std::int64_t every = std::max<std::int64_t>(1, total / 20);
  std::int64_t skipped = 0;
  options.on_step = [&](std::int64_t step, const StepResult& result, double step_seconds) {
    skipped += result.skipped ? 1 : 0;
    progress.show(step + 1, total, fmt::format("loss {:.4f}", result.loss));
    if (step != 0 && (step + 1) % every != 0 && step + 1 != total) return;
    progress.clear();
    print_step(step, result, step_seconds, scales_loss(plan.config.plan), skipped);
  };
  options.on_evaluation = [&](std::int64_t done, double loss) {
    progress.clear();
    fmt::print("step {:>6}  validation loss {:.4f}\n", done, loss);
    std::fflush(stdout);
  };
  options.on_checkpoint_problem = [&](const std::string& problem) {
    progress.clear();
    note(problem);
  };
  const TrainReport report = train(options);
  progress.clear();
  if (cache.tokens && job.leads()) fmt::print("{}\n", describe(cache.tokens->cache_counts()));
  return job.agree_on_status(job.leads() ? finish(arguments, plan, *source, report) : kGood);
}

}  // namespace

void add_train_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("train", "Train a GPT on text or on a synthetic source");
  const auto arguments = std::make_shared<TrainArguments>();
  command->add_option("CONFIG", arguments->config_file, "configuration (JSON); without it the defaults below");
  command->add_option(
      "--data", arguments->data,
      "text file, prefix of prepared data (of a store: s3://BUCKET/PREFIX), token file of llm.c, or 'synthetic' (default)");
  command->add_option("--data-cache", arguments->cache.folder, "folder for data of a store; ~/.cache/tandem/data by default");
  command->add_option("--data-cache-gib", arguments->cache.gib, "that it may take")
      ->capture_default_str()
      ->check(positive_number);
  command->add_option("--steps", arguments->steps, "number of steps")->check(at_least_one);
  command->add_option("--set", arguments->settings, "key=value, may be repeated; keys below")
      ->type_size(1)
      ->allow_extra_args(false);
  command->add_option("--resume", arguments->resume, "continue from the newest checkpoint in this folder")->check(not_empty);
  command->add_option("--out", arguments->output, "folder for checkpoints; a resumed run goes on in its own")->check(not_empty);
  command->add_option("--store", arguments->store,
                      "second home of checkpoints: s3://BUCKET/PREFIX (keys and endpoint from AWS_... variables) or a folder");
  command->add_option("--trace", arguments->trace, "write the timeline as Chrome trace JSON (opens in Perfetto)");
  command->add_option("--json", arguments->json, "write losses, times and memory as JSON");
  add_world_options(*command, arguments->world);
  std::string keys = "Example:\n  tandem train --data synthetic --steps 50 --set data=2\n\nKeys:\n";
  for (const std::string& option : describe_options()) keys += "  " + option + "\n";
  command->footer(keys);
  command->callback([&line, arguments] { line.action = [&line, arguments] { return train_action(*arguments, line.stop); }; });
}

}  // namespace tandem
