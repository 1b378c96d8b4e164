// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cli/job.h"
#include "cli/train_options.h"
#include "core/heartbeat.h"
#include "optimized/training/trainer.h"

namespace tandem {

/// What looks after a training run from inside one of its processes: signs of life for a supervisor, scripted faults, metrics and
/// incidents for people.
class TrainWatch {
 public:
  /// Signs of life go out from here on, where the run is supervised. Throws InputError.
  TrainWatch(const TrainArguments& arguments, const Job& job);
  ~TrainWatch();
  TrainWatch(const TrainWatch&) = delete;
  TrainWatch& operator=(const TrainWatch&) = delete;

  /// What this process does before its ranks run.
  void enter(RunPhase phase);
  /// Sets what a watched run has; everything that is called borrows this object. Throws InputError, IoError.
  void attach(TrainOptions& options, const TrainPlan& plan);

  /// The run is drawn; lines about single steps are not for this terminal.
  [[nodiscard]] bool is_live() const noexcept;
  /// Takes the view away, so that other output can follow.
  void clear();
  /// A line on standard output, the view taken away for it.
  void say(const std::string& line);
  /// The view stays as it is.
  void finish();

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem
