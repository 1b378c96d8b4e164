// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/case.h"

namespace tandem {

/// What reproduces a result, and what decides whether two results can be compared.
struct Environment {
  std::string date;      ///< UTC, "2024-05-31T12:00:00Z"
  std::string cpu;       ///< model name
  int cores = 0;         ///< logical, of the machine
  int usable_cores = 0;  ///< that this process may run on
  std::int64_t memory_bytes = 0;
  std::string instruction_set;   ///< widest vector instructions of the CPU: "avx512", "avx2", "sse2", ...
  std::string operating_system;  ///< "Linux 6.1.0"
  std::vector<std::string> gpus;
  std::map<std::string, std::string> libraries;  ///< name -> version
  std::string version;                           ///< of this program, "0.9.0"; empty: a file that does not say
  std::string compiler;
  std::string build_type;
  std::string git_commit;  ///< "unknown" outside a git checkout
  bool git_dirty = false;
  std::string backend, transport;
  std::string link = "none";         ///< shaped link of threads: "pcie-25gbe dilated 10 x"; times measured on it are its own
  std::string algorithm = "direct";  ///< of collectives over messages
  std::string adversary = "none";    ///< seed of a transport that delays and reorders; times measured with it say nothing
  int ranks = 0;                     ///< largest number of ranks that a case used
  int threads_per_rank = 1;
  std::uint64_t seed = 0;
  int repetitions = 0;
  std::vector<std::string> pitfalls;  ///< names of those that were on: results made with one prove nothing
};

/// What the caller knows and this room does not.
struct EnvironmentInputs {
  std::map<std::string, std::string> libraries;
  std::vector<std::string> gpus;
  int ranks = 0;
};

/// "tandem 0.9.0 (43a3781b5a41, changed since; GNU 12.2.0, Release)"; the commit only where it was built from one.
[[nodiscard]] std::string describe_build();

/// This machine, this build (git state as of the build) and this run.
[[nodiscard]] Environment collect_environment(const RunContext& context, const EnvironmentInputs& inputs);

}  // namespace tandem
