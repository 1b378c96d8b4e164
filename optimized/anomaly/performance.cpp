// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/performance.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace tandem {
namespace {

// Another program on the same cores costs a factor of two, two of them three.
constexpr DriftRule kThroughput{.window = 64, .least = 16, .ratio = 4, .sustain = 8};
constexpr DriftRule kCollective{.ratio = 5, .floor = 2e-3};
constexpr DriftRule kComputeShare{.ratio = 2.5, .floor = 1};
// What a rank's step takes longer than that of the others because another program had its core for a while is less than this.
constexpr double kLeastLagSeconds = 0.02;
constexpr std::size_t kMostCollectives = 256;
// Samples whose probes say what a link takes: the machine may be busy during one of them.
constexpr int kBaselines = 3;

AnomalyFinding finding_of(AnomalyMonitor monitor, std::int64_t step, double value, double limit) {
  AnomalyFinding finding;
  finding.monitor = monitor;
  finding.step = step;
  finding.value = value;
  finding.limit = limit;
  return finding;
}

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

PerformanceMonitor::PerformanceMonitor() : throughput_(kThroughput) {}

std::optional<AnomalyFinding> PerformanceMonitor::see_throughput(std::int64_t step, double seconds_per_token) {
  const std::optional<double> ratio = throughput_.see(seconds_per_token);
  if (!ratio) return std::nullopt;
  return finding_of(AnomalyMonitor::throughput_drop, step, *ratio, kThroughput.ratio);
}

RankTimes PerformanceMonitor::see_spans(const std::vector<Span>& spans) {
  RankTimes times;
  std::map<std::string, double> communication;
  for (const Span& span : spans) {
    const double seconds = static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
    if (span.activity == Activity::compute) times.compute_seconds += seconds;
    if (span.activity == Activity::transfer || span.activity == Activity::wait) communication[span.name] += seconds;
  }
  for (const auto& [name, seconds] : communication) {
    // Counts that differ from step to step (experts) make names that come once.
    if (collectives_.size() >= kMostCollectives && !collectives_.contains(name)) continue;
    const std::optional<double> ratio = collectives_.try_emplace(name, kCollective).first->second.see(seconds);
    if (!ratio || *ratio <= times.slow_ratio) continue;
    times.slow_collective = name;
    times.slow_ratio = *ratio;
  }
  return times;
}

std::vector<AnomalyFinding> PerformanceMonitor::compare(std::int64_t step, const std::vector<RankTimes>& by_rank,
                                                        Communicator& world) {
  std::vector<AnomalyFinding> findings;
  // Without spans there is nothing to call for a probe.
  const bool times_known = std::ranges::any_of(by_rank, [](const RankTimes& times) { return times.compute_seconds > 0; });
  if (baselines_ < kBaselines && times_known) {
    const std::vector<double> seen = probe_links(world);
    ++baselines_;
    if (links_.empty()) links_ = seen;
    for (std::size_t i = 0; i < seen.size(); ++i) links_[i] = std::min(links_[i], seen[i]);
  }
  const auto slowest = std::ranges::max_element(by_rank, {}, &RankTimes::slow_ratio);
  if (baselines_ > 0 && !slowest->slow_collective.empty()) {
    if (const std::optional<SlowLink> slow = find_slow_link(probe_links(world), links_)) {
      AnomalyFinding finding = finding_of(AnomalyMonitor::slow_collective, step, slowest->slow_ratio, kCollective.ratio);
      finding.rank = slow->rank;
      finding.where = fmt::format("{}: {}", slowest->slow_collective, slow->where);
      findings.push_back(std::move(finding));
    }
  }
  if (std::optional<AnomalyFinding> slow = slow_rank(step, by_rank)) findings.push_back(std::move(*slow));
  return findings;
}

// Against the others in the same step, so that what slows all of them down is nobody's fault; and against the rank's own share
// before, so that a rank with more layers is not slow for having them.
std::optional<AnomalyFinding> PerformanceMonitor::slow_rank(std::int64_t step, const std::vector<RankTimes>& by_rank) {
  if (by_rank.size() < 2) return std::nullopt;
  compute_.resize(by_rank.size(), DriftMonitor(kComputeShare));
  std::optional<AnomalyFinding> found;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::vector<double> others;
    for (std::size_t other = 0; other < by_rank.size(); ++other) {
      if (other != rank) others.push_back(by_rank[other].compute_seconds);
    }
    const double usual = median_of(std::move(others));
    if (!(usual > 0)) continue;
    double share = by_rank[rank].compute_seconds / usual;
    if (by_rank[rank].compute_seconds - usual < kLeastLagSeconds) {
      share = std::min(share, compute_[rank].median() + 0.5 * kComputeShare.floor);  // not unusual
    }
    const std::optional<double> ratio = compute_[rank].see(share);
    if (!ratio || found) continue;
    found = finding_of(AnomalyMonitor::slow_rank, step, *ratio, kComputeShare.ratio);
    found->rank = static_cast<int>(rank);
  }
  return found;
}

}  // namespace tandem
