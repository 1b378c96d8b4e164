// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/trainer.h"

#include <algorithm>
#include <atomic>
#include <string>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/anomaly/ledger.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/checkpoint/timings.h"

namespace tandem {
namespace {

TrainOptions small_run(const BatchSource& data, int ranks, std::int64_t steps) {
  TrainOptions options;
  options.config.model.vocabulary = 19;
  options.config.model.sequence = 9;
  options.config.model.layers = 1;
  options.config.model.hidden = 12;
  options.config.model.heads = 3;
  options.config.model.residual_dropout = 0.1;
  options.config.plan.parallel.data = ranks;
  options.config.plan.batch = {5, 2};
  options.config.steps = steps;
  options.config.schedule.decay_steps = 20;
  options.config.evaluate_every_steps = 0;
  options.data = &data;
  options.poison = true;
  return options;
}

SyntheticCorpus corpus() {
  return SyntheticCorpus({.vocabulary = 19, .branching = 3, .sequence = 9, .row_shape = RowShape::skewed});
}

std::vector<double> losses_of(const TrainReport& report) {
  std::vector<double> losses;
  for (const StepResult& step : report.steps) losses.push_back(step.loss);
  return losses;
}

TEST(Trainer, GivesTheSameLossesOnAnyNumberOfRanks) {
  const SyntheticCorpus data = corpus();
  const std::vector<double> expected = losses_of(train(small_run(data, 1, 6)));

  for (const int ranks : {2, 3, 5}) {
    const std::vector<double> losses = losses_of(train(small_run(data, ranks, 6)));
    ASSERT_EQ(losses.size(), expected.size());
    // fp32 with another order of sums over six steps.
    for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5 * expected[i]) << ranks << " ranks";
  }
}

TEST(Trainer, ContinuesAsIfItHadNotStopped) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder;
  const TrainReport whole = train(small_run(data, 2, 7));
  TrainOptions first = small_run(data, 2, 4);
  first.output = folder.path();
  (void)train(first);
  TrainOptions second = small_run(data, 2, 7);
  second.resume = find_checkpoint(folder.path());

  const TrainReport rest = train(second);

  EXPECT_EQ(rest.first_step, 4);
  const std::vector<double> all = losses_of(whole);
  EXPECT_EQ(losses_of(rest), std::vector<double>(all.begin() + 4, all.end()));
}

TEST(Trainer, GoesOnWithOtherDataOnlyWhenTold) {
  const SyntheticCorpus data = corpus();
  const SyntheticCorpus other({.vocabulary = 19, .branching = 4, .sequence = 9, .row_shape = RowShape::skewed});
  const TestFolder folder;
  TrainOptions first = small_run(data, 1, 2);
  first.output = folder.path();
  (void)train(first);
  TrainOptions second = small_run(other, 1, 3);
  second.resume = find_checkpoint(folder.path());

  EXPECT_NE(message_of<InputError>([&] { (void)train(second); }).find("saved with other data"), std::string::npos);
  second.data_may_change = true;
  EXPECT_EQ(train(second).steps.size(), 1U);
}

TEST(Trainer, StopsAfterTheStepUnderWayAndSavesIt) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder;
  std::atomic<bool> stop{false};
  TrainOptions options = small_run(data, 3, 50);
  options.output = folder.path();
  options.stop = &stop;
  options.on_step = [&](std::int64_t step, const StepResult&, double) { stop = stop || step == 4; };

  const TrainReport report = train(options);

  EXPECT_TRUE(report.interrupted);
  EXPECT_EQ(report.steps.size(), 5U);
  EXPECT_EQ(read_checkpoint_info(report.checkpoint).next_step, 5);
}

TEST(Trainer, GoesOnWhereACheckpointCannotBeWritten) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder;
  TrainOptions options = small_run(data, 2, 3);
  options.output = folder.path();
  options.config.checkpoint_every_steps = 1;
  const FileSizeLimit limit(1000);

  const TrainReport report = train(options);

  EXPECT_EQ(report.steps.size(), 3U);
  EXPECT_EQ(report.checkpoint_problems.size(), 3U);
  EXPECT_TRUE(report.last_checkpoint_failed);
  EXPECT_TRUE(report.checkpoint.empty());
}

