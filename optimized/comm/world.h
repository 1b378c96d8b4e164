// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/pitfall.h"
#include "core/world_settings.h"
#include "optimized/comm/communicator.h"

namespace tandem {

struct WorldOptions {
  int ranks = 1;
  std::chrono::milliseconds deadline{60000};  ///< of each operation
  std::uint64_t generation = 0;               ///< 0: taken from the clock, so that later worlds of a process have higher ones
  WorldSettings settings{};
  /// threads: every rank's thread, and the threads that it starts, keep to their own share of the cores while the world runs,
  /// where the ranks share them evenly. Otherwise waking a rank can put two on one core, for milliseconds.
  bool bind_cores = true;
  PitfallSet pitfalls{};  ///< of the collectives over messages (optimized/collectives/peers.h)
};

/// Runs `body(communicator)` on every rank and rethrows the *first* failure (in time): the original exception of the rank that
/// failed, not the PeerErrors that it caused on the others. A body that drops a Work without waiting fails with ContractError.
///
/// threads: `ranks` threads of this process, joined before it returns. One rank runs on the calling thread without any
/// synchronisation. A thread cannot be ended from outside: a rank that hangs for good outside of operations keeps this call from
/// returning, after the others have timed out. With a link, messages take the time that it says.
///
/// mpi: this process is one rank of the job that mpirun or srun started; the first `ranks` processes take part, the others return
/// at once. The body runs once, on the calling thread. Failures of other processes come back as PeerError naming the rank. Throws
/// InputError where the job has fewer processes, or this build no MPI.
///
/// nccl: likewise, with a GPU for each process; torchrun may have started it, too (nccl/nccl_world.h, and what is other than
/// above in nccl/nccl_communicator.h).
///
/// With an adversary every communicator, the parts of split() too, is wrapped (adversary.h). With own parts the body gets the
/// communicator that they make of that.
void run_world(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// Ranks of the job and this process's place in it; {1, 0} for threads. mpi, nccl: joins the job at the first call.
struct JobShape {
  int processes = 1;
  int rank = 0;
};
[[nodiscard]] JobShape job_shape(const WorldSettings& settings);
/// The transports that this build has: "threads", "mpi", "nccl".
[[nodiscard]] std::vector<std::string> transports();

}  // namespace tandem
