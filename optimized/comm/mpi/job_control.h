// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "optimized/comm/mpi/lifeline.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// What the processes of a job tell each other about the worlds that they make one after the other: when one begins, what became
/// of it, who is late and what it does. Every process takes part in every world, though the body runs on the first `ranks` only:
/// so that all of them know what became of it.
///
/// begin(), end() and leave() are called by one thread; the others by any.
class JobControl final : public Lifeline::Listener {
 public:
  /// What happens to the world under way, told by the listening thread.
  struct Hooks {
    std::function<void(const Failure&)> failed;  ///< on another rank; it travels on its own, need not be passed on
    std::function<void(int rank)> ended;         ///< the rank's body has returned
    std::function<std::string()> report;         ///< what this rank does and did last; must not block
    std::function<void(int from, const std::string& letter)> told{};  ///< what another process has told this one in this world
  };

  explicit JobControl(Lifeline& lifeline);

  /// Called once, when the job breaks.
  void on_broken(std::function<void(const Failure&)> broken);

  /// Comes to the next world of the job and waits for all other processes to do so. Returns its generation, which is rank 0's.
  /// Throws PeerError (a process has died or left), TimeoutError naming who is missing and what it does, ContractError where
  /// processes come with different numbers of ranks.
  std::uint64_t begin(int ranks, std::uint64_t generation, std::chrono::milliseconds deadline);
  void watch(Hooks hooks);

  /// Sends a letter to another process, for the world under way; letters of one process arrive in order, and wait for watch().
  /// Never blocks. At most 1 MiB.
  void tell(int to, const std::string& letter) noexcept;

  /// Tells all others that the world under way has failed.
  void fail(const Failure& failure) noexcept;

  /// This process's part of the world is over, well or as `own` says. Waits for all ranks to come here, as long as those that do
  /// not still answer. Returns what became of the world, the same in every process: the failure of the lowest rank whose own it
  /// is. A rank that has died or does not answer breaks the job; so does one that answers, but has not come `patience` after the
  /// world failed: its listening thread lives, its body hangs. `patience` 0: it is waited for.
  /// `meanwhile` is called every few milliseconds.
  [[nodiscard]] std::optional<Failure> end(const std::optional<Failure>& own, const std::function<void()>& meanwhile = {},
                                           std::chrono::milliseconds patience = {});

  /// What every process says about itself; nothing from those that do not answer in time.
  [[nodiscard]] std::vector<std::optional<std::string>> ask_all(std::chrono::milliseconds patience);

  /// The last act. False: the job is broken, or somebody did not come.
  [[nodiscard]] bool leave(int exit_status, std::chrono::milliseconds patience) noexcept;

  /// Set once a process has died, has left early, or does not answer.
  [[nodiscard]] std::optional<Failure> broken() const;
  void require_whole() const;

  void heard(int from, const Notice& notice) override;
  void lost(int rank) override;

 private:
  struct World {
    std::map<int, std::pair<int, std::uint64_t>> begun;  ///< by process: ranks and generation that it came with
    std::map<int, std::optional<Failure>> outcomes;      ///< by rank
    std::optional<Failure> failure;                      ///< the first that was heard
    std::vector<std::pair<int, std::string>> letters{};  ///< not handed over yet
  };
  using Lock = std::unique_lock<std::mutex>;

  void break_job(Failure failure);
  void heard_broken(const Failure& failure);
  void heard_failure(std::uint64_t number, const Failure& failure);
  void heard_outcome(int from, std::uint64_t number, const std::string& text);
  void hand_over_letters();
  [[nodiscard]] std::string own_report() const;
  void require_answers(Lock& lock, const std::function<bool(int rank)>& late, const std::string& before);
  void require_end(const World& world, std::chrono::milliseconds patience);
  [[noreturn]] void give_up_beginning(Lock& lock, const World& world);
  void require_equal(const World& world) const;

  Lifeline& lifeline_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t number_ = 0;  ///< of the world under way, counted in every process alike
  int world_ranks_ = 0;
  std::map<std::uint64_t, World> worlds_;  ///< the one under way, and what others are ahead
  std::map<int, int> left_;                ///< exit status by process
  std::optional<Failure> broken_;
  std::function<void(const Failure&)> on_broken_;
  std::mutex asking_;
  std::uint64_t question_ = 0;
  std::vector<std::optional<std::string>> answers_;
  mutable std::mutex hooks_mutex_;  // held while a hook runs, so that none runs after the world has taken them back
  Hooks hooks_;
};

/// Throws the failure as the exception of its kind.
[[noreturn]] void throw_failure(const Failure& failure);

}  // namespace tandem
