// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/run_accounting.h"

#include <algorithm>

namespace tandem {
namespace {

double seconds(std::int64_t ns) { return static_cast<double>(ns) / 1e9; }

// Before these, the step that a rank shows is not that of the state that it will train.
bool knows_its_step(RunPhase phase) { return phase != RunPhase::start && phase != RunPhase::restore; }

}  // namespace

void RunAccounting::begin_attempt(std::uint64_t attempt, std::optional<std::int64_t> from, std::int64_t now_ns) {
  attempt_ = attempt;
  from_ = from;
  // What failures since the last step have cost; of each attempt what it had done itself, or steps would be lost twice.
  if (has_first_step_) lost_steps_ = 0;
  if (from) lost_steps_ += std::max<std::int64_t>(0, steps_ - *from);
  most_before_ = std::max(most_before_, from.value_or(0));
  steps_ = from.value_or(0);
  last_beat_ns_ = now_ns;
  has_first_step_ = false;
  counted_from_.reset();
}

bool RunAccounting::hear(const Heartbeat& beat, std::int64_t now_ns) {
  if (beat.attempt != attempt_) return false;
  last_beat_ns_ = now_ns;
  if (!knows_its_step(beat.phase)) return false;
  if (!from_) {
    most_before_ = std::max(most_before_, beat.step);
    steps_ = beat.step;
  }
  // Further back than expected: the newest state was not to be had after all.
  if (!from_ || (!has_first_step_ && beat.step < *from_)) {
    if (from_) lost_steps_ += *from_ - beat.step;
    from_ = beat.step;
    steps_ = beat.step;
  }
  if (!counted_from_ && !down_since_ns_) counted_from_ = counted_to_ = {.step = steps_, .ns = now_ns};
  if (beat.step <= steps_) return false;
  steps_ = beat.step;
  counted_to_ = {.step = steps_, .ns = now_ns};
  if (has_first_step_) return false;
  has_first_step_ = true;
  if (down_since_ns_) {
    down_seconds_ += seconds(now_ns - *down_since_ns_);
    down_since_ns_.reset();
    counted_from_ = counted_to_;
  }
  return true;
}

void RunAccounting::learn(std::int64_t steps) {
  if (steps <= steps_) return;
  steps_ = steps;
  if (counted_from_) counted_to_.step = steps;
}

void RunAccounting::end_attempt() {
  if (counted_from_ && counted_to_.step > counted_from_->step) {
    const auto steps = static_cast<double>(counted_to_.step - counted_from_->step);
    const std::int64_t redone =
        std::clamp(most_before_ - counted_from_->step, std::int64_t{0}, counted_to_.step - counted_from_->step);
    const double all_seconds = seconds(counted_to_.ns - counted_from_->ns);
    const double share = static_cast<double>(redone) / steps;
    redone_seconds_ += share * all_seconds;
    useful_seconds_ += (1 - share) * all_seconds;
  }
  counted_from_.reset();
  most_before_ = std::max(most_before_, steps_);
}

void RunAccounting::failed(std::int64_t detected_ns) {
  if (!down_since_ns_) down_since_ns_ = detected_ns;
}

void RunAccounting::finish(std::int64_t now_ns) {
  if (down_since_ns_) down_seconds_ += seconds(now_ns - *down_since_ns_);
  down_since_ns_.reset();
}

}  // namespace tandem
