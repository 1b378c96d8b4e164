// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/run_threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/usable_cores.h"
#include "optimized/comm/messages/message_group.h"
#include "optimized/comm/messages/threads_wire.h"
#include "optimized/comm/rank_body.h"
#include "optimized/comm/threads/cores.h"
#include "optimized/comm/threads/shared_group.h"

namespace tandem {
namespace {

// What each rank threw, and who was first.
class Outcomes {
 public:
  explicit Outcomes(int ranks) { errors_.resize(static_cast<std::size_t>(ranks)); }

  void add(int rank, std::exception_ptr error) noexcept {
    if (!error) return;
    const std::scoped_lock lock(mutex_);
    errors_[static_cast<std::size_t>(rank)] = std::move(error);
    if (first_ < 0) first_ = rank;
  }

  // The exception of the rank that the world failed of, even where another rank's PeerError came out of its body earlier.
  void rethrow(const WorldState& world) const {
    if (first_ < 0) return;
    const int origin = world.failed() ? world.failure().rank : first_;
    const std::exception_ptr& error = errors_[static_cast<std::size_t>(origin)];
    std::rethrow_exception(error ? error : errors_[static_cast<std::size_t>(first_)]);
  }

 private:
  std::mutex mutex_;
  std::vector<std::exception_ptr> errors_;
  int first_ = -1;
};

struct LastWords {
  std::mutex mutex;
  std::function<void(const std::string&)> say;
};

LastWords& last_words() {
  static LastWords words;
  return words;
}

std::function<void(const std::string&)> words_to_say() {
  const std::scoped_lock lock(last_words().mutex);
  return last_words().say;
}

// Ends a process whose world has failed and does not come to its end.
class Undertaker {
 public:
  Undertaker(const WorldState& world, const WorldOptions& options)
      : world_(world),
        patience_(std::max<std::chrono::milliseconds>(options.deadline, kShortestPatience)),
        is_out_(static_cast<std::size_t>(options.ranks)),
        say_(words_to_say()) {
    if (say_ && options.ranks > 1) thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }

  void rank_is_out(int rank) noexcept { is_out_[static_cast<std::size_t>(rank)] = true; }

 private:
  static constexpr std::chrono::milliseconds kLook{50};
  // A rank that computes hears of the failure at its next communication.
  static constexpr std::chrono::milliseconds kShortestPatience{5000};

  void watch(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any never;
    std::unique_lock lock(mutex);
    std::optional<Clock::time_point> failed_at;
    while (!stop.stop_requested()) {
      never.wait_for(lock, stop, kLook, [] { return false; });
      if (!world_.failed()) continue;
      if (!failed_at) failed_at = Clock::now();
      const auto late = std::find(is_out_.begin(), is_out_.end(), false);
      if (stop.stop_requested() || late == is_out_.end() || Clock::now() < *failed_at + patience_) continue;
      say_(fmt::format("{}; rank {} has not ended {:.3g} s later: it hangs", world_.failure().message, late - is_out_.begin(),
                       std::chrono::duration<double>(patience_).count()));
      return;
    }
  }

  const WorldState& world_;
  std::chrono::milliseconds patience_;
  std::vector<std::atomic<bool>> is_out_;
  std::function<void(const std::string&)> say_;
  std::jthread thread_;  // last: it reads the others
};

// Messages where they have to take time or an algorithm of messages is asked for; otherwise the memory that all ranks share.
bool by_messages(const WorldSettings& settings) {
  return settings.link.has_value() || settings.algorithm != CollectiveAlgorithm::direct;
}

std::vector<std::shared_ptr<Group>> make_groups(const WorldOptions& options, const std::shared_ptr<WorldState>& world) {
  std::vector<int> members(static_cast<std::size_t>(options.ranks));
  std::iota(members.begin(), members.end(), 0);
  if (options.ranks == 1 || !by_messages(options.settings)) return make_shared_group(world, members);
  std::vector<std::shared_ptr<Group>> groups;
  for (auto& wire : make_threads_wires(world, options.settings.link)) {
    groups.push_back(make_message_group(world, std::move(wire), options.settings));
  }
  return groups;
}

}  // namespace

void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  const auto clock_generation = static_cast<std::uint64_t>(Timeline::now_ns());
  const auto world = std::make_shared<WorldState>(options.ranks, options.deadline,
                                                  options.generation != 0 ? options.generation : clock_generation);
  world->set_pitfalls(options.pitfalls);
  const std::vector<std::shared_ptr<Group>> groups = make_groups(options, world);
  Outcomes outcomes(options.ranks);
  const std::vector<int> cores = options.bind_cores ? available_cores() : std::vector<int>{};
  Undertaker undertaker(*world, options);
  const auto run_bound = [&](int rank) {
    const CoreBinding binding(share_of_cores(cores, options.ranks, rank));
    outcomes.add(rank, run_rank(groups[static_cast<std::size_t>(rank)], options.settings, body));
    undertaker.rank_is_out(rank);
  };
  {
    std::vector<std::jthread> threads;
    for (int rank = 1; rank < options.ranks; ++rank) {
      threads.emplace_back(run_bound, rank);
    }
    run_bound(0);
  }
  outcomes.rethrow(*world);
}

void on_hung_rank(std::function<void(const std::string& reason)> say) {
  const std::scoped_lock lock(last_words().mutex);
  last_words().say = std::move(say);
}

}  // namespace tandem
