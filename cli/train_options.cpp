// SPDX-License-Identifier: Apache-2.0
#include "cli/train_options.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include "cli/output.h"
#include "cli/usage.h"

namespace tandem {
namespace {

void add_basic_options(CLI::App& command, TrainArguments& arguments) {
  command.add_option("CONFIG", arguments.config_file, "configuration (JSON); without it the defaults below");
  command.add_option(
      "--data", arguments.data,
      "text file, prefix of prepared data (of a store: s3://BUCKET/PREFIX), token file of llm.c, or 'synthetic' (default)");
  command.add_option("--data-cache", arguments.cache.folder, "folder for data of a store; ~/.cache/tandem/data by default");
  command.add_option("--data-cache-gib", arguments.cache.gib, "that it may take")->capture_default_str()->check(positive_number);
  command.add_option("--steps", arguments.steps, "number of steps")->check(at_least_one);
  command.add_option("--set", arguments.settings, "key=value, may be repeated; keys below")
      ->type_size(1)
      ->allow_extra_args(false);
  command.add_option("--resume", arguments.resume, "continue from the newest checkpoint in this folder")->check(not_empty);
  command.add_option("--out", arguments.output, "folder for checkpoints; a resumed run goes on in its own")->check(not_empty);
  command.add_option("--store", arguments.store,
                     "second home of checkpoints: s3://BUCKET/PREFIX (keys and endpoint from AWS_... variables) or a folder");
  command.add_option("--trace", arguments.trace, "write the timeline as Chrome trace JSON (opens in Perfetto)");
  command.add_option("--json", arguments.json, "write losses, times and memory as JSON; with --supervise, how the run went");
  command.add_option("--replay", arguments.replay, "compute an incident again, from its folder OUT/incident-N")->check(not_empty);
}

void add_monitoring_options(CLI::App& command, TrainArguments& arguments) {
  const std::string group = "Monitoring";
  command.add_option("--metrics", arguments.metrics, "a line of JSON for each step; OUT/metrics.jsonl with --supervise")
      ->check(not_empty)
      ->group(group);
  command.add_option("--tensorboard", arguments.tensorboard, "folder for event files")->check(not_empty)->group(group);
  command.add_option("--prometheus", arguments.prometheus, "answer GET /metrics at PORT (of this machine alone) or HOST:PORT")
      ->check(not_empty)
      ->group(group);
  command.add_flag("--live", arguments.live, "a view of the run that is drawn over as it goes on, on a terminal")->group(group);
}

void add_recovery_options(CLI::App& command, TrainArguments& arguments) {
  const std::string group = "Recovery";
  SuperviseArguments& supervise = arguments.supervise;
  command
      .add_flag("--supervise", supervise.on,
                "run the workers under a supervisor that starts them again when they die, hang or break; needs --out. The "
                "same command again goes on where the run was")
      ->group(group);
  command.add_option("--max-restarts", supervise.max_restarts, "in a row without a new step; beyond it the run is given up")
      ->capture_default_str()
      ->check(number_between(0, 1e6))
      ->group(group);
  command.add_option("--backoff-seconds", supervise.backoff_seconds, "before a restart; doubled for each further one in a row")
      ->capture_default_str()
      ->check(number_between(0, 3600))
      ->group(group);
  command.add_option("--heartbeat-seconds", arguments.heartbeat_seconds, "between two signs of life of a rank")
      ->capture_default_str()
      ->check(number_between(0.01, 3600))
      ->group(group);
  command.add_option("--restore-seconds", supervise.restore_seconds, "that finding and reading a checkpoint may take")
      ->capture_default_str()
      ->check(positive_number)
      ->group(group);
  command
      .add_option("--stall-seconds", supervise.stall_seconds,
                  "without progress while starting, waiting for data, evaluating or saving; of training the run shows it itself")
      ->capture_default_str()
      ->check(positive_number)
      ->group(group);
  command.add_flag("--elastic", supervise.elastic, "go on with fewer ranks where places are lost")->group(group);
  command.add_option("--min-ranks", supervise.least_ranks, "of --elastic")
      ->capture_default_str()
      ->check(at_least_one)
      ->group(group);
  command.add_flag("--replace-slow", supervise.replace_slow, "restart where one rank is much slower than the others")
      ->group(group);
  command
      .add_option(
          "--launcher", supervise.launcher,
          "command that starts the workers: 'srun -n 4', 'torchrun --no-python --nproc-per-node 4'; default mpirun -n RANKS")
      ->check(not_empty)
      ->group(group);
  command
      .add_option("--memory-tier", arguments.memory_folder,
                  "keep copies of the state in memory that outlives the workers, in this folder; default one in /dev/shm")
      ->expected(0, 1)
      ->group(group);
  command.add_option("--ranks-per-node", arguments.ranks_per_node, "of the memory tier; default: all ranks on one node")
      ->check(at_least_one)
      ->group(group);
  command.add_flag("--requeue", supervise.requeue, "asked to stop by Slurm, put the job back into its queue after saving")
      ->group(group);
  command.add_option("--fault", arguments.faults, "disturb the run on purpose, once: KIND@key=value,...; kinds below")
      ->type_size(1)
      ->allow_extra_args(false)
      ->group(group);
}

void add_worker_options(CLI::App& command, TrainArguments& arguments) {
  const std::string hidden;
  WorkerArguments& worker = arguments.worker;
  command.add_option("--attempt", worker.attempt)->group(hidden);
  command.add_option("--heartbeat", worker.heartbeat)->group(hidden);
  command.add_option("--heartbeat-ranks", worker.ranks)->group(hidden);
  command.add_option("--supervisor-process", worker.supervisor_process)->group(hidden);
  command.add_option("--folder-seconds", arguments.supervise.patience_seconds)->group(hidden);
}

}  // namespace

void add_train_options(CLI::App& command, TrainArguments& arguments) {
  add_basic_options(command, arguments);
  add_backend_option(command, arguments.backend);
  add_world_options(command, arguments.world);
  add_monitoring_options(command, arguments);
  add_recovery_options(command, arguments);
  add_worker_options(command, arguments);
  std::string text =
      "Examples:\n  tandem train --data synthetic --steps 50 --set data=2\n"
      "  tandem train --steps 20 --set data=2 --set checkpoint_every_steps=5 --supervise --out supervised-run "
      "--fault kill@step=7 --fault nan@step=15,rank=1\n\nFaults (--fault KIND@key=value,...; step from 1, rank from "
      "0, during=save or restore, target=weights, moments, activations or gradients):\n";
  for (const std::string& kind : describe_fault_kinds()) text += "  " + kind + "\n";
  text += "\nKeys of --set:\n";
  for (const std::string& option : describe_options()) text += "  " + option + "\n";
  command.footer(text);
}

void require_options_that_count(const CLI::App& command, const TrainArguments& arguments) {
  constexpr std::array<std::string_view, 10> kOfReplay = {"--replay",    "--data",      "--data-cache", "--data-cache-gib",
                                                          "--backend",   "--transport", "--algorithm",  "--link",
                                                          "--adversary", "--deadline"};
  constexpr std::array<std::string_view, 8> kOfSupervisor = {"--max-restarts",    "--backoff-seconds", "--heartbeat-seconds",
                                                             "--restore-seconds", "--stall-seconds",   "--elastic",
                                                             "--replace-slow",    "--launcher"};
  const bool is_supervised = arguments.supervise.on || !arguments.worker.heartbeat.empty();
  for (const std::string& option : given_options(command)) {
    if (!arguments.replay.empty() && std::ranges::find(kOfReplay, option) == kOfReplay.end()) {
      throw InputError(fmt::format("--replay computes what was recorded, as it was: leave {} out", option));
    }
    if (!is_supervised && std::ranges::find(kOfSupervisor, option) != kOfSupervisor.end()) {
      throw InputError(
          fmt::format("{0} needs --supervise: it says how a supervisor treats its workers, and there is none; add --supervise, "
                      "or leave {0} out",
                      option));
    }
  }
  if (command.count("--min-ranks") > 0 && !arguments.supervise.elastic) {
    throw InputError(
        "--min-ranks needs --elastic: it says how far the run may shrink; add --elastic (with --supervise), or leave --min-ranks "
        "out");
  }
  if (arguments.supervise.requeue && arguments.output.empty() && arguments.resume.empty()) {
    throw InputError("--requeue needs --out: a job that is back in its queue goes on from its checkpoints; add --out FOLDER");
  }
}

}  // namespace tandem
