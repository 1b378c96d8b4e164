// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optimized/recovery/supervisor.h"

namespace tandem {

struct ProcessLauncherOptions {
  std::function<std::vector<std::string>(const Attempt&)> command;  ///< program (found in PATH) and arguments
  /// NAME=VALUE, put into the environment of what is started. Launchers hand their environment on, so that it marks all processes
  /// of the run on this machine, whatever groups and sessions they have made for themselves.
  std::string mark;
  std::vector<std::string> environment;  ///< NAME=VALUE, where the name is not set already
  /// What terminate() sends, and what the process gets where the supervisor dies. mpirun gives its ranks a second after SIGTERM
  /// and then kills them, but hands SIGUSR1 on and waits.
  int stop_signal = SIGTERM;
  /// Files that processes which are killed have mapped, and whose path begins with this, are removed: shared memory that they
  /// would have removed themselves. Empty: none.
  std::string shared_files{};
  int errors = 2;                                            ///< file that the standard error of what is started is copied to
  std::function<std::vector<int>()> lost_ranks{};            ///< Launcher::lost_ranks(); empty: none
  std::function<std::optional<std::int64_t>()> newest_step;  ///< Launcher::newest_step()
};

/// Attempts as processes: each in a session of its own, so that a signal to the supervisor's group is the supervisor's to pass
/// on. Standard output is shared, standard error copied while its last line is kept for WorkerEnd::what. Asked to stop where this
/// process dies, whatever way.
class ProcessLauncher final : public Launcher {
 public:
  explicit ProcessLauncher(ProcessLauncherOptions options) : options_(std::move(options)) {}
  /// From the thread that lives as long as the run: the process is asked to stop when that ends. Throws InputError where the
  /// program cannot be started, IoError where the system refuses.
  [[nodiscard]] std::unique_ptr<Worker> start(const Attempt& attempt) override;
  [[nodiscard]] std::vector<int> lost_ranks() override;
  [[nodiscard]] std::optional<std::int64_t> newest_step() override;

 private:
  ProcessLauncherOptions options_;
};

/// Processes on this machine whose environment has `mark` (NAME=VALUE), but this one. Those that have ended and were not waited
/// for do not count.
[[nodiscard]] std::vector<pid_t> marked_processes(const std::string& mark);

/// SIGKILL to all of them, and to those of the session; returns when none is left. `session` 0: of none. Then `shared_files` are
/// removed, as ProcessLauncherOptions has them. Throws IoError where one is still there after half a minute.
void kill_marked_processes(const std::string& mark, pid_t session = 0, const std::string& shared_files = {});

}  // namespace tandem
