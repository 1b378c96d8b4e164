// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/trainer.h"

#include <atomic>
#include <string>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/checkpoint/checkpoint.h"

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
