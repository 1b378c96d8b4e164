// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/skip_list.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace tandem {

SkipList::SkipList(std::set<std::int64_t> batches, const PitfallSet& pitfalls)
    : batches_(std::move(batches)), pitfalls_(pitfalls) {}

std::int64_t SkipList::batch_of(std::int64_t step) const {
  std::int64_t batch = step;
  for (const std::int64_t skipped : batches_) {
    // Planted: what is listed is taken for a number of an update. The first entry says the same either way; each later one is off
    // by those before it.
    const std::int64_t reached = pitfalls_.on(Pitfall::skip_by_update_number) ? step : batch;
    if (skipped > reached) break;
    ++batch;
  }
  return batch;
}

void SkippingSource::set(SkipList list) {
  const std::lock_guard lock(mutex_);
  list_ = std::move(list);
}

SkipList SkippingSource::list() const {
  const std::lock_guard lock(mutex_);
  return list_;
}

std::int64_t SkippingSource::batch_of(std::int64_t step) const {
  const std::lock_guard lock(mutex_);
  return list_.batch_of(step);
}

Batch SkippingSource::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  return inner().training_rows(batch_of(step), global_rows, rows);
}

std::string SkippingSource::describe() const {
  const std::size_t skipped = list().batches().size();
  if (skipped == 0) return inner().describe();
  return fmt::format("{}, without {} batch{}", inner().describe(), skipped, skipped == 1 ? "" : "es");
}

}  // namespace tandem
