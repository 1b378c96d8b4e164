// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/command.h"
#include "harness/case.h"

namespace tandem {

/// Options that say of what the ranks of a run are made, and how they communicate.
struct WorldArguments {
  std::string transport = "threads";
  std::string link = "none";
  std::string algorithm = "direct";
  std::optional<std::uint64_t> adversary;
  double deadline_seconds = 0;
};
void add_world_options(CLI::App& command, WorldArguments& arguments);

/// Throws InputError where a transport, link or algorithm is named that there is not or that this machine cannot use, or that do
/// not go together with each other or with what the ranks compute on.
[[nodiscard]] WorldSettings to_world_settings(const WorldArguments& arguments, const std::string& backend = "cpu");

/// --backend: what the ranks compute on.
void add_backend_option(CLI::App& command, std::string& backend);

/// Options that run and pitfalls share.
struct RunOptions {
  std::string backend = "cpu";
  WorldArguments world;
  std::uint64_t seed = 1;
  int repetitions = 5;
  int threads_per_rank = 1;
};
void add_run_options(CLI::App& command, RunOptions& options);

/// Throws InputError where a backend, transport or link is named that this build or machine does not have.
[[nodiscard]] RunContext to_context(const RunOptions& options);

}  // namespace tandem
