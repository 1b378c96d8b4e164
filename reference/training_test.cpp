// SPDX-License-Identifier: Apache-2.0
#include "reference/training.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "reference/test_support.h"

namespace tandem::reference {
namespace {

TrainingRun small_run() {
  TrainingRun run;
  run.model = {.vocabulary = 11, .sequence = 6, .layers = 2, .hidden = 8, .heads = 2, .mlp_hidden = 12};
  run.steps = 4;
  run.seed = 5;
  run.initialization = Initialization::scattered;
  run.batch = [model = run.model](std::int64_t step) {
    return ragged_batch(model, 6, {6, 1, 4, 0, 3}, static_cast<std::uint64_t>(step));
  };
  return run;
}

TEST(Training, StartsFromItsSeedOrFromGivenParameters) {
  TrainingRun run = small_run();
  run.steps = 0;
  EXPECT_EQ(train<double>(run).parameters, initial_parameters<double>(run.model, run.initialization, 5));

  const NamedTensors<double> given = lively_parameters(run.model, 3);
  EXPECT_EQ(train<double>(run, given).parameters, given);
}

TEST(Training, RecordsEveryStep) {
  TrainingRun run = small_run();
  run.schedule = {ScheduleKind::cosine, 2, 0, 0.1};
  run.optimizer.max_grad_norm = 1e-3;

  const TrainingRecord<double> record = train<double>(run);

  ASSERT_EQ(record.losses.size(), 4U);
  for (std::size_t s = 0; s < 4; ++s) {
    EXPECT_EQ(record.learning_rates[s], learning_rate(run.optimizer, run.schedule, static_cast<std::int64_t>(s), 4));
    EXPECT_EQ(record.clip_coefficients[s], clip_coefficient(record.gradient_norms[s], 1e-3));
    EXPECT_LT(record.clip_coefficients[s], 1.0);
  }
  EXPECT_EQ(record.optimizer.updates, 4);
  EXPECT_EQ(record.gradient_norms[0], global_norm(record.gradients_step0)) << "the kept gradient is the unclipped one";
  EXPECT_NE(record.parameters_step1, record.parameters);
}

TEST(Training, DrawsNewDropoutMasksEveryStep) {
  TrainingRun run = small_run();
  run.model.residual_dropout = 0.3;
  run.optimizer.learning_rate = 0.0;
  run.steps = 2;
  run.batch = [model = run.model](std::int64_t) { return ragged_batch(model, 6, {6, 4}, 1); };

  const TrainingRecord<double> record = train<double>(run, lively_parameters(run.model, 3));

  EXPECT_NE(record.losses[0], record.losses[1]);
}

TEST(Training, IsIndependentOfTheLayoutWithSgd) {
  TrainingRun run = small_run();
  run.model.embedding_dropout = run.model.attention_dropout = run.model.residual_dropout = 0.1;
  run.optimizer.kind = OptimizerKind::sgd;
  run.optimizer.learning_rate = 0.1;
  const NamedTensors<double> initial = lively_parameters(run.model, 3);
  const TrainingRecord<double> expected = train<double>(run, initial);

  run.layout = {3, 2};
  const TrainingRecord<double> got = train<double>(run, initial);

  EXPECT_NE(expected.parameters, initial);
  for (const auto& [name, values] : expected.parameters) {
    // Four steps whose gradients agree to 1e-14; plain SGD does not amplify that.
    EXPECT_LE(relative_l2(got.parameters.at(name), values), 1e-12) << name;
  }
}

TEST(Training, NeedsBatches) {
  TrainingRun run = small_run();
  run.batch = nullptr;
  EXPECT_THROW(static_cast<void>(train<double>(run)), ContractError);
}

}  // namespace
}  // namespace tandem::reference
