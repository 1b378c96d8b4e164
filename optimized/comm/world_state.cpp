// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/world_state.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/usable_cores.h"

namespace tandem {
namespace {

// Worlds are made often.
int cores_of_the_process() {
  static const int cores = usable_cores();
  return cores;
}

}  // namespace

WorldState::WorldState(int ranks, std::chrono::milliseconds deadline, std::uint64_t generation)
    : ranks_(ranks),
      deadline_(deadline),
      generation_(generation),
      oversubscribed_(ranks > cores_of_the_process()),
      ended_(static_cast<std::size_t>(ranks)) {}

Patience WorldState::patience(bool foreground) const noexcept {
  if (!foreground) return {.spins = 100, .yields = 0};
  if (oversubscribed_) return {.spins = 20, .yields = 40};
  return {.spins = 1000, .yields = 20};
}

void WorldState::fail(Failure failure) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (failed_.load()) return;
    failure_ = std::move(failure);
    failed_.store(true);
  }
  wake_all();
}

void WorldState::fail_by_device(int rank) noexcept {
  try {
    throw;
  } catch (const std::exception& error) {
    fail({Failure::Kind::peer, rank, fmt::format("rank {} failed: {}", rank, error.what())});
  } catch (...) {
    fail({Failure::Kind::peer, rank, fmt::format("rank {} failed", rank)});
  }
}

void WorldState::throw_failure(const std::string& during) const {
  const std::string what = fmt::format("{} (during {})", failure_.message, during);
  switch (failure_.kind) {
    case Failure::Kind::timeout: throw TimeoutError(what);
    case Failure::Kind::contract: throw ContractError(what);
    case Failure::Kind::peer: break;
  }
  throw PeerError(failure_.rank, what);
}

void WorldState::mark_ended(int rank) noexcept {
  ended_[static_cast<std::size_t>(rank)].store(true);
  any_ended_.store(true);
  wake_all();
}

void WorldState::add_sleepers(std::weak_ptr<Sleepers> sleepers) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(sleepers_, [](const auto& known) { return known.expired(); });
  sleepers_.push_back(std::move(sleepers));
}

void WorldState::wake_all() noexcept {
  // Woken outside of the lock: the last owner of a group may be the reference taken here.
  std::vector<std::shared_ptr<Sleepers>> alive;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& known : sleepers_) {
      if (auto sleepers = known.lock()) alive.push_back(std::move(sleepers));
    }
  }
  for (const auto& sleepers : alive) sleepers->wake();
}

}  // namespace tandem
