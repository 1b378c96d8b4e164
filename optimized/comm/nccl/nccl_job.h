// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "optimized/comm/mpi/job_control.h"
#include "optimized/comm/mpi/lifeline.h"
#include "optimized/comm/nccl/job_environment.h"
#include "optimized/comm/nccl/nccl_rank.h"
#include "optimized/comm/world.h"

namespace tandem {

/// The job of processes that this one belongs to, and the GPU that it works on. A process joins once in its life, so there is one
/// object, made at the first call of get().
class NcclJob {
 public:
  /// Joins the job. Collective the first time. Throws InputError where NCCL cannot be used here, and what meet() (rendezvous.h)
  /// throws.
  [[nodiscard]] static NcclJob& get();
  /// Null where nobody has joined.
  [[nodiscard]] static NcclJob* joined() noexcept;
  NcclJob(const NcclJob&) = delete;
  NcclJob& operator=(const NcclJob&) = delete;

  [[nodiscard]] JobShape shape() const noexcept { return {lifeline_->ranks(), lifeline_->rank()}; }
  [[nodiscard]] JobControl& control() noexcept { return *control_; }
  [[nodiscard]] int device_index() const noexcept { return device_index_; }
  [[nodiscard]] const NcclDevice& device() const noexcept { return device_; }
  [[nodiscard]] const std::string& description() const noexcept { return description_; }
  /// Each counted once, however many ranks share it.
  [[nodiscard]] int gpus() const noexcept { return gpus_; }
  /// Nothing where MPI began the job, since it ends it.
  void leave(int exit_status) noexcept;

 private:
  explicit NcclJob(const JobEnvironment& environment);
  void meet_others(const JobEnvironment& environment);
  void choose_device(const JobEnvironment& environment);

  std::unique_ptr<Lifeline> own_lifeline_;  // null: MPI's
  std::unique_ptr<JobControl> own_control_;
  const Lifeline* lifeline_ = nullptr;
  JobControl* control_ = nullptr;
  int device_index_ = 0;
  NcclDevice device_;
  std::string description_;
  int gpus_ = 1;
};

}  // namespace tandem