// What the estimate of a run with failures reckons with: a step that was there, not a number of another origin.
TEST(Trainer, NotesWithEachCheckpointHowLongAUsualStepTook) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder;
  TrainOptions options = small_run(data, 1, 3);
  options.output = folder.path();
  options.config.checkpoint_every_steps = 1;

  const TrainReport report = train(options);

  const std::vector<TimedCheckpoint> noted = read_timings(folder.path());
  ASSERT_EQ(noted.size(), 3U);
  const auto [least, most] = std::ranges::minmax(report.step_seconds);
  for (const TimedCheckpoint& checkpoint : noted) {
    EXPECT_GE(checkpoint.step_seconds, 0.999 * least);
    EXPECT_LE(checkpoint.step_seconds, 1.001 * most);
  }
}

TEST(Trainer, EvaluatesTheSameLossOnAnyNumberOfRanks) {
  const SyntheticCorpus data = corpus();
  TrainOptions options = small_run(data, 1, 4);
  options.config.evaluate_every_steps = 2;
  const TrainReport alone = train(options);
  options.config.plan.parallel.data = 4;

  const TrainReport shared = train(options);

  ASSERT_EQ(alone.validation_losses.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(shared.validation_losses[i].second, alone.validation_losses[i].second, 1e-5);
}

// A run that looks and goes back.
TrainOptions watched_run(const BatchSource& data, const std::filesystem::path& folder, std::int64_t steps) {
  TrainOptions options = small_run(data, 2, steps);
  options.config.optimizer.learning_rate = 0.01;
  options.config.anomaly.action = AnomalyAction::rollback;
  options.config.anomaly.window = 16;
  options.config.anomaly.confirm_steps = 2;
  options.config.anomaly.sample_every_steps = 4;
  options.config.checkpoint_every_steps = 4;
  options.output = folder;
  return options;
}

FaultInjectorOptions scripted(const std::string& fault) {
  FaultInjectorOptions options;
  options.faults = {parse_fault(fault)};
  options.in_process = true;
  return options;
}

TEST(Trainer, TheListOfBatchesThatAreLeftOutTravelsWithTheCheckpoint) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder, other;
  TrainOptions first = watched_run(data, folder / "first", 8);
  first.skipped_batches = {2, 5};
  (void)train(first);
  TrainOptions second = watched_run(data, other / "second", 12);
  second.resume = find_checkpoint(folder / "first");

  const TrainReport rest = train(second);

  EXPECT_EQ(rest.skipped_batches, (std::set<std::int64_t>{2, 5}));
  TrainOptions whole = watched_run(data, folder / "whole", 12);
  whole.skipped_batches = {2, 5};
  const std::vector<double> all = losses_of(train(whole));
  EXPECT_EQ(losses_of(rest), std::vector<double>(all.begin() + 8, all.end()));
}

TEST(Trainer, AFreshRunKnowsNothingOfAnotherOneInItsFolder) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder;
  write_anomaly_ledger(folder.path(), {.skipped_batches = {1}, .healthy_steps = {8}, .rollbacks = {{0, 3}}, .incidents = 4},
                       system_files());

  const TrainReport report = train(watched_run(data, folder.path(), 4));

  EXPECT_TRUE(report.skipped_batches.empty());
  const AnomalyLedger ledger = read_anomaly_ledger(folder.path());
  EXPECT_TRUE(ledger.skipped_batches.empty());
  EXPECT_TRUE(ledger.rollbacks.empty());
  EXPECT_EQ(ledger.incidents, 4) << "bundles are not written over";
}

