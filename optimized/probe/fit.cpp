// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/quantile.h"
#include "optimized/probe/probe.h"
#include "optimized/scaling/cost_model.h"

namespace tandem {
namespace {

// A constant that is looked for, between two limits.
struct Sought {
  std::string name;
  double start = 0, low = 0, high = 0;
};

// Products of a few microseconds are mostly their call.
constexpr double kSmallFlops = 1e7;
constexpr double kSmallWeight = 0.3;

double misfit(const ClusterSpec& cluster, const std::vector<MatrixSample>& samples) {
  const CostModel model(cluster);
  double sum = 0;
  for (const MatrixSample& sample : samples) {
    if (!sample.fitted) continue;
    const auto m = static_cast<double>(sample.m), n = static_cast<double>(sample.n), k = static_cast<double>(sample.k);
    const double weight = 2 * m * n * k < kSmallFlops ? kSmallWeight : 1;
    // Squares up to here, then straight on: a shape that the model has no constant for must not bend all others.
    constexpr double kLarge = 0.2;
    const double off = std::abs(std::log(model.matmul_seconds(m, n, k, sample.dtype) / sample.seconds));
    sum += weight * (off < kLarge ? off * off : kLarge * (2 * off - kLarge));
  }
  return sum;
}

// Tries every constant a step up and down, and halves the step where none of them helps.
double descend(ClusterSpec& cluster, const std::vector<Sought>& all, const std::vector<MatrixSample>& samples) {
  double best = misfit(cluster, samples);
  for (double step = 0.7; step > 0.01;) {
    bool improved = false;
    for (const Sought& sought : all) {
      double& value = cluster.device.constants[sought.name];
      const double before = value;
      for (const double factor : {1 + step, 1 / (1 + step)}) {
        value = std::clamp(before * factor, sought.low, sought.high);
        const double now = misfit(cluster, samples);
        if (now < best * (1 - 1e-9)) {
          best = now;
          improved = true;
          break;
        }
        value = before;
      }
    }
    if (!improved) step /= 2;
  }
  return best;
}

}  // namespace

AlphaBeta fit_link(const std::vector<LinkSample>& samples) {
  std::set<std::int64_t> sizes;
  // Weighted normal equations of t = a + b s, weights 1 / t^2.
  double w = 0, ws = 0, wss = 0, wt = 0, wst = 0;
  for (const LinkSample& sample : samples) {
    const auto bytes = static_cast<double>(sample.bytes);
    const double time = sample.fitted_seconds, weight = 1 / (time * time);
    sizes.insert(sample.bytes);
    w += weight;
    ws += weight * bytes;
    wss += weight * bytes * bytes;
    wt += weight * time;
    wst += weight * time * bytes;
  }
  TANDEM_CHECK(sizes.size() >= 2, fmt::format("{} sizes of messages; latency and bandwidth need two", sizes.size()));
  double slope = (w * wst - ws * wt) / (w * wss - ws * ws);
  double latency = (wt - slope * ws) / w;
  if (latency < 0) {
    latency = 0;
    slope = wst / wss;
  }
  if (slope > 0) return {latency, 1 / slope};
  // On a machine so busy that its noise is larger than the message: what the shortest and the longest say alone.
  const auto [shortest, longest] = std::ranges::minmax(samples, {}, &LinkSample::bytes);
  TANDEM_CHECK(longest.fitted_seconds > shortest.fitted_seconds,
               "more bytes take no longer: the machine is too busy to tell, or the clock is wrong; --seconds gives it more time");
  return {shortest.fitted_seconds, static_cast<double>(longest.bytes) / longest.fitted_seconds};
}

void fit_device(ClusterSpec& cluster, std::vector<MatrixSample>& samples) {
  std::vector<Sought> all = {{"kernel_seconds", 1e-6, 1e-8, 1e-4}};
  for (const auto& [dtype, flops] : cluster.device.peak_flops) {
    all.push_back({"matmul_efficiency." + dtype, 0.9, 0.01, 1});
    all.push_back({"matmul_half_depth." + dtype, 16, 0.1, 2000});
  }
  ClusterSpec best_cluster;
  double best = std::numeric_limits<double>::infinity();
  // Tiles are rounded up, so that their scale has many local optima.
  const bool is_gpu = cluster.device.constants.contains("multiprocessors");
  for (const double scale : {1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125}) {
    if (is_gpu && scale < 1) break;
    ClusterSpec candidate = cluster;
    candidate.device.constants.try_emplace("multiprocessors", 1);
    candidate.device.constants["host_kernel_seconds"] = 0;
    candidate.device.constants["tile_scale"] = scale;
    for (const Sought& sought : all) candidate.device.constants[sought.name] = sought.start;
    const double now = descend(candidate, all, samples);
    if (now >= best) continue;
    best = now;
    best_cluster = std::move(candidate);
  }
  cluster = std::move(best_cluster);
  const CostModel model(cluster);
  for (MatrixSample& sample : samples) {
    sample.predicted_seconds = model.matmul_seconds(static_cast<double>(sample.m), static_cast<double>(sample.n),
                                                    static_cast<double>(sample.k), sample.dtype);
  }
}

void rank_speeds(std::vector<RankSpeed>& speeds) {
  const auto median_of = [&](double RankSpeed::*figure) {
    std::vector<double> values;
    values.reserve(speeds.size());
    for (const RankSpeed& speed : speeds) values.push_back(speed.*figure);
    return values.empty() ? 0 : median(std::move(values));
  };
  const double matrix = median_of(&RankSpeed::matrix_flops_per_second);
  const double memory = median_of(&RankSpeed::memory_bytes_per_second);
  const double message = median_of(&RankSpeed::message_seconds);
  for (RankSpeed& speed : speeds) {
    speed.slowness = std::max(matrix / speed.matrix_flops_per_second, memory / speed.memory_bytes_per_second);
    if (message > 0 && speed.message_seconds > 0) speed.slowness = std::max(speed.slowness, speed.message_seconds / message);
  }
  std::ranges::stable_sort(speeds, std::ranges::greater(), &RankSpeed::slowness);
}

void require_possible(double bytes_per_second, double copied_bytes_per_second, const std::string& what) {
  constexpr double kPossible = 1.2;  // both are measured
  TANDEM_CHECK(bytes_per_second <= kPossible * copied_bytes_per_second,
               fmt::format("{} would move {:.3g} GB/s, where this machine copies {:.3g}: the measurement is wrong", what,
                           bytes_per_second * 1e-9, copied_bytes_per_second * 1e-9));
}

}  // namespace tandem
