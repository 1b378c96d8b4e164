// SPDX-License-Identifier: Apache-2.0
#include "cli/run_options.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/output.h"
#include "core/nearest_name.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/comm/world.h"

namespace tandem {
namespace {

[[noreturn]] void refuse(const std::string& option, const std::string& word, const std::vector<std::string>& known) {
  const std::optional<std::string> nearest = nearest_name(word, known);
  throw InputError(fmt::format("{} {}: unknown{}; there are {}", option, word,
                               nearest ? fmt::format(", did you mean '{}'?", *nearest) : "", fmt::join(known, ", ")));
}

void require_transport(const std::string& transport) {
  const std::vector<std::string> known = transports();
  if (std::find(known.begin(), known.end(), transport) != known.end()) return;
  if (transport == "nccl") throw InputError("--transport nccl: not in this build; use threads or mpi");
  if (transport == "mpi") {
    throw InputError(
        "--transport mpi: this build has no MPI; install libopenmpi-dev and openmpi-bin and configure again, or use threads");
  }
  refuse("--transport", transport, known);
}

std::vector<std::string> algorithm_names() {
  std::vector<std::string> names;
  for (const CollectiveAlgorithm algorithm : all_algorithms()) names.emplace_back(name(algorithm));
  return names;
}

}  // namespace

void add_world_options(CLI::App& command, WorldArguments& arguments) {
  command.add_option("--transport", arguments.transport, "threads of this process, or mpi: processes started by mpirun or srun")
      ->capture_default_str();
  command
      .add_option("--link", arguments.link,
                  "shape the messages of threads: NAME or FILE[,dilation=D][,jitter=J] (tandem list shows the names)")
      ->capture_default_str();
  command
      .add_option("--algorithm", arguments.algorithm,
                  fmt::format("of collectives over messages: {}", fmt::join(algorithm_names(), ", ")))
      ->capture_default_str();
  command.add_option("--adversary", arguments.adversary,
                     "delay and reorder what may be, and poison buffers that nobody may look at, by this seed");
  command
      .add_option("--deadline", arguments.deadline_seconds,
                  "seconds that a communication waits for the other ranks; default 60, in most cases 20")
      ->check(positive_number);
}

WorldSettings to_world_settings(const WorldArguments& arguments) {
  require_transport(arguments.transport);
  WorldSettings settings;
  settings.transport = arguments.transport;
  settings.link = parse_link(arguments.link);
  if (settings.link && settings.transport != "threads") {
    throw InputError(fmt::format("--link {}: only the messages of threads are shaped; leave out --transport {}", arguments.link,
                                 settings.transport));
  }
  const std::optional<CollectiveAlgorithm> algorithm = find_algorithm(arguments.algorithm);
  if (!algorithm) refuse("--algorithm", arguments.algorithm, algorithm_names());
  settings.algorithm = *algorithm;
  if (arguments.adversary) settings.adversary = AdversaryScript{.seed = *arguments.adversary};
  settings.deadline_seconds = arguments.deadline_seconds;
  return settings;
}

void add_run_options(CLI::App& command, RunOptions& options) {
  command.add_option("--backend", options.backend, "cpu (cuda: not in this build)")->capture_default_str();
  add_world_options(command, options.world);
  command.add_option("--seed", options.seed, "of parameters, data and dropout")->capture_default_str();
  command.add_option("--repetitions", options.repetitions, "measured steps per case")->capture_default_str()->check(at_least_one);
  command.add_option("--threads-per-rank", options.threads_per_rank, "threads inside a rank")
      ->capture_default_str()
      ->check(at_least_one);
}

RunContext to_context(const RunOptions& options) {
  if (options.backend == "cuda") throw InputError("--backend cuda: this build has no CUDA backend; use cpu");
  if (options.backend != "cpu") throw InputError(fmt::format("--backend {}: unknown; use cpu", options.backend));
  RunContext context;
  context.seed = options.seed;
  context.repetitions = options.repetitions;
  context.threads_per_rank = options.threads_per_rank;
  context.backend = options.backend;
  context.world = to_world_settings(options.world);
  return context;
}

}  // namespace tandem
