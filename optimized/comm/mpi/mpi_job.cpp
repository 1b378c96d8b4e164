// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/mpi_job.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/usable_cores.h"
#include "optimized/comm/mpi/mpi_wire.h"
#include "optimized/comm/mpi/mpi_world.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kLineBytes = 1024;
constexpr int kMostCores = 1024;  // of a host, that are counted
// Of messages by which communicators are made: one at a time.
constexpr int kTag = 1;
// From the moment that the job breaks to that at which a process ends itself: the main path comes out of its operation within
// milliseconds, unless it computes; mpirun kills after two seconds.
constexpr std::chrono::milliseconds kGrace{700};

struct TheJob {
  std::function<void(const std::string&)> last_words;
  std::unique_ptr<MpiJob> job;
};

TheJob& the_job() {
  static TheJob job;
  return job;
}

// Collective. Processes may be bound to different cores: those of all of one host count.
CoreUse find_core_use(MPI_Comm world) {
  MPI_Comm host = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "MPI_Comm_split_type");
  int processes = 1;
  check_mpi(MPI_Comm_size(host, &processes), "MPI_Comm_size");
  std::array<std::uint8_t, kMostCores> used{};
  for (const int core : available_cores()) {
    if (core < kMostCores) used[static_cast<std::size_t>(core)] = 1;
  }
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, used.data(), kMostCores, MPI_UINT8_T, MPI_MAX, host), "MPI_Allreduce");
  check_mpi(MPI_Comm_free(&host), "MPI_Comm_free");
  return std::min<std::ptrdiff_t>(std::ranges::count(used, 1), usable_cores()) >= processes ? CoreUse::own : CoreUse::shared;
}

}  // namespace

MpiJob& MpiJob::get() {
  TheJob& the = the_job();
  if (!the.job) {
    the.job.reset(new MpiJob());
    if (the.last_words) the.job->set_last_words(the.last_words);
  }
  return *the.job;
}

MpiJob* MpiJob::joined() noexcept { return the_job().job.get(); }

MpiJob::MpiJob() {
  int provided = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  if (provided < MPI_THREAD_MULTIPLE) throw InputError("--transport mpi: this MPI cannot be called from several threads at once");
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(world_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  core_use_ = find_core_use(world_);
  exchange_addresses();
}

void MpiJob::exchange_addresses() {
  int rank = 0;
  int ranks = 1;
  check_mpi(MPI_Comm_rank(world_, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(world_, &ranks), "MPI_Comm_size");
  lifeline_ = std::make_unique<Lifeline>(rank, ranks);
  control_ = std::make_unique<JobControl>(*lifeline_);
  control_->on_broken([this](const Failure& failure) {
    const std::scoped_lock lock(mutex_);
    is_broken_ = true;
    reason_ = failure.message;
    changed_.notify_all();
  });
  const std::string line = lifeline_->here().to_line();
  TANDEM_CHECK(line.size() < kLineBytes, fmt::format("the addresses of this host are too many: {}", line));
  std::array<char, kLineBytes> mine{};
  std::memcpy(mine.data(), line.data(), line.size());
  std::vector<char> all(kLineBytes * static_cast<std::size_t>(ranks));
  check_mpi(MPI_Allgather(mine.data(), kLineBytes, MPI_CHAR, all.data(), kLineBytes, MPI_CHAR, world_), "MPI_Allgather");
  std::random_device random;
  std::uint64_t token = (std::uint64_t{random()} << 32) | random();
  check_mpi(MPI_Bcast(&token, 1, MPI_UINT64_T, 0, world_), "MPI_Bcast");
  std::vector<ProcessAddress> addresses;
  for (int i = 0; i < ranks; ++i) {
    addresses.push_back(ProcessAddress::from_line(all.data() + kLineBytes * static_cast<std::size_t>(i)));
  }
  lifeline_->connect(std::move(addresses), token, Clock::now() + 30s, *control_);
}

MPI_Comm MpiJob::first_processes(int ranks) {
  MPI_Group everybody = MPI_GROUP_NULL;
  MPI_Group chosen = MPI_GROUP_NULL;
  std::array<std::array<int, 3>, 1> range = {{{0, ranks - 1, 1}}};
  check_mpi(MPI_Comm_group(world_, &everybody), "MPI_Comm_group");
  check_mpi(MPI_Group_range_incl(everybody, 1, reinterpret_cast<int(*)[3]>(range.data()), &chosen), "MPI_Group_range_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_create_group(world_, chosen, kTag, &comm), "MPI_Comm_create_group");
  check_mpi(MPI_Group_free(&chosen), "MPI_Group_free");
  check_mpi(MPI_Group_free(&everybody), "MPI_Group_free");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

void MpiJob::set_last_words(std::function<void(const std::string&)> last_words) {
  last_words_ = std::move(last_words);
  undertaker_ = std::jthread([this](const std::stop_token& stop) { wait_for_the_end(stop); });
}

void MpiJob::wait_for_the_end(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait(lock, stop, [&] { return is_broken_; })) return;
  // True only when the main path has come to leave().
  changed_.wait_for(lock, stop, kGrace, [] { return false; });
  if (stop.stop_requested()) return;
  const std::string reason = reason_;
  lock.unlock();
  last_words_(reason);
}

void MpiJob::leave(int exit_status) noexcept {
  if (undertaker_.joinable()) {
    undertaker_.request_stop();
    undertaker_.join();
  }
  // In a broken job finalization would wait for the dead; the process ends without.
  if (control_->broken() || !control_->leave(exit_status, 60s)) return;
  static_cast<void>(MPI_Comm_free(&world_));
  static_cast<void>(MPI_Finalize());
}

void require_whole_job() {
  if (MpiJob* const job = MpiJob::joined()) job->control().require_whole();
}

void on_broken_job(std::function<void(const std::string&)> last_words) { the_job().last_words = std::move(last_words); }

void leave_job(int exit_status) noexcept {
  if (MpiJob* const job = MpiJob::joined()) job->leave(exit_status);
}

JobShape mpi_job_shape() { return MpiJob::get().shape(); }

bool has_mpi() noexcept { return true; }

}  // namespace tandem
