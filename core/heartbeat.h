// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>

namespace tandem {

/// What a rank is busy with. Each may take its own time: what is long for a step is short for reading a checkpoint.
enum class RunPhase : std::uint8_t { start, restore, data, train, evaluate, checkpoint, finished };
inline constexpr std::size_t kRunPhases = 7;
[[nodiscard]] std::string_view name(RunPhase phase);

/// Sign of life of one rank. Who sends it is not who works: beats of a rank that hangs go on, its `progress` does not.
struct Heartbeat {
  std::uint64_t attempt = 0;  ///< of the run: 0, then one more with every restart; others are not heard
  int rank = 0;
  std::uint64_t sequence = 0;  ///< of this rank's beats in this attempt
  std::int64_t step = 0;       ///< steps done
  RunPhase phase = RunPhase::start;
  std::uint64_t progress = 0;  ///< grows whenever the rank gets something done
  bool waiting = false;        ///< for another rank, which then is the one that hangs
  std::int64_t busy_ns = 0;    ///< own work in this attempt, without waiting for others
};

/// What one rank's thread says about itself, read by the thread that sends its beats. Plain stores: costs nanoseconds.
struct ProgressSlot {
  std::atomic<std::int64_t> step{0};
  std::atomic<RunPhase> phase{RunPhase::start};
  std::atomic<std::uint64_t> progress{0};
  std::atomic<bool> waiting{false};
  std::atomic<std::int64_t> busy_ns{0};
  std::atomic<bool> is_here{false};  ///< the rank lives in this process

  void advance() noexcept { progress.store(progress.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  /// Whoever reads this phase (acquire) sees the step that was stored before.
  void enter(RunPhase now) noexcept {
    phase.store(now, std::memory_order_release);
    advance();
  }
};

/// The slots of all ranks of a run, by rank.
class ProgressBoard {
 public:
  explicit ProgressBoard(int ranks) : slots_(static_cast<std::size_t>(ranks)) {}
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(slots_.size()); }
  [[nodiscard]] ProgressSlot& slot(int rank) { return slots_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const ProgressSlot& slot(int rank) const { return slots_[static_cast<std::size_t>(rank)]; }

 private:
  std::deque<ProgressSlot> slots_;
};

}  // namespace tandem
