// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include "cli/output.h"
#include "cli/store_options.h"
#include "cli/train_options.h"
#include "core/io/hash.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/checkpoint/tiers.h"

namespace tandem {
namespace {

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

// Empty where there is none, and `memory` has one. Looked for by the first process alone, since this reads all of them.
std::filesystem::path newest_on_disks(const TrainArguments& arguments, const ObjectStore* store,
                                      const std::optional<std::filesystem::path>& memory, const Job& job) {
  std::string found;
  job.on_leader([&] {
    const std::filesystem::path folder = arguments.resume;
    try {
      found = (store != nullptr ? find_newest_checkpoint(folder, store, note) : find_checkpoint(folder, note)).string();
    } catch (const InputError&) {
      if (!memory) throw;
    }
  });
  return job.of_leader(found);
}

// The newest checkpoint that verifies, over all tiers; of equal steps that in memory.
std::filesystem::path newest_checkpoint(const TrainArguments& arguments, const TrainPlan& plan, const WorldSettings& world,
                                        const Job& job) {
  std::optional<std::filesystem::path> in_memory;
  if (plan.memory)
    in_memory = assemble_from_memory(
        *plan.memory, world, job.leads() ? note : [](const std::string&) {});
  std::filesystem::path on_disk = newest_on_disks(arguments, plan.store.get(), in_memory, job);
  if (!in_memory) return on_disk;
  if (on_disk.empty()) return *in_memory;
  const bool is_newer = read_checkpoint_info(on_disk).next_step > read_checkpoint_info(*in_memory).next_step;
  return is_newer ? on_disk : *in_memory;
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

// Node k has ranks k ranks_per_node and following.
void require_nodes(const TrainPlan& plan, const TrainArguments& arguments) {
  if (arguments.ranks_per_node == 0) return;
  if (!plan.memory) throw InputError("--ranks-per-node: says which copies in memory are on one node; add --memory-tier");
  const int ranks = plan.config.plan.parallel.world_size();
  const bool is_shrunk = plan.resume || arguments.worker.attempt > 0;
  if (arguments.ranks_per_node <= ranks || is_shrunk) return;
  throw InputError(fmt::format("--ranks-per-node {}: the plan has {} rank{}; leave it out where all are on one node",
                               arguments.ranks_per_node, ranks, ranks == 1 ? "" : "s"));
}

// A supervisor tells its workers of the cache whether or not there is one.
void require_data_to_keep(const TrainPlan& plan, const TrainArguments& arguments) {
  if (!arguments.names_cache || !arguments.worker.heartbeat.empty() || parse_remote_data(plan.data)) return;
  throw InputError(fmt::format(
      "--data-cache and --data-cache-gib are about data of a store (--data s3://BUCKET/PREFIX), and --data is {}: leave them out",
      plan.data));
}

// Two runs in one folder: whoever takes the newest checkpoint of it takes that of the longer run, whichever was meant. A
// supervised run goes on where it was.
void require_folder_of_this_run(const TrainPlan& plan, const TrainArguments& arguments) {
  const bool is_supervised = arguments.supervise.on || !arguments.worker.heartbeat.empty();
  std::error_code error;
  if (plan.resume || is_supervised || plan.output.empty() || !std::filesystem::is_directory(plan.output, error)) return;
  const std::vector<CheckpointEntry> there = list_checkpoints(plan.output);
  if (there.empty()) return;
  throw InputError(fmt::format(
      "--out {0}: has checkpoints of another run, the newest of step {1}; go on with it (--resume {0}), or name another folder",
      plan.output, there.front().step));
}

// A fault that cannot strike is a mistake of whoever wrote the script. Of a run that goes on, ranks may have been lost since.
void require_faults_that_strike(const TrainPlan& plan, const TrainArguments& arguments) {
  const bool is_supervised = arguments.supervise.on || !arguments.worker.heartbeat.empty();
  for (const Fault& fault : plan.faults) {
    const std::string text = to_string(fault);
    if (fault.step > plan.config.steps) {
      throw InputError(fmt::format("fault '{}': the run has only {} steps", text, plan.config.steps));
    }
    const int ranks = plan.config.plan.parallel.world_size();
    if (fault.rank >= ranks && !plan.resume && arguments.worker.attempt == 0) {
      throw InputError(fmt::format("fault '{}': the plan has {} rank{}, counted from 0", text, ranks, ranks == 1 ? "" : "s"));
    }
    const bool strikes_supervision = fault.kind == FaultKind::supervisor || fault.kind == FaultKind::heartbeat;
    if (strikes_supervision && !is_supervised) {
      throw InputError(fmt::format("fault '{}': there is no supervisor; add --supervise", text));
    }
    const bool strikes_files = fault.kind == FaultKind::corrupt || fault.kind == FaultKind::disk_full;
    if (plan.output.empty() && (strikes_files || fault.moment == FaultMoment::save)) {
      throw InputError(fmt::format("fault '{}': no checkpoints are written; give --out", text));
    }
  }
}

}  // namespace

void note(const std::string& line) { fmt::print(stderr, "tandem: {}\n", line); }

void require_writable_metrics(const TrainArguments& arguments) {
  const std::string folder = std::filesystem::path(arguments.metrics).parent_path().string();
  require_writable_folder(folder, "--metrics");
  std::error_code error;
  if (!arguments.metrics.empty() && std::filesystem::is_directory(arguments.metrics, error))
    throw InputError(fmt::format("--metrics {}: this is a folder; name a file", arguments.metrics));
  require_writable_folder(arguments.tensorboard, "--tensorboard");
}

std::filesystem::path struck_file(const std::filesystem::path& output) { return output / "faults_struck"; }

std::optional<MemoryTierPlace> memory_place(const TrainArguments& arguments) {
  if (!arguments.uses_memory) return std::nullopt;
  MemoryTierPlace place;
  place.ranks_per_node = arguments.ranks_per_node;
  place.folder = arguments.memory_folder;
  const std::string& run = arguments.output.empty() ? arguments.resume : arguments.output;
  if (place.folder.empty()) {
    if (run.empty()) throw InputError("--memory-tier: which run is it? give --out, or name a folder of its own");
    const std::string name = std::filesystem::weakly_canonical(std::filesystem::absolute(run)).string();
    place.folder = fmt::format("/dev/shm/tandem-{}", to_hex(hash64(std::as_bytes(std::span(name)))));
  }
  std::error_code error;
  if (std::filesystem::exists(place.folder, error) && !std::filesystem::is_directory(place.folder, error))
    throw InputError(fmt::format("--memory-tier {}: this is a file; name a folder", place.folder.string()));
  return place;
}

TrainPlan resolve(const TrainArguments& arguments, const Job& job) {
  TrainPlan plan;
  plan.data = "synthetic";
  plan.output = arguments.output;
  plan.faults = parse_faults(arguments.faults);
  plan.store = open_store_from_environment(arguments.store);
  plan.memory = memory_place(arguments);
  if (!arguments.resume.empty()) {
    if (!arguments.config_file.empty())
      throw InputError("--resume continues with the configuration of the checkpoint; leave CONFIG.json out and use --set");
    plan.resume = newest_checkpoint(arguments, plan, to_world_settings(arguments.world, arguments.backend), job);
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
  require_nodes(plan, arguments);
  require_data_to_keep(plan, arguments);
  require_folder_of_this_run(plan, arguments);
  require_faults_that_strike(plan, arguments);
  return plan;
}

}  // namespace tandem
