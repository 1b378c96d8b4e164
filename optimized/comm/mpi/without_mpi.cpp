// SPDX-License-Identifier: Apache-2.0
// The mpi transport of a build without MPI.
#include "core/error.h"
#include "optimized/comm/mpi/mpi_world.h"

namespace tandem {
namespace {

[[noreturn]] void refuse() {
  throw InputError("--transport mpi: this build has no MPI; install libopenmpi-dev and openmpi-bin and configure it again");
}

}  // namespace

bool has_mpi() noexcept { return false; }
void run_mpi_world(const WorldOptions&, const std::function<void(Communicator&)>&) { refuse(); }
JobShape mpi_job_shape() { refuse(); }
JobConnection mpi_connection() { refuse(); }
void require_whole_job() {}
void on_broken_job(std::function<void(const std::string&)>) {}
void leave_job(int) noexcept {}

}  // namespace tandem
