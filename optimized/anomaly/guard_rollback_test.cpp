// SPDX-License-Identifier: Apache-2.0
// What the guards of several ranks do about it.
#include <limits>

#include "core/io/test_folder.h"
#include "optimized/anomaly/bundle.h"
#include "optimized/anomaly/guard_test_support.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/publish.h"

namespace tandem {
namespace {

using namespace watched;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(AnomalyGuard, RollsBackALossThatStaysAndLeavesItsBatchOut) {
  const TestFolder folder;
  on_ranks(2, [&](Communicator& comm) {
    Watched rank(comm, tiny({.data = 2}, AnomalyAction::rollback), folder.path());
    if (comm.rank() == 0) {
      for (const int step : {10, 20}) std::filesystem::create_directory(folder / step_folder_name(step).c_str());
    }
    rank.touch_signs = [&](UpdateSigns& signs) {
      if (signs.step == 21) signs.loss_sum *= 10;
    };
    for (int step = 0; step < 21; ++step) {
      if (step == 20) rank.guard().saved(20);
      ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);
    }
    EXPECT_EQ(rank.step(21), AnomalyDecision::roll_back);

    EXPECT_TRUE(rank.last.skipped);
    EXPECT_EQ(rank.guard().rollback_step(), 0) << "step 20 has not been confirmed";
    ASSERT_EQ(rank.guard().incidents().size(), 1U);
    const AnomalyIncident& incident = rank.guard().incidents().front();
    EXPECT_EQ(incident.findings.front().monitor, AnomalyMonitor::loss_spike);
    EXPECT_EQ(incident.skipped_batch, 21);
    EXPECT_EQ(incident.problem, "");
    EXPECT_EQ(read_anomaly_ledger(folder.path()), rank.guard().ledger());
    EXPECT_EQ(rank.guard().ledger().skipped_batches, std::set<std::int64_t>{21});
    EXPECT_EQ(rank.guard().ledger().rollbacks.at(0), 1);
    const IncidentBundle bundle = read_bundle(incident.bundle);
    EXPECT_EQ(bundle.start_step, 0);
    EXPECT_EQ(bundle.step, 21);
    EXPECT_EQ(bundle.losses.size(), 22U);
    EXPECT_EQ(bundle.losses.back(), rank.last.loss);
    EXPECT_TRUE(bundle.skipped_batches.empty()) << "of the run as it was";
    EXPECT_NE(bundle.batch_hash, Hash128());
    rank.guard().rolled_back();
    EXPECT_EQ(rank.step(0), AnomalyDecision::go_on);
  });
}

// The first batch is one like any other: a run that went back and met it again would go back for ever.
TEST(AnomalyGuard, LeavesOutTheFirstBatchToo) {
  const TestFolder folder;
  RunConfig config = tiny({}, AnomalyAction::rollback);
  config.anomaly.retry = false;
  on_ranks(1, [&](Communicator& comm) {
    Watched rank(comm, config, folder.path());
    rank.touch_gradients = [](std::int64_t, TensorView values) { set(values, kNan); };
    EXPECT_EQ(rank.step(0), AnomalyDecision::roll_back);
    EXPECT_EQ(rank.guard().incidents().front().skipped_batch, 0);
  });
  EXPECT_EQ(read_anomaly_ledger(folder.path()).skipped_batches, std::set<std::int64_t>{0});
}

TEST(AnomalyGuard, ConfirmsACheckpointByTheStepsBehindItAndKnowsItAfterARestart) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "step-00000004");
  on_ranks(2, [&](Communicator& comm) {
    Watched rank(comm, tiny({.data = 2}, AnomalyAction::skip), folder.path());
    rank.touch_gradients = [&](std::int64_t step, TensorView values) {
      if (step == 5) set(values, kNan);
    };
    for (int step = 0; step < 4; ++step) ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);
    rank.guard().saved(4);
    rank.guard().saved(5);  // but no such folder
    ASSERT_EQ(rank.step(4), AnomalyDecision::go_on);
    for (int step = 5; step < 8; ++step) ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);
    EXPECT_EQ(rank.guard().ledger().newest_healthy(), std::nullopt) << "a finding starts the count again";
    ASSERT_EQ(rank.step(8), AnomalyDecision::go_on);
    EXPECT_EQ(rank.guard().rollback_step(), 4);
  });
  EXPECT_EQ(read_anomaly_ledger(folder.path()).healthy_steps, std::set<std::int64_t>{4});
  for (const std::int64_t first_step : {4, 3}) {
    on_ranks(2, [&](Communicator& comm) {
      Watched rank(comm, tiny({.data = 2}, AnomalyAction::rollback), folder.path(), {}, first_step);
      EXPECT_EQ(rank.guard().rollback_step(), first_step);
      EXPECT_EQ(rank.guard().ledger().newest_healthy().has_value(), first_step == 4) << "3 is before it: another course";
      EXPECT_EQ(rank.guard().ledger().incidents, 1);
    });
  }
}

