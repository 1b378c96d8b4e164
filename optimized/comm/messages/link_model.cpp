// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/link_model.h"

#include <algorithm>
#include <cmath>

#include "core/rng.h"

namespace tandem {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

std::int64_t to_ns(double seconds) { return std::llround(seconds * 1e9); }

// Of [0, 1), evenly.
double fraction_of(std::uint64_t seed, int rank, std::uint64_t count) {
  const auto low = [](std::uint64_t word) { return static_cast<std::uint32_t>(word); };
  const PhiloxBlock block =
      philox4x32({low(count), low(count >> 32), static_cast<std::uint32_t>(rank), 0}, {low(seed), low(seed >> 32)});
  return block[0] * 0x1p-32;
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
  const double stretched = 1 + level.jitter * fraction_of(profile_.jitter_seed, from, messages_[at(from)]++);
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
