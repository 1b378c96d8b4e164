// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/batch_source.h"
#include "core/pitfall.h"

namespace tandem {

struct PrefetchOptions {
  std::int64_t rows = 1;        ///< of a global batch
  std::int64_t first_step = 0;  ///< of the run: where a resumed one goes on
  std::int64_t last_step = 0;   ///< the first that is not taken
  std::int64_t batches = 2;     ///< made ahead of the newest step that is asked for; 0: when it is asked for, by who asks
  int threads = 1;              ///< that make them
  int consumers = 1;            ///< ranks of this process: each takes every step once
  PitfallSet pitfalls;
};

/// Of all consumers together.
struct PrefetchStatistics {
  std::int64_t takes = 0;
  std::int64_t waits = 0;      ///< takes whose batch was not ready
  double waited_seconds = 0;   ///< in those takes, the making included where the consumer makes it
  std::int64_t ready = 0;      ///< batches ready at the time of a take, summed over the takes
  std::int64_t made = 0;       ///< batches: each step once, however many consumers
  double making_seconds = 0;   ///< in the source, summed over threads
  std::int64_t most_held = 0;  ///< largest number of batches made and not yet taken by all
};

/// Makes the batches of the next steps while the present one computes. Which thread makes a batch and when never shows in it: a
/// batch is training_batch(step, rows) of the source, and a run with and without prefetching is the same to the last bit.
///
/// Memory: `batches` batches, and those that some consumers have taken and others not yet.
class Prefetcher {
 public:
  /// Borrows `source`, whose training_batch is called from `threads` threads at once. Throws ContractError where a number is out
  /// of range. Starts making the first steps.
  Prefetcher(const BatchSource& source, const PrefetchOptions& options);
  /// Waits for the batches under way, for no others.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// The batch of `step`, waiting until it is made. From any thread; every consumer takes every step from first_step on once, in
  /// order, and the same batch is handed to all of them. Throws ContractError for a step out of range, taken by all already, or
  /// beyond the one that is next; what the source threw when it made this step, to every consumer.
  [[nodiscard]] std::shared_ptr<const Batch> take(std::int64_t step);

  /// The next step is this one, for all consumers; what was made is thrown away, since the source may give other batches now.
  /// Waits for those under way. Of one thread, while no consumer is in take(): where there are several, between two barriers.
  void rewind(std::int64_t step);

  [[nodiscard]] PrefetchStatistics statistics() const;

 private:
  struct Slot {
    std::shared_ptr<const Batch> batch;
    std::exception_ptr error;
    int taken = 0;
    [[nodiscard]] bool made() const noexcept { return batch != nullptr || error != nullptr; }
  };

  void work();
  void stop();
  void make_next(std::unique_lock<std::mutex>& lock);
  void count_ready();
  [[nodiscard]] std::int64_t source_step(std::int64_t step) const;

  const BatchSource& source_;
  PrefetchOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable due_;         ///< a further step may be made, or all is over
  std::condition_variable made_;        ///< a batch is ready
  std::map<std::int64_t, Slot> slots_;  ///< by step: under way, or made and not yet taken by all
  std::int64_t next_to_make_ = 0;
  std::int64_t asked_ = 0;  ///< one beyond the newest step that a consumer asked for
  bool stopping_ = false;
  bool rewinding_ = false;
  PrefetchStatistics statistics_;
  std::vector<std::jthread> threads_;
};

}  // namespace tandem