TEST(AnomalyGuard, PassesOverHealthyCheckpointsThatAreNotThere) {
  for (const std::int64_t there : {2, 4}) {  // 4 is where the attempt began
    const TestFolder folder;
    AnomalyLedger ledger;
    ledger.healthy_steps = {2, 3};
    write_anomaly_ledger(folder.path(), ledger, system_files());
    std::filesystem::create_directory(folder / "step-00000004");
    if (there == 2) std::filesystem::create_directory(unfinished_folder(folder.path(), 2));
    on_ranks(2, [&](Communicator& comm) {
      RunConfig config = tiny({.data = 2}, AnomalyAction::rollback);
      config.anomaly.retry = false;
      Watched rank(comm, config, folder.path(), {}, 4);
      rank.touch_gradients = [](std::int64_t step, TensorView values) {
        if (step == 5) set(values, kNan);
      };
      ASSERT_EQ(rank.step(4), AnomalyDecision::go_on);
      EXPECT_EQ(rank.step(5), AnomalyDecision::roll_back);
      EXPECT_EQ(rank.guard().incidents().front().rolled_back_to, there);
      EXPECT_EQ(rank.guard().rollback_step(), there);
      const IncidentBundle bundle = read_bundle(rank.guard().incidents().front().bundle);
      EXPECT_EQ(bundle.checkpoint, "step-00000004") << "what was before is not known";
      EXPECT_EQ(bundle.losses.size(), 2U);
    });
  }
}

TEST(AnomalyGuard, BeginsABundleAtACheckpointThatIsWritten) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "step-00000002");
  std::filesystem::create_directory(unfinished_folder(folder.path(), 5));
  on_ranks(2, [&](Communicator& comm) {
    RunConfig config = tiny({.data = 2}, AnomalyAction::report);
    config.anomaly.retry = false;
    Watched rank(comm, config, folder.path());
    rank.touch_gradients = [](std::int64_t step, TensorView values) {
      if (step == 8) set(values, kNan);
    };
    for (int step = 0; step < 9; ++step) {
      if (step == 2 || step == 5) rank.guard().saved(step);
      ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);
    }
    EXPECT_EQ(rank.guard().rollback_step(), 5) << "it will be written by the time that it is read";
    const IncidentBundle bundle = read_bundle(rank.guard().incidents().front().bundle);
    EXPECT_EQ(bundle.start_step, 2);
    EXPECT_EQ(bundle.checkpoint, "step-00000002");
    EXPECT_EQ(bundle.losses.size(), 7U);
  });
}

TEST(AnomalyGuard, EndsTheRunAfterTooManyRollbacksToTheSamePlace) {
  const TestFolder folder;
  RunConfig config = tiny({}, AnomalyAction::rollback);
  config.anomaly.max_rollbacks = 2;
  config.anomaly.retry = false;
  const auto decisions = [&](const std::filesystem::path& where, const PitfallSet& pitfalls) {
    std::vector<AnomalyDecision> all;
    on_ranks(1, [&](Communicator& comm) {
      Watched rank(comm, config, where, pitfalls);
      rank.touch_gradients = [](std::int64_t step, TensorView values) {
        if (step == 1) set(values, kNan);
      };
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(rank.step(0), AnomalyDecision::go_on) << all_of(rank.guard());
        all.push_back(rank.step(1));
        rank.engine().loss_scaler().set_state({});  // as of the checkpoint
        rank.guard().rolled_back();
      }
    });
    return all;
  };
  using D = AnomalyDecision;

  EXPECT_EQ(decisions(folder.path(), {}), (std::vector{D::roll_back, D::roll_back, D::give_up, D::give_up}));
  EXPECT_EQ(decisions({}, {}), std::vector<D>(4, D::give_up)) << "without a folder there is nothing to go back to";
  EXPECT_EQ(decisions(folder / "other", with(Pitfall::rollback_without_limit)), std::vector<D>(4, D::roll_back));
}

TEST(AnomalyGuard, ClipsASpikeOfTheNormToTheMedian) {
  RunConfig config = tiny({.data = 2}, AnomalyAction::clip);
  config.optimizer.max_grad_norm = 0;
  on_ranks(2, [&](Communicator& comm) {
    Watched rank(comm, config, {});
    rank.touch_signs = [&](UpdateSigns& signs) {
      if (signs.step == 20) signs.gradient_norm = 1e6;
    };
    for (int step = 0; step < 21; ++step) EXPECT_EQ(rank.step(step), AnomalyDecision::go_on);
    EXPECT_FALSE(rank.last.skipped);
    EXPECT_LT(rank.last.clip_coefficient, 1e-4);
    ASSERT_EQ(rank.guard().incidents().size(), 1U);
    EXPECT_EQ(rank.guard().incidents().front().decision, AnomalyDecision::clip_harder);
  });
}

