// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "cli/command.h"
#include "harness/case.h"

namespace tandem {

/// Options that run and pitfalls share.
struct RunOptions {
  std::string backend = "cpu";
  std::string transport = "threads";
  std::string link = "none";
  std::uint64_t seed = 1;
  int repetitions = 5;
  int threads_per_rank = 1;
};
void add_run_options(CLI::App& command, RunOptions& options);

/// Throws InputError where a backend, transport or link is named that this build or machine does not have.
[[nodiscard]] RunContext to_context(const RunOptions& options);

}  // namespace tandem
