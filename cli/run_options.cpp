// SPDX-License-Identifier: Apache-2.0
#include "cli/run_options.h"

#include <fmt/format.h>

#include "cli/output.h"

namespace tandem {

void add_run_options(CLI::App& command, RunOptions& options) {
  command.add_option("--backend", options.backend, "cpu (cuda: not in this build)")->capture_default_str();
  command.add_option("--transport", options.transport, "threads (mpi, nccl: not in this build)")->capture_default_str();
  command.add_option("--link", options.link, "profile of a shaped link (none so far)")->capture_default_str();
  command.add_option("--seed", options.seed, "of parameters, data and dropout")->capture_default_str();
  command.add_option("--repetitions", options.repetitions, "measured steps per case")->capture_default_str()->check(at_least_one);
  command.add_option("--threads-per-rank", options.threads_per_rank, "threads inside a rank")
      ->capture_default_str()
      ->check(at_least_one);
}

RunContext to_context(const RunOptions& options) {
  if (options.backend == "cuda") throw InputError("--backend cuda: this build has no CUDA backend; use cpu");
  if (options.backend != "cpu") throw InputError(fmt::format("--backend {}: unknown; use cpu", options.backend));
  if (options.transport == "mpi" || options.transport == "nccl") {
    throw InputError(fmt::format("--transport {}: not in this build; use threads", options.transport));
  }
  if (options.transport != "threads") throw InputError(fmt::format("--transport {}: unknown; use threads", options.transport));
  if (options.link != "none") throw InputError(fmt::format("--link {}: there are no link profiles yet; use none", options.link));
  RunContext context;
  context.seed = options.seed;
  context.repetitions = options.repetitions;
  context.threads_per_rank = options.threads_per_rank;
  context.backend = options.backend;
  context.transport = options.transport;
  return context;
}

}  // namespace tandem
