// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/process_world.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"

namespace tandem {
namespace {

// Long enough for processes that share their core with others to answer.
constexpr std::chrono::milliseconds kReportPatience{300};
// A rank that computes hears of a failure at its next communication, which is at most a step away; all others wait as long.
constexpr std::chrono::milliseconds kShortestPatience{5000};

// Tells the other processes when the world fails here, once.
class Messenger final : public WorldState::Sleepers {
 public:
  Messenger(JobControl& control, std::weak_ptr<WorldState> world) : control_(control), world_(std::move(world)) {}

  void wake() noexcept override {
    const std::shared_ptr<WorldState> world = world_.lock();
    if (world && world->failed() && !told_.exchange(true)) control_.fail(world->failure());
  }
  /// The failure came from another process, which tells everybody itself.
  void do_not_tell() noexcept { told_ = true; }

 private:
  JobControl& control_;
  const std::weak_ptr<WorldState> world_;
  std::atomic<bool> told_{false};
};

std::vector<RankFlights> flights_of_all(JobControl& control) {
  std::vector<RankFlights> flights;
  for (const std::optional<std::string>& answer : control.ask_all(kReportPatience)) {
    if (answer && !answer->empty()) flights.push_back(parse_rank_flights(*answer));
  }
  return flights;
}

std::string own_flights(WorldState& world) {
  const std::vector<RankFlights> flights = world.recorder().flights();
  return flights.empty() ? std::string() : serialise(flights.front());
}

void watch(JobControl& control, const std::shared_ptr<WorldState>& world, const std::shared_ptr<Messenger>& messenger,
           const ProcessWorld& steps) {
  control.watch({[world, messenger](const Failure& failure) {
                   messenger->do_not_tell();
                   world->fail(failure);
                 },
                 [world](int rank) { world->mark_ended(rank); }, [world] { return own_flights(*world); }, steps.told});
}

}  // namespace

void run_process_world(JobControl& control, const JobShape& job, const WorldOptions& options, const ProcessWorld& steps) {
  if (options.ranks > job.processes) {
    throw InputError(fmt::format("{} ranks are needed, but the job has {} process{}; start it with mpirun -n {}", options.ranks,
                                 job.processes, job.processes == 1 ? "" : "es", options.ranks));
  }
  control.require_whole();
  const auto clock_generation = static_cast<std::uint64_t>(Timeline::now_ns());
  const std::uint64_t generation =
      control.begin(options.ranks, options.generation != 0 ? options.generation : clock_generation, options.deadline);
  if (job.rank >= options.ranks) {
    if (const std::optional<Failure> failure = control.end({})) throw_failure(*failure);
    return;
  }
  const auto world = std::make_shared<WorldState>(options.ranks, options.deadline, generation);
  world->set_pitfalls(options.pitfalls);
  const auto messenger = std::make_shared<Messenger>(control, world);
  world->add_sleepers(messenger);
  world->set_flight_source([&control] { return flights_of_all(control); });
  if (steps.prepare) steps.prepare(world);
  watch(control, world, messenger, steps);
  const std::exception_ptr error = steps.run();
  const auto own = world->failed() ? std::optional(world->failure()) : std::nullopt;
  const std::optional<Failure> outcome = control.end(own, steps.meanwhile, std::max(options.deadline, kShortestPatience));
  if (steps.close) steps.close(!outcome);
  if (!outcome) return;
  if (error && outcome->rank == job.rank) std::rethrow_exception(error);
  throw_failure(*outcome);
}

}  // namespace tandem
