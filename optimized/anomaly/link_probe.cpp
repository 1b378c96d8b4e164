// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/link_probe.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include <fmt/format.h>

#include "core/timeline.h"

namespace tandem {
namespace {

// Link r is tried between barriers, by its two ranks alone.
double try_link(Communicator& world, int left, TensorView message) {
  const int right = (left + 1) % world.size();
  const CommOptions options{.purpose = Purpose::other, .name = "probe", .progress = Progress::on_wait};
  const std::int64_t begin_ns = Timeline::now_ns();
  if (world.rank() == left) {
    world.send(message, right, {}, options).wait_host();
    world.recv(message, right, {}, options).wait_host();
  } else if (world.rank() == right) {
    world.recv(message, left, {}, options).wait_host();
    world.send(message, left, {}, options).wait_host();
  }
  return static_cast<double>(Timeline::now_ns() - begin_ns) * 1e-9;
}

}  // namespace

std::vector<double> probe_links(Communicator& world, int tries, std::int64_t bytes) {
  const int links = world.size() <= 2 ? world.size() - 1 : world.size();
  std::vector<double> seconds(static_cast<std::size_t>(links), 0.0);
  std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes));
  const TensorView message = view_of(memory, {bytes});
  for (int left = 0; left < links; ++left) {
    double best = std::numeric_limits<double>::max();
    world.barrier();
    if (world.rank() == left || world.rank() == (left + 1) % world.size()) {
      for (int i = 0; i < tries; ++i) best = std::min(best, try_link(world, left, message));
    }
    if (world.rank() == left) seconds[static_cast<std::size_t>(left)] = best;
  }
  if (links > 0) all_reduce(world, view_of(seconds, {links}), {.purpose = Purpose::other, .name = "probe"});
  return seconds;
}

std::optional<SlowLink> find_slow_link(const std::vector<double>& now, const std::vector<double>& before) {
  const std::size_t links = now.size();
  if (links == 0 || before.size() != links) return std::nullopt;
  const double quickest = *std::ranges::min_element(now);
  std::vector<std::size_t> slow;
  for (std::size_t i = 0; i < links; ++i) {
    const double usual = links == 1 ? before[i] : std::max(before[i], quickest);
    if (now[i] >= kSlowLinkRatio * usual && now[i] - usual >= kSlowLinkSeconds) slow.push_back(i);
  }
  if (slow.empty()) return std::nullopt;
  const auto slowest = *std::ranges::max_element(slow, {}, [&](std::size_t i) { return now[i]; });
  const double ratio = now[slowest] / before[slowest];
  // A rank is slow where the links on both its sides are; rank i is between links i - 1 and i.
  for (const std::size_t i : slow) {
    const std::size_t left = (i + links - 1) % links;
    if (links < 3 || std::ranges::find(slow, left) == slow.end()) continue;
    return SlowLink{static_cast<int>(i), fmt::format("links of rank {}", i), ratio};
  }
  const std::size_t right = links == 1 ? slowest + 1 : (slowest + 1) % links;
  return SlowLink{-1, fmt::format("link {}-{}", slowest, right), ratio};
}

}  // namespace tandem
