// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include <CLI/CLI.hpp>

#include "suites/suites.h"

namespace tandem {

/// Exit statuses of the program; scripts depend on them.
enum ExitStatus : int {
  kGood = 0,
  kCheckFailed = 1,   ///< compare: a regression
  kBadInput = 2,      ///< the command, its input, or something it needs
  kUndecided = 3,     ///< compare: too noisy, or not comparable
  kRunBroke = 4,      ///< a rank failed, the disk is full; what was done is saved and named
  kInterrupted = 130  ///< stopped by a signal; what was done is saved
};

/// What main() shares with the commands. Each command adds its subcommand to `app`; the one that was named sets `action`.
struct CommandLine {
  CLI::App& app;
  SuiteOptions suites;
  std::map<std::string, std::string> libraries;  ///< that this program was built with, name -> version
  const std::atomic<bool>& stop;     ///< set by SIGINT, SIGTERM, and SIGUSR1, which Slurm sends ahead of time (--signal=USR1@60)
  std::function<int()> action = {};  ///< returns an ExitStatus
};

void add_list_command(CommandLine& line);
void add_run_command(CommandLine& line);
void add_train_command(CommandLine& line);
void add_generate_command(CommandLine& line);
void add_golden_command(CommandLine& line);
void add_data_command(CommandLine& line);
void add_checkpoint_command(CommandLine& line);
void add_compare_command(CommandLine& line);
void add_report_command(CommandLine& line);
void add_probe_command(CommandLine& line);
void add_plan_command(CommandLine& line);
void add_scale_command(CommandLine& line);
void add_trace_command(CommandLine& line);
void add_claims_command(CommandLine& line);
void add_pitfalls_command(CommandLine& line);
void add_compose_command(CommandLine& line);

}  // namespace tandem
