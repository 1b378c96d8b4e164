// SPDX-License-Identifier: Apache-2.0
#include "core/timeline.h"

#include <algorithm>
#include <utility>

namespace tandem {

std::string_view name(Activity activity) {
  switch (activity) {
    case Activity::compute: return "compute";
    case Activity::optimizer: return "optimizer";
    case Activity::transfer: return "transfer";
    case Activity::wait: return "wait";
    case Activity::data: return "data";
    case Activity::checkpoint: return "checkpoint";
    case Activity::step: return "step";
  }
  return "?";
}

std::string_view name(Purpose purpose) {
  switch (purpose) {
    case Purpose::gradient: return "gradient";
    case Purpose::parameter: return "parameter";
    case Purpose::activation: return "activation";
    case Purpose::other: return "other";
  }
  return "?";
}

void Timeline::record(Span span) {
  if (!enabled_) return;
  const std::scoped_lock lock(mutex_);
  spans_.push_back(std::move(span));
  if (most_ == 0 || spans_.size() <= most_) return;
  const std::size_t doomed = spans_.size() - most_ / 2;
  spans_.erase(spans_.begin(), spans_.begin() + static_cast<std::ptrdiff_t>(doomed));
  dropped_ += doomed;
}

void Timeline::keep_last(std::size_t most) {
  const std::scoped_lock lock(mutex_);
  most_ = most;
}

std::vector<Span> Timeline::spans() const { return spans_from(0); }

std::vector<Span> Timeline::spans_from(std::size_t count) const {
  const std::scoped_lock lock(mutex_);
  const std::size_t first = std::min(count - std::min(count, dropped_), spans_.size());
  return {spans_.begin() + static_cast<std::ptrdiff_t>(first), spans_.end()};
}

std::size_t Timeline::count() const {
  const std::scoped_lock lock(mutex_);
  return dropped_ + spans_.size();
}

void Timeline::clear() {
  const std::scoped_lock lock(mutex_);
  spans_.clear();
  dropped_ = 0;
}

SpanScope::SpanScope(Timeline* timeline, std::string name, Activity activity, int step, Lane lane)
    : range_(timeline, name, activity), timeline_(timeline != nullptr && timeline->enabled() ? timeline : nullptr) {
  if (timeline_ == nullptr) return;
  span_.name = std::move(name);
  span_.activity = activity;
  span_.step = step;
  span_.lane = lane;
  span_.begin_ns = Timeline::now_ns();
}

SpanScope::~SpanScope() {
  if (timeline_ == nullptr) return;
  span_.end_ns = Timeline::now_ns();
  timeline_->record(std::move(span_));
}

}  // namespace tandem
