// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

namespace tandem {

/// A thread that carries out jobs one after the other, in the order in which they were handed over. Used by one other thread.
///
/// A job that throws ends the jobs behind it: they are dropped, and every wait for one of them, or for it, throws the same
/// exception, until drain() has taken note of it.
class TransferThread {
 public:
  using Ticket = std::int64_t;  ///< number of a job, from 1

  TransferThread();
  /// Finishes the job under way and drops the rest.
  ~TransferThread();
  TransferThread(const TransferThread&) = delete;
  TransferThread& operator=(const TransferThread&) = delete;

  /// What the job uses belongs to it until a wait for its ticket, or drain(), has returned.
  Ticket submit(std::function<void()> job);
  /// Blocks until the job has ended, and all before it.
  void wait(Ticket ticket);
  /// Drops what has not begun and blocks until no job runs. Forgets a failure: the thread is as new.
  void drain() noexcept;

 private:
  void run(const std::stop_token& stop);

  std::mutex mutex_;
  std::condition_variable_any submitted_;
  std::condition_variable ended_;
  std::deque<std::function<void()>> jobs_;
  Ticket last_submitted_ = 0;
  Ticket last_ended_ = 0;
  std::exception_ptr failure_;
  std::jthread thread_;  // the last member: it uses the others until it is joined
};

}  // namespace tandem
