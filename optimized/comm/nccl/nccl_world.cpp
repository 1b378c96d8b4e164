// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_world.h"

#include <exception>
#include <memory>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/kernels.h"
#include "optimized/comm/mpi/process_world.h"
#include "optimized/comm/nccl/nccl_communicator.h"
#include "optimized/comm/nccl/nccl_job.h"

namespace tandem {
namespace {

void require_known_settings(const WorldSettings& settings) {
  if (settings.adversary) throw InputError("transport nccl: an adversary works with threads and mpi only; leave it out");
  if (settings.algorithm != CollectiveAlgorithm::direct && settings.algorithm != CollectiveAlgorithm::automatic) {
    throw InputError(
        "transport nccl: NCCL chooses its algorithms itself (environment variable NCCL_ALGO); leave --algorithm out");
  }
}

}  // namespace

bool has_nccl() noexcept { return true; }

std::string why_no_nccl() {
  std::string why = why_no_gpu("cuda");
  if (why.empty()) static_cast<void>(open_nccl("libnccl.so.2", &why));
  return why;
}

void run_nccl_world(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  require_known_settings(options.settings);
  NcclJob& job = NcclJob::get();
  JobControl& control = job.control();
  std::shared_ptr<NcclRank> rank;
  std::exception_ptr not_prepared;
  ProcessWorld steps;
  steps.prepare = [&](const std::shared_ptr<WorldState>& world) {
    const int number = job.shape().rank;
    try {
      rank = std::make_shared<NcclRank>(world, number, job.device(),
                                        [&control](int to, const std::string& letter) { control.tell(to, letter); });
    } catch (const std::exception& error) {
      // The others must hear of it.
      not_prepared = std::current_exception();
      world->fail({Failure::Kind::peer, number, fmt::format("rank {} failed: {}", number, error.what())});
    }
  };
  steps.told = [&](int from, const std::string& letter) {
    if (rank) rank->heard(from, letter);
  };
  steps.run = [&] { return rank ? run_nccl_rank(rank, body) : not_prepared; };
  steps.close = [&](bool well) {
    if (!rank) return;
    if (well) return rank->close_all();
    rank->abort_all();
  };
  run_process_world(control, job.shape(), options, steps);
}

JobShape nccl_job_shape() { return NcclJob::get().shape(); }
int nccl_device() { return NcclJob::get().device_index(); }
std::string nccl_description() { return NcclJob::get().description(); }
int nccl_gpus() { return NcclJob::get().gpus(); }

void require_whole_nccl_job() {
  if (NcclJob* const job = NcclJob::joined()) job->control().require_whole();
}

void leave_nccl_job(int exit_status) noexcept {
  if (NcclJob* const job = NcclJob::joined()) job->leave(exit_status);
}

}  // namespace tandem
