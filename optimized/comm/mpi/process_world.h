// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "optimized/comm/mpi/job_control.h"
#include "optimized/comm/world.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// What a transport makes of a world whose ranks are processes.
struct ProcessWorld {
  std::function<void(const std::shared_ptr<WorldState>&)> prepare{};  ///< before anything of the others is heard
  /// Runs the body; returns what it threw, after which the world knows of it.
  std::function<std::exception_ptr()> run;
  std::function<void(int from, const std::string& letter)> told{};
  std::function<void()> meanwhile{};       ///< now and then while the others are not done
  std::function<void(bool well)> close{};  ///< all ranks are done; whether with all of them well
};

/// One world of the job (run_world()), in each of its processes, of which the first `ranks` take part.
void run_process_world(JobControl& control, const JobShape& job, const WorldOptions& options, const ProcessWorld& steps);

}  // namespace tandem
