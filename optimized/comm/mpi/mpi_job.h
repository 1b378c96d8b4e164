// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "optimized/comm/mpi/job_control.h"
#include "optimized/comm/mpi/lifeline.h"
#include "optimized/comm/mpi/mpi_wire.h"
#include "optimized/comm/world.h"

namespace tandem {

/// The job of processes that mpirun or srun started, of which this process is one. MPI can be begun once in the life of a process
/// and ended once, so there is one object, made at the first call of get().
class MpiJob {
 public:
  /// Joins the job: MPI_Init, then the lifeline. Collective the first time. Throws InputError where this MPI cannot be called
  /// from several threads, IoError where processes do not reach each other.
  [[nodiscard]] static MpiJob& get();
  /// Null where nobody has joined.
  [[nodiscard]] static MpiJob* joined() noexcept;
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  [[nodiscard]] JobShape shape() const noexcept { return {lifeline_->ranks(), lifeline_->rank()}; }
  [[nodiscard]] JobControl& control() noexcept { return *control_; }
  [[nodiscard]] const Lifeline& lifeline() const noexcept { return *lifeline_; }

  /// Of this process's host.
  [[nodiscard]] CoreUse core_use() const noexcept { return core_use_; }

  /// A communicator of the first `ranks` processes, of which this is one; collective over them.
  [[nodiscard]] MPI_Comm first_processes(int ranks);

  /// Calls `last_words` on a thread of its own where the job breaks and leave() does not follow.
  void set_last_words(std::function<void(const std::string&)> last_words);
  void leave(int exit_status) noexcept;

 private:
  MpiJob();
  void exchange_addresses();
  void wait_for_the_end(const std::stop_token& stop);

  MPI_Comm world_ = MPI_COMM_NULL;
  CoreUse core_use_ = CoreUse::shared;
  std::unique_ptr<Lifeline> lifeline_;
  std::unique_ptr<JobControl> control_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  bool is_broken_ = false;
  std::string reason_;
  std::function<void(const std::string&)> last_words_;
  std::jthread undertaker_;
};

}  // namespace tandem
