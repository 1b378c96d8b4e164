// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/mpi_world.h"

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "optimized/comm/messages/message_group.h"
#include "optimized/comm/mpi/mpi_job.h"
#include "optimized/comm/mpi/mpi_wire.h"
#include "optimized/comm/rank_body.h"
#include "optimized/comm/threads/shared_group.h"
#include "optimized/comm/world_state.h"

namespace tandem {
namespace {

// Long enough for processes that share their core with others to answer.
constexpr std::chrono::milliseconds kReportPatience{300};

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

void watch(JobControl& control, const std::shared_ptr<WorldState>& world, const std::shared_ptr<Messenger>& messenger) {
  control.watch({[world, messenger](const Failure& failure) {
                   messenger->do_not_tell();
                   world->fail(failure);
                 },
                 [world](int rank) { world->mark_ended(rank); }, [world] { return own_flights(*world); }});
}

std::shared_ptr<Group> group_of_all(const std::shared_ptr<WorldState>& world, MPI_Comm comm, const WorldSettings& settings) {
  if (comm == MPI_COMM_NULL) return make_shared_group(world, {0}).front();
  return make_message_group(world,
                            std::make_unique<MpiWire>(comm,
                                                      [state = std::weak_ptr(world)] {
                                                        const auto alive = state.lock();
                                                        return !alive || alive->failed();
                                                      }),
                            settings);
}

// Whatever goes wrong before the body begins is a failure of this rank, too: the others must hear of it.
std::exception_ptr run_here(MpiJob& job, const std::shared_ptr<WorldState>& world, const WorldOptions& options,
                            const std::function<void(Communicator&)>& body, MPI_Comm& comm) {
  std::shared_ptr<Group> group;
  try {
    if (options.ranks > 1) comm = job.first_processes(options.ranks);
    group = group_of_all(world, comm, options.settings);
  } catch (const std::exception& error) {
    const int rank = job.shape().rank;
    world->fail({Failure::Kind::peer, rank, fmt::format("rank {} failed: {}", rank, error.what())});
    return std::current_exception();
  }
  return run_rank(group, options.settings, body);
}

}  // namespace

void run_mpi_world(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  MpiJob& job = MpiJob::get();
  JobControl& control = job.control();
  const auto [processes, rank] = job.shape();
  if (options.ranks > processes) {
    throw InputError(fmt::format("{} ranks are needed, but the job has {} process{}; start it with mpirun -n {}", options.ranks,
                                 processes, processes == 1 ? "" : "es", options.ranks));
  }
  control.require_whole();
  const auto clock_generation = static_cast<std::uint64_t>(Timeline::now_ns());
  const std::uint64_t generation =
      control.begin(options.ranks, options.generation != 0 ? options.generation : clock_generation, options.deadline);
  if (rank >= options.ranks) {
    if (const std::optional<Failure> failure = control.end({})) throw_failure(*failure);
    return;
  }
  const auto world = std::make_shared<WorldState>(options.ranks, options.deadline, generation);
  world->set_pitfalls(options.pitfalls);
  const auto messenger = std::make_shared<Messenger>(control, world);
  world->add_sleepers(messenger);
  world->set_flight_source([&control] { return flights_of_all(control); });
  watch(control, world, messenger);
  MPI_Comm comm = MPI_COMM_NULL;
  const std::exception_ptr error = run_here(job, world, options, body, comm);
  const auto own = world->failed() ? std::optional(world->failure()) : std::nullopt;
  // What others have not taken yet lies in MPI, which moves it only while it is called.
  const std::optional<Failure> outcome = control.end(own, [&] {
    int found = 0;
    if (comm != MPI_COMM_NULL) static_cast<void>(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, MPI_STATUS_IGNORE));
  });
  if (!outcome) {
    if (comm != MPI_COMM_NULL) check_mpi(MPI_Comm_free(&comm), "MPI_Comm_free");
    return;
  }
  // The communicator of a world that failed is left to MPI, with what was under way on it.
  if (error && outcome->rank == rank) std::rethrow_exception(error);
  throw_failure(*outcome);
}

}  // namespace tandem
