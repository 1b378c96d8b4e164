// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/link_model.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

std::int64_t to_ns(double seconds) { return std::llround(seconds * 1e9); }

// Of [0, 1), evenly; the finalizer of the splitmix generator.
double fraction_of(std::uint64_t seed, std::uint64_t rank, std::uint64_t count) {
  std::uint64_t x = seed + rank * 0x9E3779B97F4A7C15U + count * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

}  // namespace

LinkModel::LinkModel(const LinkProfile& profile, int ranks)
    : profile_(profile), sending_until_ns_(at(ranks)), receiving_(at(ranks)), messages_(at(ranks)) {}

std::int64_t LinkModel::moving_ns(int from, int to, std::int64_t bytes) const noexcept {
  const double rate = profile_.level(from, to).bytes_per_second;
  return rate > 0 ? to_ns(static_cast<double>(bytes) / rate) : 0;
}

LinkModel::Departure LinkModel::depart(int from, int to, std::int64_t bytes, std::int64_t posted_ns) {
  if (from == to) return {posted_ns, posted_ns, posted_ns};
  const LinkLevel level = profile_.level(from, to);
  const double stretched =
      1 + level.jitter * fraction_of(profile_.jitter_seed, static_cast<std::uint64_t>(from), messages_[at(from)]++);
  std::int64_t& port_until_ns = sending_until_ns_[at(from)][port_of(from, to)];
  const std::int64_t start_ns = std::max(posted_ns, port_until_ns);
  port_until_ns = start_ns + moving_ns(from, to, bytes);
  return {start_ns, port_until_ns, start_ns + to_ns(level.latency_seconds * stretched)};
}

std::int64_t LinkModel::arrive(int from, int to, std::int64_t bytes, const Departure& departure) {
  if (from == to) return departure.start_ns;
  return receiving_[at(to)][port_of(from, to)].take(departure.receivable_ns, moving_ns(from, to, bytes));
}

void ModelClock::begin(std::int64_t issued_ns) noexcept { model_ns_ = std::max(model_ns_, issued_ns); }

std::int64_t ModelClock::post_ns(std::int64_t now_ns) noexcept {
  if (!of_collectives_) return now_ns - lateness_ns_;
  model_ns_ = std::max(model_ns_, now_ns - kLongestLateness_ns);
  return model_ns_;
}

void ModelClock::waited(std::int64_t arrival_ns, std::int64_t began_ns, std::int64_t now_ns) noexcept {
  if (of_collectives_) {
    model_ns_ = std::max(model_ns_, arrival_ns);
    return;
  }
  const std::int64_t model_now_ns = std::max(began_ns - lateness_ns_, arrival_ns);
  lateness_ns_ = std::clamp(now_ns - model_now_ns, std::int64_t{0}, kLongestLateness_ns);
}

}  // namespace tandem