TEST(Trainer, ANumberThatIsNoneInTheWeightsCanBeLeftBehindFromTheFirstStepOn) {
  const SyntheticCorpus data = corpus();
  const std::vector<double> undisturbed = losses_of(train(small_run(data, 2, 6)));
  for (const AnomalyAction action : {AnomalyAction::skip, AnomalyAction::clip, AnomalyAction::rollback}) {
    const TestFolder folder;
    TrainOptions options = watched_run(data, folder.path(), 6);
    options.config.optimizer = small_run(data, 2, 6).config.optimizer;
    options.config.anomaly.action = action;
    FaultInjector faults(scripted("nan@step=2,rank=1,target=weights"));
    options.faults = &faults;

    const TrainReport report = train(options);

    EXPECT_EQ(losses_of(report), undisturbed);
    ASSERT_EQ(report.incidents.size(), 1U);
    EXPECT_EQ(report.incidents[0].rolled_back_to, 0);
    EXPECT_FALSE(report.last_checkpoint_failed);
  }
}

TEST(Trainer, SaysThatAStateWhichIsNotSoundIsNotSaved) {
  const SyntheticCorpus data = corpus();
  const TestFolder folder;
  TrainOptions options = watched_run(data, folder.path(), 8);
  options.config.anomaly.action = AnomalyAction::report;
  FaultInjector faults(scripted("flip@step=6,rank=1,target=weights"));
  options.faults = &faults;
  std::vector<std::string> told;
  options.on_checkpoint_problem = [&](const std::string& problem) { told.push_back(problem); };

  const TrainReport report = train(options);

  EXPECT_TRUE(report.last_checkpoint_failed);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("step 8 was not written: the state is not sound"), std::string::npos) << told[0];
  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000004");
}

TEST(Trainer, TellsTheMetricsOfEachStepWithTheValidationLossTakenAfterIt) {
  const SyntheticCorpus data = corpus();
  TrainOptions options = small_run(data, 2, 4);
  options.config.evaluate_every_steps = 2;
  std::vector<StepMetrics> told;
  options.on_metrics = [&](const StepMetrics& metrics, const std::vector<Span>& spans) {
    told.push_back(metrics);
    EXPECT_EQ(std::count_if(spans.begin(), spans.end(), [](const Span& s) { return s.activity == Activity::step; }), 1);
  };

  const TrainReport report = train(options);

  ASSERT_EQ(told.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(told[i].step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(told[i].loss, report.steps[i].loss);
    EXPECT_EQ(told[i].validation_loss.has_value(), i % 2 == 1);
  }
  EXPECT_EQ(told[1].validation_loss, report.validation_losses[0].second);
}

// Rows whose tokens of one step lie beyond the vocabulary, but only for the last rank's rows.
class BadRow final : public BatchSource {
 public:
  explicit BadRow(const SyntheticCorpus& source) : source_(source) {}
  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    Batch batch = source_.training_rows(step, global_rows, rows);
    if (step == 2) batch.ids.back() = 1000;
    return batch;
  }
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t, std::int64_t) const override { return std::nullopt; }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return source_.vocabulary(); }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return source_.sequence(); }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return {}; }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return {}; }
  [[nodiscard]] std::string describe() const override { return "bad"; }

 private:
  const SyntheticCorpus& source_;
};

TEST(Trainer, AFailureOfOneRankEndsAllWithItsReason) {
  const SyntheticCorpus data = corpus();
  const BadRow bad(data);

  const std::string message = message_of<InputError>([&] { (void)train(small_run(bad, 3, 5)); });

  EXPECT_NE(message.find("token id 1000"), std::string::npos) << message;
}

TEST(Trainer, RecordsSpansOfEveryRankThatCoverItsSteps) {
  const SyntheticCorpus data = corpus();
  const TrainReport report = train(small_run(data, 2, 3));

  ASSERT_EQ(report.spans_by_rank.size(), 2U);
  for (const std::vector<Span>& spans : report.spans_by_rank) {
    int steps = 0;
    int reductions = 0;
    for (const Span& span : spans) {
      steps += span.activity == Activity::step ? 1 : 0;
      reductions += span.activity == Activity::transfer && span.purpose == Purpose::gradient ? 1 : 0;
    }
    EXPECT_EQ(steps, 3);
    EXPECT_GE(reductions, 3);
  }
}

}  // namespace
}  // namespace tandem
