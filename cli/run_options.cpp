// SPDX-License-Identifier: Apache-2.0
#include "cli/run_options.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/output.h"
#include "core/nearest_name.h"
#include "optimized/comm/nccl/nccl_world.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"

namespace tandem {
namespace {

[[noreturn]] void refuse(const std::string& option, const std::string& word, const std::vector<std::string>& known) {
  const std::optional<std::string> nearest = nearest_name(word, known);
  throw InputError(fmt::format("{} {}: unknown{}; there are {}", option, word,
                               nearest ? fmt::format(", did you mean '{}'?", *nearest) : "", fmt::join(known, ", ")));
}

// Before the job is joined: the others of it come to the same, and nobody waits for anybody.
void require_nccl(const std::string& backend) {
  if (has_nccl() && backend != "cuda") {
    throw InputError(fmt::format(
        "--transport nccl: moves tensors between GPUs, and ranks of --backend {} have none; add --backend cuda, or use "
        "threads or mpi",
        backend));
  }
  const std::string why = why_no_nccl();
  if (!why.empty()) throw InputError("--transport nccl: " + why);
}

void require_transport(const std::string& transport, const std::string& backend) {
  if (transport == "nccl") return require_nccl(backend);
  const std::vector<std::string> known = transports();
  if (std::find(known.begin(), known.end(), transport) != known.end()) return;
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
  command
      .add_option("--transport", arguments.transport,
                  "threads of this process; mpi: processes started by mpirun or srun; nccl: processes with a GPU each")
      ->capture_default_str();
  command
      .add_option("--link", arguments.link,
                  "shape the messages of threads: NAME or FILE[,dilation=D][,jitter=J] (tandem list shows the names)")
      ->capture_default_str();
  command
      .add_option("--algorithm", arguments.algorithm,
                  fmt::format("of collectives over messages: {}", fmt::join(algorithm_names(), ", ")))
      ->capture_default_str();
  command
      .add_option("--adversary", arguments.adversary,
                  "delay and reorder what may be, and poison buffers that nobody may look at, by this seed")
      ->check(whole_number);
  command
      .add_option("--deadline", arguments.deadline_seconds,
                  "seconds that a communication waits for the other ranks; default 60, in most cases 20")
      ->check(positive_number);
}

WorldSettings to_world_settings(const WorldArguments& arguments, const std::string& backend) {
  require_transport(arguments.transport, backend);
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

void add_backend_option(CLI::App& command, std::string& backend) {
  command.add_option("--backend", backend, "cpu; cuda, a GPU; simt, the CUDA kernels on an emulated one, to check numerics")
      ->capture_default_str();
}

void add_run_options(CLI::App& command, RunOptions& options) {
  add_backend_option(command, options.backend);
  add_world_options(command, options.world);
  command.add_option("--seed", options.seed, "of parameters, data and dropout")->capture_default_str()->check(whole_number);
  command.add_option("--repetitions", options.repetitions, "measured steps per case")->capture_default_str()->check(at_least_one);
  command.add_option("--threads-per-rank", options.threads_per_rank, "threads inside a rank")
      ->capture_default_str()
      ->check(at_least_one);
}

RunContext to_context(const RunOptions& options) {
  RunContext context;
  context.world = to_world_settings(options.world, options.backend);
  require_backend(options.backend);
  context.seed = options.seed;
  context.repetitions = options.repetitions;
  context.threads_per_rank = options.threads_per_rank;
  context.backend = options.backend;
  return context;
}

}  // namespace tandem