TEST(AnomalyGuard, LetsNoUnsoundStateBeSaved) {
  for (const bool planted : {false, true}) {
    on_ranks(2, [&](Communicator& comm) {
      const TestFolder folder;
      const PitfallSet pitfalls = planted ? with(Pitfall::unsound_state_saved) : PitfallSet();
      Watched rank(comm, tiny({.data = 2}, AnomalyAction::skip), folder.path(), pitfalls);
      EXPECT_EQ(rank.step(0), AnomalyDecision::go_on);
      EXPECT_EQ(rank.guard().before_save(), AnomalyDecision::go_on);
      ParameterStore& store = rank.engine().store();
      if (comm.rank() == 1) set(store.second_moment(store.parts().back()), kNan);

      EXPECT_EQ(rank.guard().before_save(), planted ? AnomalyDecision::go_on : AnomalyDecision::roll_back);
      if (planted) return;
      const AnomalyFinding* finding = find(rank.guard().incidents().front(), AnomalyMonitor::weight_not_finite);
      ASSERT_NE(finding, nullptr);
      EXPECT_EQ(finding->rank, 1);
      EXPECT_EQ(finding->where.substr(0, 2), "v.");
    });
  }
}

TEST(AnomalyGuard, IsBrokenByItsPitfalls) {
  std::int64_t sampled_bytes = 0;
  const auto run = [&](const PitfallSet& pitfalls, bool faulty) {
    on_ranks(2, [&](Communicator& comm) {
      Watched rank(comm, tiny({.data = 2}, AnomalyAction::skip), {}, pitfalls);
      rank.touch_gradients = [&](std::int64_t step, TensorView values) {
        if (faulty && step == 1 && comm.rank() == 1) set(values, kNan);
      };
      for (int step = 0; step < 3; ++step) static_cast<void>(rank.step(step));
      if (comm.rank() == 0) sampled_bytes = rank.guard().bytes_looked_at();
      if (!faulty) return;
      ASSERT_EQ(rank.guard().incidents().size(), 1U);
      const AnomalyIncident& incident = rank.guard().incidents().front();
      EXPECT_EQ(incident.step, pitfalls.any() ? 2 : 1) << "late, when the weights are not finite any more";
      EXPECT_EQ(incident.findings.front().rank, pitfalls.any() ? 0 : 1);
    });
  };
  run({}, true);
  run(with(Pitfall::nan_checked_on_rank_zero), true);
  EXPECT_THROW(run(with(Pitfall::nan_raised_on_one_rank), true), Error);
  run({}, false);
  EXPECT_EQ(sampled_bytes, 0) << "no look is due within three steps";
  run(with(Pitfall::monitors_not_sampled), false);
  EXPECT_GT(sampled_bytes, 0);
}

TEST(AnomalyGuard, PutsNewerCheckpointsOutOfSight) {
  const TestFolder folder;
  for (const int step : {4, 8, 12}) {
    std::filesystem::create_directory(folder / step_folder_name(step).c_str());
    folder.write(step_folder_name(step) + "/file", std::to_string(step));
  }
  std::filesystem::create_directory(folder / "suspect-step-00000012");
  folder.write("latest", "step-00000012\n");

  set_aside_checkpoints_after(folder.path(), 4, system_files());

  ASSERT_EQ(list_checkpoints(folder.path()).size(), 1U);
  EXPECT_EQ(list_checkpoints(folder.path()).front().step, 4);
  EXPECT_EQ(TestFolder::read(folder / "suspect-step-00000012/file"), "12");
  EXPECT_EQ(TestFolder::read(folder / "latest"), "step-00000004\n");
  set_aside_checkpoints_after(folder / "nothing", 0, system_files());
}

TEST(AnomalyGuard, OfCheckpointsOutOfSightTheNewestStay) {
  const TestFolder folder;
  for (const int step : {4, 8, 12, 16, 100}) std::filesystem::create_directory(folder / step_folder_name(step).c_str());

  set_aside_checkpoints_after(folder.path(), 4, system_files());

  EXPECT_FALSE(std::filesystem::exists(folder / "suspect-step-00000008"));
  for (const char* const kept : {"suspect-step-00000012", "suspect-step-00000016", "suspect-step-00000100"})
    EXPECT_TRUE(std::filesystem::exists(folder / kept)) << kept;
}

}  // namespace
}  // namespace tandem
