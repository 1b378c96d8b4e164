// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/mpi_progress.h"

#include <chrono>

namespace tandem {
namespace {

// Between calls to MPI while a rank computes; a message of a megabyte takes about three times as long.
constexpr std::chrono::microseconds kProgressInterval{100};

}  // namespace

MpiProgress::MpiProgress(MPI_Comm comm) : comm_(comm), thread_([this](const std::stop_token& stop) { go_on(stop); }) {}

void MpiProgress::add(Receiver& receiver) {
  const std::scoped_lock lock(mutex_);
  waiting_.push_back(&receiver);
}

void MpiProgress::remove(Receiver& receiver) noexcept {
  const std::scoped_lock lock(mutex_);
  std::erase(waiting_, &receiver);
}

void MpiProgress::look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) std::erase_if(waiting_, [](Receiver* receiver) { return receiver->take_header(); });
}

void MpiProgress::transfer_begins() {
  if (under_way_.fetch_add(1) > 0) return;
  { const std::scoped_lock lock(sleep_mutex_); }
  changed_.notify_all();
}

void MpiProgress::stop() noexcept {
  thread_.request_stop();
  thread_.join();
}

// MPI proceeds with all that it has whenever it is called.
void MpiProgress::go_on(const std::stop_token& stop) {
  std::unique_lock lock(sleep_mutex_);
  while (changed_.wait(lock, stop, [this] { return under_way_.load() > 0; })) {
    lock.unlock();
    if (waiters_.load() == 0) {
      looks_.fetch_add(1);
      look();
      int found = 0;
      static_cast<void>(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &found, MPI_STATUS_IGNORE));
    }
    lock.lock();
    if (changed_.wait_for(lock, stop, kProgressInterval, [] { return false; })) return;
  }
}

}  // namespace tandem
