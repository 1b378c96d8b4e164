// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/adversary/courier.h"

#include <algorithm>

#include <fmt/format.h>

namespace tandem::adversary {

Courier::Courier(const AdversaryScript& script, int rank)
    : longest_seconds_(script.longest_delay_seconds), rank_(rank), rng_(script.seed, fmt::format("adversary of rank {}", rank)) {}

Courier::~Courier() = default;

Clock::duration Courier::draw() noexcept {
  const double unit = rng_.next_unit();
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(longest_seconds_ * unit * unit * unit));
}

Courier::Delays Courier::next_delays() noexcept {
  Delays delays;
  delays.before = draw();
  delays.after = draw();
  return delays;
}

void Courier::send(const void* owner, Route& route, std::shared_ptr<Parcel> parcel, Clock::duration delay) {
  const std::scoped_lock lock(mutex_);
  route.last_release = std::max(route.last_release, Clock::now() + delay);
  waiting_.emplace(Key{route.last_release, sequence_++}, Entry{owner, std::move(parcel)});
  if (!thread_.joinable()) {
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }
  sent_.notify_one();
}

void Courier::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (waiting_.empty()) {
      sent_.wait(lock, stop, [&] { return !waiting_.empty(); });
      continue;
    }
    const Clock::time_point release = waiting_.begin()->first.first;
    if (Clock::now() < release) {
      // Until it is due, or one that is due earlier has been sent.
      sent_.wait_until(lock, stop, release, [&] { return waiting_.empty() || waiting_.begin()->first.first < release; });
      continue;
    }
    // Let go of while the lock is held: this thread must not be the last to hold it.
    waiting_.begin()->second.parcel->deliver();
    waiting_.begin()->second.parcel->mark_delivered();
    waiting_.erase(waiting_.begin());
    delivered_.notify_all();
  }
}

void Courier::wait_until_delivered(const Parcel& parcel) {
  if (parcel.delivered()) return;
  std::unique_lock lock(mutex_);
  delivered_.wait(lock, [&] { return parcel.delivered(); });
}

void Courier::deliver_now(const void* owner) noexcept {
  const std::scoped_lock lock(mutex_);
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    if (entry->second.owner != owner) {
      ++entry;
      continue;
    }
    entry->second.parcel->deliver();
    entry->second.parcel->mark_delivered();
    entry = waiting_.erase(entry);
  }
}

}  // namespace tandem::adversary
