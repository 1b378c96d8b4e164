// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "core/world_settings.h"
#include "harness/runner.h"
#include "optimized/comm/world.h"

namespace tandem {

/// The processes that run a command together: one where ranks are threads. All of them do the same; the first one alone
/// prints and writes files. Its functions are collective.
class Job {
 public:
  /// Joins the job.
  explicit Job(const WorldSettings& settings) : settings_(settings), shape_(job_shape(settings)) {}

  [[nodiscard]] int processes() const noexcept { return shape_.processes; }
  [[nodiscard]] int rank() const noexcept { return shape_.rank; }
  [[nodiscard]] bool leads() const noexcept { return shape_.rank == 0; }

  /// Does something in the first process alone; an InputError of it is thrown in all.
  void on_leader(const std::function<void()>& action) const;
  /// The value of the first process.
  [[nodiscard]] std::vector<double> of_leader(const std::vector<double>& values) const;
  [[nodiscard]] std::string of_leader(const std::string& text) const;
  /// The exit status of the first process.
  [[nodiscard]] int agree_on_status(int status) const;

  /// For RunnerOptions::agree: the worst of what the processes say of a case. `stop` becomes true where any of them was asked to
  /// stop. Throws PeerError or TimeoutError where the job has broken.
  void agree(CaseResult& result, std::atomic<bool>& stop) const;

 private:
  WorldSettings settings_;
  JobShape shape_;
};

/// Cases that need more ranks than the job has processes, or measure what a single process does, say so and are skipped.
void skip_what_does_not_fit(CaseList& cases, const Job& job);

}  // namespace tandem
