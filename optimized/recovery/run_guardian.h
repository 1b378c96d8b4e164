// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>

namespace tandem {

/// What outlives a supervisor that is killed: a process that does nothing but wait for its end. Workers are asked to stop then by
/// the system (ProcessLauncherOptions::stop_signal), but one that hangs or is stopped does not, and launchers hand on what they
/// like; those that are left after a while are killed here, with the shared memory that they would have removed.
///
/// In a session of its own, without files of this process, deaf to what asks a program to stop: a signal to the supervisor's
/// group does not reach it. On this machine alone; ranks of others are their launcher's, whose end its daemons notice.
class RunGuardian {
 public:
  /// Forks: to be made before there are other threads. `mark`: NAME=VALUE in the environment of all workers of this supervisor,
  /// and of no other. `patience_seconds`: that they have to end by themselves. `shared_files`: as ProcessLauncherOptions has it.
  /// Throws IoError.
  RunGuardian(const std::string& mark, double patience_seconds, const std::string& shared_files);
  /// The supervisor has ended its workers itself: so does the guardian, and is waited for.
  ~RunGuardian();
  RunGuardian(const RunGuardian&) = delete;
  RunGuardian& operator=(const RunGuardian&) = delete;

 private:
  int pipe_ = -1;
  pid_t process_ = 0;
};

}  // namespace tandem
