// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "core/batch_source.h"
#include "core/fault_script.h"
#include "core/io/file_operations.h"
#include "optimized/comm/communicator.h"
#include "optimized/engine/engine.h"

namespace tandem {

/// What a scripted fault does where processes cannot be killed: thrown by the rank that it strikes.
class FaultStruck : public Error {
  using Error::Error;
};

struct FaultInjectorOptions {
  std::vector<Fault> faults;
  /// Faults that have struck are appended here before they do, so that a restarted run knows; empty: only this object knows.
  std::filesystem::path struck_file;
  /// true: kill and lose throw FaultStruck, and a hang ends with FaultStruck when release() is called. false: signals.
  bool in_process = false;
  std::filesystem::path checkpoints;                     ///< for corrupt
  int supervisor_process = 0;                            ///< for supervisor; 0: there is none
  std::function<void(std::int64_t beats)> lose_beats{};  ///< for heartbeat
  std::function<void(const Fault&)> before_end{};        ///< of kill, lose and hang, on the rank's thread
  std::function<void()> preempt{};                       ///< empty: SIGTERM to this process
};

/// Carries out a script of faults in one process. Called from the threads of its ranks at once.
///
/// A fault strikes once in a run. One that lasts for several steps strikes in its first passage through each of them, in the
/// attempt that it began in: a step that is computed again (retry, rollback, restart) is as it should be. Only a poisoned batch
/// is always one. spike and disk_full strike all ranks of the process. Which number is struck is a function of the layout alone
/// (fault_effects.h): of weights (the copy that is updated, and the one that is computed with) and first moments, one in the
/// middle of the rank's largest tensor inside the blocks, so that a flip lets training go on and replicas part; of the first
/// output of a block, or the first part of the gradients, that the rank has in the step, one in the middle, so that a flip makes
/// it huge. corrupt waits for the first checkpoint where there is none.
class FaultInjector {
 public:
  explicit FaultInjector(FaultInjectorOptions options);
  ~FaultInjector();

  [[nodiscard]] bool empty() const noexcept;
  /// The rank begins a step (from 0): kill, hang, flip and nan of weights and moments, corrupt, preempt, ... strike here.
  void begin_step(std::int64_t step, int rank, Engine& engine);
  /// The rank is in the middle of a save or of loading a checkpoint, for the step (from 0) that is next: kill, lose, hang and
  /// preempt strike in the first from their step on. May not return.
  void during(FaultMoment moment, std::int64_t step, int rank);
  /// What the faults of activations and gradients, slow and spike need in the engine. Call it for each rank before its engine is
  /// made; hooks that are there already are kept, and see the values after the fault. The engine must not outlive this object.
  void add_hooks(EngineOptions& options, int rank);
  /// The data with its poisoned batches; null where there are none. Borrows.
  [[nodiscard]] std::unique_ptr<BatchSource> poisoned(const BatchSource& data) const;
  /// File operations that fail while the disk is full; null where they never are. Borrows.
  [[nodiscard]] FileOperations* files(FileOperations& inner);
  /// The rank's communicator with jitter and flipped messages; null where there are none. Borrows.
  [[nodiscard]] std::unique_ptr<Communicator> disturbed(Communicator& inner);
  /// Ends all hangs of in_process that are under way; where none is, the next one ends at once.
  void release();
  /// Ranks that lose() has struck in any attempt.
  [[nodiscard]] std::vector<int> lost_ranks() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem
