// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "optimized/comm/communicator.h"
#include "optimized/comm/world.h"

namespace tandem {

// The mpi transport behind run_world() and job_shape() (optimized/comm/world.h). In a build without MPI the first is false and
// the others throw InputError.

[[nodiscard]] bool has_mpi() noexcept;
void run_mpi_world(const WorldOptions& options, const std::function<void(Communicator&)>& body);
[[nodiscard]] JobShape mpi_job_shape();

class JobControl;
class Lifeline;
/// How the processes of the job that mpirun started reach each other apart from MPI, for a transport that moves its data
/// otherwise.
struct JobConnection {
  JobControl* control = nullptr;
  const Lifeline* lifeline = nullptr;
};
/// Joins the job at the first call.
[[nodiscard]] JobConnection mpi_connection();

// The job of processes that this one belongs to, for the program's main path. Without a job that has been joined, nothing
// happens.

/// Throws PeerError or TimeoutError where the job is broken: a process has died, or does not answer. No world can be made any
/// more.
void require_whole_job();

/// What to do where the job breaks and leave_job() is not called soon after: `last_words` gets the reason, on a thread of its
/// own, and must end the process. mpirun ends every process about two seconds after a death, whatever they are at. Said before
/// the job is joined.
void on_broken_job(std::function<void(const std::string& reason)> last_words);

/// This process's last act but its exit: waits for the others to come here too and finalizes MPI. In a broken job it returns at
/// once and leaves MPI as it is, since its finalization would wait for the dead.
void leave_job(int exit_status) noexcept;

}  // namespace tandem
