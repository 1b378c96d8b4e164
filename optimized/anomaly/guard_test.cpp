// SPDX-License-Identifier: Apache-2.0
// What the guards of several ranks find, and whom they name.
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "core/io/test_folder.h"
#include "optimized/anomaly/guard_test_support.h"

namespace tandem {
namespace {

using namespace watched;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class EachRankInTurn : public testing::TestWithParam<int> {};

TEST_P(EachRankInTurn, IsNamedForItsGradientAndRepairedByComputingAgain) {
  const int guilty = GetParam();
  std::vector<std::string> said(3);
  std::vector<std::vector<double>> weights(6);
  for (const bool struck : {true, false}) {
    on_ranks(3, [&](Communicator& comm) {
      Watched rank(comm, tiny({.data = 3}, AnomalyAction::rollback), {});
      bool has_struck = !struck || comm.rank() != guilty;
      rank.touch_gradients = [&](std::int64_t step, TensorView values) {
        if (step == 2 && !std::exchange(has_struck, true)) set(values, kNan);
      };
      for (int step = 0; step < 5; ++step) EXPECT_EQ(rank.step(step), AnomalyDecision::go_on);
      const auto r = static_cast<std::size_t>(comm.rank());
      weights[r + (struck ? 0 : 3)] = ParameterStore::values_of(rank.engine().store().parameter(0));
      if (!struck) {
        EXPECT_TRUE(rank.guard().incidents().empty());
        return;
      }
      said[r] = all_of(rank.guard());
      ASSERT_EQ(rank.guard().incidents().size(), 1U);
      const AnomalyIncident& incident = rank.guard().incidents().front();
      EXPECT_TRUE(incident.repaired);
      EXPECT_EQ(incident.step, 2);
      EXPECT_EQ(incident.findings.front().monitor, AnomalyMonitor::gradient_not_finite);
      EXPECT_EQ(incident.findings.front().rank, guilty);
    });
  }
  EXPECT_EQ(said[0], said[1]);
  EXPECT_EQ(said[0], said[2]);
  for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(weights[r], weights[r + 3]) << "repaired, the run is the undisturbed one";
}

TEST_P(EachRankInTurn, IsNamedForANaNInAnActivationThatStays) {
  const int guilty = GetParam();
  on_ranks(3, [&](Communicator& comm) {
    Watched rank(comm, tiny({.data = 3}, AnomalyAction::skip), {});
    rank.touch_activation = [&](std::int64_t step, int layer, TensorView values) {
      if (step == 3 && layer == 1 && comm.rank() == guilty) set(values, kNan);
    };
    for (int step = 0; step < 5; ++step) {
      EXPECT_EQ(rank.step(step), AnomalyDecision::go_on);
      EXPECT_EQ(rank.last.skipped, step == 3);
    }
    ASSERT_EQ(rank.guard().incidents().size(), 1U);
    const AnomalyIncident& incident = rank.guard().incidents().front();
    EXPECT_EQ(incident.decision, AnomalyDecision::skip_step);
    EXPECT_TRUE(incident.retried);
    EXPECT_FALSE(incident.repaired);
    EXPECT_EQ(incident.findings.front().rank, guilty);
    const AnomalyFinding* activation = find(incident, AnomalyMonitor::activation_range);
    ASSERT_NE(activation, nullptr);
    EXPECT_EQ(activation->rank, guilty);
    EXPECT_EQ(activation->where, "output of h.1");
  });
}

TEST_P(EachRankInTurn, IsTheOddOneWhereABitOfItsWeightsHasTurned) {
  const int guilty = GetParam();
  const TestFolder folder;
  on_ranks(3, [&](Communicator& comm) {
    Watched rank(comm, tiny({.data = 3}, AnomalyAction::rollback), folder.write("a file", "") / "no folder");
    rank.before_step = [&](std::int64_t step, ParameterStore& store) {
      if (step != 5 || comm.rank() != guilty) return;
      const std::span<float> values = store.parameter(store.index_of("h.1.mlp.c_fc.weight")).as<float>();
      values[3] = std::nextafter(values[3], 1e9F);
    };
    for (int step = 0; step < 7; ++step) ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);
    EXPECT_EQ(rank.step(7), AnomalyDecision::roll_back) << "the look that is due after step 8";

    ASSERT_EQ(rank.guard().incidents().size(), 1U);
    const AnomalyIncident& incident = rank.guard().incidents().front();
    const AnomalyFinding& finding = incident.findings.front();
    EXPECT_EQ(finding.monitor, AnomalyMonitor::replica_divergence);
    EXPECT_EQ(finding.rank, guilty);
    EXPECT_EQ(finding.where, "h.1.mlp.c_fc.weight");
    EXPECT_FALSE(incident.skipped_batch) << "the batch is not to blame";
    EXPECT_EQ(incident.rolled_back_to, 0);
    EXPECT_NE(incident.problem, "") << "nothing can be written there";
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, EachRankInTurn, testing::Values(0, 1, 2));

// With ZeRO all ranks take the weights from the one that owns them: by the next look they are alike.
TEST(AnomalyGuard, NamesTheOwnerOfMomentsThatAreNotFinite) {
  RunConfig config = tiny({.data = 3}, AnomalyAction::rollback);
  config.plan.zero_stage = 2;
  config.anomaly.sample_every_steps = 2;
  on_ranks(3, [&](Communicator& comm) {
    Watched rank(comm, config, {});
    rank.before_step = [&](std::int64_t step, ParameterStore& store) {
      if (step == 1 && comm.rank() == 2) set(store.first_moment(store.parts().front()), kNan);
    };
    EXPECT_EQ(rank.step(0), AnomalyDecision::go_on);
    EXPECT_EQ(rank.step(1), AnomalyDecision::give_up);
    const AnomalyFinding* finding = find(rank.guard().incidents().front(), AnomalyMonitor::weight_not_finite);
    ASSERT_NE(finding, nullptr);
    EXPECT_EQ(finding->rank, 2);
  });
}

TEST(AnomalyGuard, SaysBothRanksOfTwoAndThatItCannotTellWhich) {
  on_ranks(2, [&](Communicator& comm) {
    Watched rank(comm, tiny({.data = 2}, AnomalyAction::report), {});
    rank.before_step = [&](std::int64_t step, ParameterStore& store) {
      if (step == 1 && comm.rank() == 1) set(store.first_moment(store.parts().front()), 0.125);
    };
    for (int step = 0; step < 8; ++step) EXPECT_EQ(rank.step(step), AnomalyDecision::go_on);
    EXPECT_EQ(rank.guard().before_save(), AnomalyDecision::skip_step) << "what is only reported is not saved either";
    EXPECT_EQ(rank.guard().before_save(), AnomalyDecision::skip_step);
    ASSERT_EQ(rank.guard().incidents().size(), 3U) << "the finding once, and each checkpoint that is not written";
    EXPECT_NE(rank.guard().incidents().back().describe().find("this state is not saved"), std::string::npos);
    const AnomalyFinding& finding = rank.guard().incidents().front().findings.front();
    EXPECT_EQ(finding.rank, -1);
    EXPECT_NE(finding.where.find("rank 0 or 1"), std::string::npos) << finding.where;
  });
}

TEST(AnomalyGuard, FindsNoDifferenceWhereThereIsNone) {
  const auto in = [](RunConfig& config, const std::string& precision) {
    config.plan.precision = precision;
    config.plan.numerics = numerics_from_precision(precision);
  };
  const std::vector<std::pair<ParallelDegrees, std::function<void(RunConfig&)>>> layouts = {
      {{.tensor = 2}, [](RunConfig&) {}},
      {{.data = 2, .tensor = 2}, [](RunConfig& config) { config.plan.sequence_parallel = true; }},
      {{.data = 2, .pipeline = 2}, [](RunConfig&) {}},
      {{.data = 2, .context = 2}, [](RunConfig&) {}},
      {{.data = 2}, [&](RunConfig& config) { in(config, "bf16"), config.plan.zero_stage = 1; }},
      {{.data = 3}, [](RunConfig& config) { config.plan.zero_stage = 3; }},
      {{.tensor = 2, .pipeline = 2}, [&](RunConfig& config) { in(config, "fp16"); }},
      {{.data = 4, .expert = 2}, [](RunConfig& config) { config.model.experts = 4; }},
      {{.data = 2}, [](RunConfig& config) { config.plan.offload = "optimizer"; }},
      {{.data = 2}, [](RunConfig& config) { config.plan.compression.codec = "int8"; }},
  };
  for (const auto& [degrees, change] : layouts) {
    RunConfig config = tiny(degrees, AnomalyAction::rollback);
    config.model.sequence = 8;
    config.anomaly.sample_every_steps = 1;
    change(config);
    on_ranks(config.plan.parallel.world_size(), [&](Communicator& comm) {
      Watched rank(comm, config, {});
      for (int step = 0; step < 5; ++step) EXPECT_EQ(rank.step(step), AnomalyDecision::go_on);
      EXPECT_EQ(rank.guard().before_save(), AnomalyDecision::go_on);
      EXPECT_EQ(all_of(rank.guard()), "") << config.plan.zero_stage << config.plan.precision << comm.size();
      EXPECT_GT(rank.guard().bytes_looked_at(), 0);
    });
  }
}

// Copies are not only along the data axis: what every tensor rank holds whole, both ends of a pipeline, and of experts the ranks
// that hold the same ones.
TEST(AnomalyGuard, ComparesEveryCopyThatThereIs) {
  struct Place {
    ParallelDegrees degrees;
    std::string tensor, where;
    int rank;
  };
  for (const Place& place :
       {Place{{.tensor = 3}, "h.0.ln_1.weight", "h.0.ln_1.weight", 1},
        Place{{.pipeline = 2}, "wte.weight", "wte.weight: rank 0 or 1", -1},
        Place{{.data = 4, .expert = 2}, "h.0.mlp.experts.1.c_fc.weight", "h.0.mlp.experts.1.c_fc.weight: rank 1 or 3", -1}}) {
    RunConfig config = tiny(place.degrees, AnomalyAction::skip);
    config.model.hidden = 12;
    config.model.heads = 3;
    if (place.degrees.expert > 1) config.model.experts = 2;
    on_ranks(config.plan.parallel.world_size(), [&](Communicator& comm) {
      Watched rank(comm, config, {});
      EXPECT_EQ(rank.step(0), AnomalyDecision::go_on);
      ParameterStore& store = rank.engine().store();
      if (comm.rank() == 1) set(store.parameter(store.index_of(place.tensor)), 1.5);
      EXPECT_EQ(rank.guard().before_save(), AnomalyDecision::give_up) << "broken, and nowhere to go";
      ASSERT_EQ(rank.guard().incidents().size(), 1U);
      const AnomalyFinding& finding = rank.guard().incidents().front().findings.front();
      EXPECT_EQ(finding.monitor, AnomalyMonitor::replica_divergence);
      EXPECT_EQ(finding.rank, place.rank);
      EXPECT_EQ(finding.where, place.where);
    });
  }
}

}  // namespace
}  // namespace tandem
