// SPDX-License-Identifier: Apache-2.0
// The nccl transport of a build without NCCL.
#include "core/error.h"
#include "optimized/comm/nccl/nccl_world.h"

namespace tandem {
namespace {

[[noreturn]] void refuse() { throw InputError("--transport nccl: " + why_no_nccl()); }

}  // namespace

bool has_nccl() noexcept { return false; }
std::string why_no_nccl() {
  return "this build has no NCCL; install CUDA with nccl.h and configure it again, or use threads or mpi";
}
void run_nccl_world(const WorldOptions&, const std::function<void(Communicator&)>&) { refuse(); }
JobShape nccl_job_shape() { refuse(); }
int nccl_device() { refuse(); }
std::string nccl_description() { refuse(); }
int nccl_gpus() { refuse(); }
void require_whole_nccl_job() {}
void leave_nccl_job(int) noexcept {}

}  // namespace tandem
