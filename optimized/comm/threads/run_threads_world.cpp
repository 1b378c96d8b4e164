// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/threads/cores.h"
#include "optimized/comm/threads/threads_communicator.h"
#include "optimized/comm/threads/world.h"

namespace tandem {
namespace {

// What each rank threw, and who was first.
class Outcomes {
 public:
  explicit Outcomes(int ranks) { errors_.resize(static_cast<std::size_t>(ranks)); }

  void add(int rank, std::exception_ptr error) noexcept {
    const std::scoped_lock lock(mutex_);
    errors_[static_cast<std::size_t>(rank)] = std::move(error);
    if (first_ < 0) first_ = rank;
  }

  // The exception of the rank that the world failed of, even where another rank's PeerError came out of its body earlier.
  void rethrow(const ThreadsWorld& world) const {
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

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

void run_rank(const std::shared_ptr<Group>& group, int rank, const std::function<void(Communicator&)>& body, Outcomes& outcomes) {
  ThreadsWorld& world = group->world();
  try {
    ThreadsCommunicator communicator(group, rank);
    body(communicator);
    communicator.require_none_dropped();
    world.mark_ended(rank);
  } catch (...) {
    std::exception_ptr error = std::current_exception();
    world.fail({Failure::Kind::peer, rank, fmt::format("rank {} failed: {}", rank, reason_of(error))});
    outcomes.add(rank, std::move(error));
  }
}

}  // namespace

void run_threads_world(const ThreadsWorldOptions& options, const std::function<void(Communicator&)>& body) {
  TANDEM_CHECK(options.ranks >= 1, fmt::format("{} ranks", options.ranks));
  TANDEM_CHECK(options.deadline.count() > 0, "the deadline must be positive");
  const auto clock_generation = static_cast<std::uint64_t>(Timeline::now_ns());
  const auto world = std::make_shared<ThreadsWorld>(options.ranks, options.deadline,
                                                    options.generation != 0 ? options.generation : clock_generation);
  std::vector<int> members(static_cast<std::size_t>(options.ranks));
  std::iota(members.begin(), members.end(), 0);
  const auto group = std::make_shared<Group>(world, std::move(members));
  world->add_sleepers(group);
  Outcomes outcomes(options.ranks);
  const std::vector<int> cores = options.bind_cores ? available_cores() : std::vector<int>{};
  const auto run_bound = [&](int rank) {
    const CoreBinding binding(share_of_cores(cores, options.ranks, rank));
    run_rank(group, rank, body, outcomes);
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

}  // namespace tandem
