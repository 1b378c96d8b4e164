// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace tandem {

/// What the environment says about the job of processes that this one belongs to. Read in one place and passed on from there.
struct JobEnvironment {
  enum class Launcher : std::uint8_t {
    none,      ///< this process is alone
    mpi,       ///< mpirun, or srun with PMI: MPI knows the others
    torchrun,  ///< RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    slurm,     ///< SLURM_PROCID, SLURM_NTASKS, SLURM_LAUNCH_NODE_IPADDR or the first of SLURM_NODELIST
  };
  Launcher launcher = Launcher::none;
  int rank = 0, processes = 1;
  std::optional<int> local_rank;  ///< on this host
  // Where rank 0 can be reached.
  std::string host;
  std::uint16_t port = 0;
  std::string generation;  ///< the same in all processes of one start of the job: "run 7, restart 1"
};

/// A variable of the environment; null: it is not set.
using EnvironmentVariable = std::function<const char*(const char* name)>;

/// Throws InputError naming the variable that is missing or wrong.
[[nodiscard]] JobEnvironment read_job_environment(const EnvironmentVariable& variable);

}  // namespace tandem
