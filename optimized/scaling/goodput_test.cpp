// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/goodput.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/rng.h"
#include "optimized/scaling/published_figures_test_support.h"

namespace tandem {
namespace {

// Useful share of `hours` of wall time, event by event: work, a checkpoint after every interval, failures at random (exponential,
// also during checkpoints and restarts), after which work since the last complete checkpoint is lost.
double simulate_goodput(const CheckpointCosts& costs, double interval_seconds, double hours, std::uint64_t seed) {
  TANDEM_CHECK(interval_seconds > 0 && hours > 0 && costs.failure_seconds > 0,
               "a simulation needs an interval, time and failures");
  CounterRng rng(seed, "node failures");
  const auto until_failure = [&] { return -std::log1p(-rng.next_unit()) * costs.failure_seconds; };
  const double end = hours * 3600;
  const double segment = interval_seconds + costs.save_seconds;
  double now = 0;
  double useful = 0;
  double failure = until_failure();
  while (now < end) {
    if (failure > now + segment) {
      now += segment;
      useful += interval_seconds;
      continue;
    }
    // All since the last checkpoint is lost; a failure while restarting starts that again.
    do {
      now = failure;
      failure = now + until_failure();
    } while (failure < now + costs.restart_seconds);
    now += costs.restart_seconds;
  }
  return useful / now;
}

TEST(Goodput, SimulatedFailuresAgreeWithDalysModel) {
  for (const CheckpointCosts costs : {CheckpointCosts{60, 600, 3 * 3600.0}, {5, 120, 1800}, {300, 900, 24 * 3600.0}}) {
    const double interval = daly_interval_seconds(costs);
    // 20,000 failures: the standard error of the useful share is below a thousandth.
    const double hours = 20000 * costs.failure_seconds / 3600;
    EXPECT_NEAR(simulate_goodput(costs, interval, hours, 7), goodput(costs, interval), 0.003);
    EXPECT_NEAR(simulate_goodput(costs, 3 * interval, hours, 8), goodput(costs, 3 * interval), 0.004);
    EXPECT_GT(goodput(costs, interval), goodput(costs, 3 * interval));
    EXPECT_GT(goodput(costs, interval), goodput(costs, interval / 3));
  }
}

Workload in_bf16(const std::string& model) {
  Workload workload;
  workload.model = read_model_shape(model);
  workload.plan.numerics = numerics_from_precision("bf16");
  return workload;
}

PublishedFigure figure(const std::string& kind, const std::string& id) {
  for (PublishedFigure& found : published_figures(kind)) {
    if (found.id == id) return found;
  }
  throw InputError("no figure " + id);
}

TEST(Goodput, CheckpointsAreAsLargeAsPublished) {
  const ClusterSpec cluster = read_cluster("dgx-a100");
  for (const auto& [id, model] : {std::pair{"sc21-checkpoint-1t", "gpt-1t"}, {"bloom-checkpoint", "bloom-176b"}}) {
    const PublishedFigure published = figure("checkpoints", id);
    const double bytes = estimate_goodput(in_bf16(model), cluster, 384, 100.0).checkpoint_bytes;
    // Terabytes or tebibytes, which the sources do not say.
    EXPECT_GT(bytes, 0.99e12 * published.numbers.at("checkpoint_size_tb")) << id;
    EXPECT_LT(bytes, 1.11e12 * published.numbers.at("checkpoint_size_tb")) << id;
  }
}

TEST(Goodput, ALargeRunOnAMachineThatFailsIsAsUsefulAsReported) {
  const PublishedFigure run = figure("reliability", "llama3-interruptions");
  const double nodes = run.numbers.at("devices") / 8;
  ClusterSpec cluster;
  cluster.devices_per_node = 8;
  cluster.storage = {0, 0, 1e12 * figure("checkpoints", "llama3-checkpoint-storage").numbers.at("storage_sustained_tbs"), 20e9};
  cluster.reliability = {run.numbers.at("days") * 24 * nodes / run.numbers.at("unexpected"), 10 * 60};
  const Workload workload = in_bf16("llama3-405b");
  const GoodputEstimate estimate = estimate_goodput(workload, cluster, 16384, 10.0);
  EXPECT_NEAR(estimate.costs.failure_seconds / 3600, run.numbers.at("mtti_unexpected_h"), 0.01);
  EXPECT_GT(estimate.useful_share, run.numbers.at("effective_training_time_pct_min") / 100);
  EXPECT_LT(estimate.useful_share, 0.97);
  EXPECT_LT(estimate_goodput(workload, cluster, 65536, 10.0).useful_share, estimate.useful_share);
  EXPECT_LT(estimate_goodput(workload, cluster, 16384, 10.0, false).useful_share, estimate.useful_share);
  EXPECT_NEAR(std::remainder(estimate.interval_seconds, 10.0), 0, 1e-9);
  // Storage that takes longer than Daly's interval in the background is what counts then; that of the nodes together, if slower.
  cluster.storage = {0, 1e12, 1e9, 20e9};
  const GoodputEstimate slow = estimate_goodput(workload, cluster, 16384, 10.0);
  EXPECT_NEAR(slow.interval_seconds, slow.checkpoint_bytes / 1e9, 10);
  cluster.storage = {0, 1e5, 1e9, 0};
  EXPECT_NEAR(estimate_goodput(workload, cluster, 16384, 10.0).costs.save_seconds, slow.checkpoint_bytes / (1e5 * 2048), 1e-3);
  cluster.reliability = {};
  EXPECT_EQ(estimate_goodput(workload, cluster, 16384, 10.0).useful_share, 1);
}

}  // namespace
}  // namespace tandem
