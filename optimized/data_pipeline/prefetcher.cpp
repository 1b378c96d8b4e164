// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/prefetcher.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

PrefetchOptions checked(const PrefetchOptions& options) {
  TANDEM_CHECK(options.rows >= 0 && options.first_step >= 0 && options.first_step <= options.last_step,
               fmt::format("{} rows of steps [{}, {})", options.rows, options.first_step, options.last_step));
  TANDEM_CHECK(
      options.batches >= 0 && options.threads >= 1 && options.consumers >= 1,
      fmt::format("{} batches ahead by {} threads for {} consumers", options.batches, options.threads, options.consumers));
  PrefetchOptions result = options;
  if (options.pitfalls.on(Pitfall::prefetch_reads_on_demand)) result.batches = 0;
  return result;
}

}  // namespace

Prefetcher::Prefetcher(const BatchSource& source, const PrefetchOptions& options)
    : source_(source), options_(checked(options)), next_to_make_(options.first_step), asked_(options.first_step) {
  // More threads than batches ahead would never all have something to do.
  const std::int64_t threads = std::min({std::int64_t{options_.threads}, options_.batches, options_.last_step - asked_});
  try {
    for (std::int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    stop();  // those that could be started wait for work
    throw;
  }
}

Prefetcher::~Prefetcher() { stop(); }

void Prefetcher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  due_.notify_all();
  threads_.clear();
}

void Prefetcher::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    due_.wait(lock, [this] {
      const bool due = next_to_make_ < options_.last_step && next_to_make_ < asked_ + options_.batches;
      return stopping_ || (due && !rewinding_);
    });
    if (stopping_) return;
    make_next(lock);
  }
}

// The lock is held on entry and exit, not while the source works.
void Prefetcher::make_next(std::unique_lock<std::mutex>& lock) {
  const std::int64_t step = next_to_make_++;
  Slot& slot = slots_[step];
  lock.unlock();
  const Clock::time_point begin = Clock::now();
  std::shared_ptr<const Batch> batch;
  std::exception_ptr error;
  try {
    batch = std::make_shared<const Batch>(source_.training_batch(source_step(step), options_.rows));
  } catch (...) {
    error = std::current_exception();
  }
  const double seconds = seconds_since(begin);
  lock.lock();
  slot.batch = std::move(batch);
  slot.error = std::move(error);
  ++statistics_.made;
  statistics_.making_seconds += seconds;
  made_.notify_all();
}

void Prefetcher::count_ready() {
  std::int64_t ready = 0;
  for (const auto& [step, slot] : slots_) ready += slot.made() ? 1 : 0;
  statistics_.ready += ready;
  statistics_.most_held = std::max(statistics_.most_held, ready);
  ++statistics_.takes;
}

std::shared_ptr<const Batch> Prefetcher::take(std::int64_t step) {
  std::unique_lock lock(mutex_);
  TANDEM_CHECK(step >= options_.first_step && step < options_.last_step && step <= asked_,
               fmt::format("step {} of [{}, {}), {} is next", step, options_.first_step, options_.last_step, asked_));
  TANDEM_CHECK(step >= next_to_make_ || slots_.contains(step),
               fmt::format("step {} has been taken by all of {} consumers", step, options_.consumers));
  count_ready();
  if (step == asked_) {
    ++asked_;
    due_.notify_all();
  }
  const auto found = slots_.find(step);
  if (found == slots_.end() || !found->second.made()) {
    const Clock::time_point begin = Clock::now();
    if (options_.batches == 0 && step == next_to_make_) make_next(lock);
    made_.wait(lock, [&] { return slots_.contains(step) && slots_.at(step).made(); });
    ++statistics_.waits;
    statistics_.waited_seconds += seconds_since(begin);
  }
  Slot& slot = slots_.at(step);
  const std::shared_ptr<const Batch> batch = slot.batch;
  const std::exception_ptr error = slot.error;
  if (++slot.taken == options_.consumers) slots_.erase(step);
  if (error) std::rethrow_exception(error);
  return batch;
}

void Prefetcher::rewind(std::int64_t step) {
  TANDEM_CHECK(step >= 0 && step <= options_.last_step, fmt::format("step {} of {}", step, options_.last_step));
  std::unique_lock lock(mutex_);
  rewinding_ = true;
  made_.wait(lock, [this] { return std::ranges::all_of(slots_, [](const auto& slot) { return slot.second.made(); }); });
  slots_.clear();
  options_.first_step = std::min(options_.first_step, step);
  next_to_make_ = asked_ = step;
  rewinding_ = false;
  due_.notify_all();
}

PrefetchStatistics Prefetcher::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

// The step of the source. Planted: the steps that came before the resumed one are left out of every later epoch too.
std::int64_t Prefetcher::source_step(std::int64_t step) const {
  const std::int64_t epoch_steps = options_.rows == 0 ? 0 : source_.epoch_rows().value_or(0) / options_.rows;
  if (!options_.pitfalls.on(Pitfall::resume_skips_every_epoch) || epoch_steps == 0) return step;
  const std::int64_t skipped = options_.first_step % epoch_steps;
  const std::int64_t second_epoch = (options_.first_step / epoch_steps + 1) * epoch_steps;
  if (step < second_epoch) return step;
  const std::int64_t left = epoch_steps - skipped;
  const std::int64_t beyond = step - second_epoch;
  return second_epoch + beyond / left * epoch_steps + skipped + beyond % left;
}

}  // namespace tandem
