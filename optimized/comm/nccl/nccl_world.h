// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "optimized/comm/communicator.h"
#include "optimized/comm/world.h"

namespace tandem {

// The nccl transport behind run_world() and job_shape() (optimized/comm/world.h): one process for each rank, each with a GPU. In
// a build without NCCL the first is false and the others that do something throw InputError.
//
// Processes find each other by MPI where mpirun started them, else by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT,
// as torchrun sets them, else by srun's variables (job_environment.h); without any of these a process is alone. Rank r of a host
// takes GPU r modulo the GPUs that it sees. Ranks may share a GPU, for numerics: their times mean nothing.

[[nodiscard]] bool has_nccl() noexcept;
/// Why it cannot be used here, in one line; empty: it can. Joins nothing.
[[nodiscard]] std::string why_no_nccl();
void run_nccl_world(const WorldOptions& options, const std::function<void(Communicator&)>& body);
/// Joins the job at the first call.
[[nodiscard]] JobShape nccl_job_shape();
/// The device that this process computes on; its kernels must be made for it. Joins the job.
[[nodiscard]] int nccl_device();
/// "NCCL 2.28.9, 4 ranks on 2 hosts", "...; ranks share GPUs: times mean nothing". Joins the job.
[[nodiscard]] std::string nccl_description();
/// GPUs of the job; fewer than ranks where they share some. Joins the job.
[[nodiscard]] int nccl_gpus();

// Of a job that was not begun by MPI, as their namesakes in mpi/mpi_world.h, which are those of one that was.
void require_whole_nccl_job();
void leave_nccl_job(int exit_status) noexcept;

}  // namespace tandem
