// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/mpi_world.h"

#include <exception>
#include <memory>

#include <fmt/format.h>

#include "optimized/comm/messages/message_group.h"
#include "optimized/comm/mpi/mpi_job.h"
#include "optimized/comm/mpi/mpi_wire.h"
#include "optimized/comm/mpi/process_world.h"
#include "optimized/comm/rank_body.h"
#include "optimized/comm/threads/shared_group.h"
#include "optimized/comm/world_state.h"

namespace tandem {
namespace {

std::shared_ptr<Group> group_of_all(const std::shared_ptr<WorldState>& world, MPI_Comm comm, CoreUse cores,
                                    const WorldSettings& settings) {
  if (comm == MPI_COMM_NULL) return make_shared_group(world, {0}).front();
  const auto failed = [state = std::weak_ptr(world)] {
    const auto alive = state.lock();
    return !alive || alive->failed();
  };
  return make_message_group(world, std::make_unique<MpiWire>(comm, failed, cores), settings);
}

// Whatever goes wrong before the body begins is a failure of this rank, too: the others must hear of it.
std::exception_ptr run_here(MpiJob& job, const std::shared_ptr<WorldState>& world, const WorldOptions& options,
                            const std::function<void(Communicator&)>& body, MPI_Comm& comm) {
  std::shared_ptr<Group> group;
  try {
    if (options.ranks > 1) comm = job.first_processes(options.ranks);
    group = group_of_all(world, comm, job.core_use(), options.settings);
  } catch (const std::exception& error) {
    const int rank = job.shape().rank;
    world->fail({Failure::Kind::peer, rank, fmt::format("rank {} failed: {}", rank, error.what())});
    return std::current_exception();
  }
  return run_rank(group, options.settings, body);
}

}  // namespace

void run_mpi_world(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  MpiJob& job = MpiJob::get();
  std::shared_ptr<WorldState> world;
  MPI_Comm comm = MPI_COMM_NULL;
  ProcessWorld steps;
  steps.prepare = [&](const std::shared_ptr<WorldState>& made) { world = made; };
  steps.run = [&] { return run_here(job, world, options, body, comm); };
  // What others have not taken yet lies in MPI, which moves it only while it is called.
  steps.meanwhile = [&] {
    int found = 0;
    if (comm != MPI_COMM_NULL) static_cast<void>(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, MPI_STATUS_IGNORE));
  };
  // The communicator of a world that failed is left to MPI, with what was under way on it.
  steps.close = [&](bool well) {
    if (well && comm != MPI_COMM_NULL) check_mpi(MPI_Comm_free(&comm), "MPI_Comm_free");
  };
  run_process_world(job.control(), job.shape(), options, steps);
}

JobConnection mpi_connection() {
  MpiJob& job = MpiJob::get();
  return {&job.control(), &job.lifeline()};
}

}  // namespace tandem
