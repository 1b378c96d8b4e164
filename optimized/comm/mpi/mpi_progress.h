// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

/// What the transfers of one MpiWire share: the receives that wait for their headers, and a thread that goes on with all of them
/// while nobody waits for one.
class MpiProgress {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    /// Takes the header if it has come, and says whether it has. Called by one thread at a time.
    virtual bool take_header() noexcept = 0;
  };

  /// Borrows the communicator.
  explicit MpiProgress(MPI_Comm comm);

  void add(Receiver& receiver);
  /// Afterwards nobody calls it any more.
  void remove(Receiver& receiver) noexcept;
  /// Takes what headers have come; nothing where another thread does so at this moment.
  void look();

  /// A transfer that the thread looks after begins, and wakes it.
  void transfer_begins();
  void transfer_ends() noexcept { under_way_.fetch_sub(1); }
  /// A thread waits for a transfer, and calls MPI meanwhile.
  void wait_begins() noexcept { waiters_.fetch_add(1); }
  void wait_ends() noexcept { waiters_.fetch_sub(1); }

  [[nodiscard]] std::int64_t looks_of_thread() const noexcept { return looks_.load(); }

  /// On return the thread makes no call to MPI any more.
  void stop() noexcept;

 private:
  void go_on(const std::stop_token& stop);

  const MPI_Comm comm_;
  std::mutex mutex_;
  std::vector<Receiver*> waiting_;
  std::atomic<int> under_way_{0};
  std::atomic<int> waiters_{0};
  std::atomic<std::int64_t> looks_{0};
  std::mutex sleep_mutex_;
  std::condition_variable_any changed_;
  std::jthread thread_;
};

}  // namespace tandem
