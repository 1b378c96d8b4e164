// SPDX-License-Identifier: Apache-2.0
#include "suites/kept_training.h"

#include <functional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

using reference::NamedTensors;
using reference::TrainingRun;

constexpr std::int64_t kPlenty = std::int64_t{1} << 30;

Batch tokens(std::int64_t step) {
  Batch batch = make_batch(2, 5);
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    batch.ids[i] = static_cast<std::int32_t>((i * 3 + static_cast<std::size_t>(step)) % 7);
    batch.targets[i] = static_cast<std::int32_t>((i * 5 + static_cast<std::size_t>(step)) % 7);
  }
  return batch;
}

TrainingRun small_run() {
  TrainingRun run;
  run.model = {.vocabulary = 7, .sequence = 5, .layers = 1, .hidden = 4, .heads = 2};
  run.steps = 2;
  run.initialization = Initialization::scattered;
  run.batch = tokens;
  return run;
}

NamedTensors<double> initial_of(const TrainingRun& run) {
  return reference::initial_parameters<double>(run.model, run.initialization, run.seed);
}

TEST(KeptTraining, GivesWhatTheReferenceComputes) {
  KeptTraining<double> kept(kPlenty);
  const auto record = kept.train(small_run());
  const auto again = kept.train(small_run());
  const auto fresh = reference::train<double>(small_run());
  EXPECT_EQ(again, record);
  EXPECT_EQ(kept.times_trained(), 1);
  EXPECT_EQ(record->losses, fresh.losses);
  EXPECT_EQ(record->gradient_norms, fresh.gradient_norms);
  EXPECT_EQ(record->gradients_step0, fresh.gradients_step0);
  EXPECT_EQ(record->parameters, fresh.parameters);
}

TEST(KeptTraining, TrainsAnewWhereAnythingThatDeterminesARunIsOther) {
  const auto other_batch = [](const std::function<void(std::int64_t, Batch&)>& change) {
    return [change](TrainingRun& run) {
      run.batch = [change](std::int64_t step) {
        Batch batch = tokens(step);
        change(step, batch);
        return batch;
      };
    };
  };
  const std::vector<std::pair<const char*, std::function<void(TrainingRun&)>>> changes = {
      {"model", [](TrainingRun& run) { run.model.layers = 2; }},
      {"dropout", [](TrainingRun& run) { run.model.residual_dropout = 0.25; }},
      {"optimizer", [](TrainingRun& run) { run.optimizer.weight_decay += 0.125; }},
      {"schedule", [](TrainingRun& run) { run.schedule.warmup_steps += 1; }},
      {"ranks", [](TrainingRun& run) { run.layout.ranks = 2; }},
      {"micro-batches", [](TrainingRun& run) { run.layout.micro_batches = 2; }},
      {"steps", [](TrainingRun& run) { run.steps = 3; }},
      {"seed", [](TrainingRun& run) { run.seed = 2; }},
      {"initialization", [](TrainingRun& run) { run.initialization = Initialization::gpt2; }},
      {"numerics", [](TrainingRun& run) { run.numerics.storage = DType::bf16; }},
      {"loss scale", [](TrainingRun& run) { run.loss_scale.initial *= 2; }},
      {"fp8", [](TrainingRun& run) { run.fp8.history += 1; }},
      {"attention", [](TrainingRun& run) { run.materialized_attention = true; }},
      {"an id of the first step", other_batch([](std::int64_t step, Batch& batch) { batch.ids[3] += step == 0 ? 1 : 0; })},
      {"a target of the last step", other_batch([](std::int64_t step, Batch& batch) {
         if (step == 1) batch.targets.back() = kIgnoredTarget;
       })},
      {"positions", other_batch([](std::int64_t, Batch& batch) { std::swap(batch.positions[0], batch.positions[1]); })},
      {"documents", other_batch([](std::int64_t, Batch& batch) { batch.document_starts[4] = 3; })},
      {"row ids", other_batch([](std::int64_t, Batch& batch) { std::swap(batch.row_ids[0], batch.row_ids[1]); })},
  };
  for (const auto& [what, change] : changes) {
    KeptTraining<double> kept(kPlenty);
    (void)kept.train(small_run());
    TrainingRun other = small_run();
    change(other);
    (void)kept.train(other);
    EXPECT_EQ(kept.times_trained(), 2) << what;
  }
}

TEST(KeptTraining, TrainsAnewFromOtherParameters) {
  KeptTraining<double> kept(kPlenty);
  const TrainingRun run = small_run();
  NamedTensors<double> initial = initial_of(run);
  const auto record = kept.train(run, initial);
  EXPECT_EQ(kept.train(run, initial), record);
  initial.begin()->second.back() += 0x1p-40;
  EXPECT_NE(kept.train(run, initial)->losses, record->losses);
  EXPECT_EQ(kept.times_trained(), 2);
}

TEST(KeptTraining, ForgetsWhatWasNotAskedForTheLongest) {
  KeptTraining<double> first(kPlenty);
  (void)first.train(small_run());
  KeptTraining<double> kept(2 * first.kept_bytes() + first.kept_bytes() / 2);  // two, and not three
  std::vector<TrainingRun> runs(3, small_run());
  for (std::size_t i = 0; i < runs.size(); ++i) runs[i].seed = i + 1;
  (void)kept.train(runs[0]);
  (void)kept.train(runs[1]);
  (void)kept.train(runs[0]);
  (void)kept.train(runs[2]);  // the second goes
  EXPECT_EQ(kept.times_trained(), 3);
  (void)kept.train(runs[0]);
  EXPECT_EQ(kept.times_trained(), 3);
  (void)kept.train(runs[1]);
  EXPECT_EQ(kept.times_trained(), 4);
  EXPECT_LE(kept.kept_bytes(), 2 * first.kept_bytes() + first.kept_bytes() / 2);
}

TEST(KeptTraining, KeepsNothingThatIsTooLarge) {
  KeptTraining<float> kept(10);
  EXPECT_EQ(kept.train(small_run())->losses, kept.train(small_run())->losses);
  EXPECT_EQ(kept.times_trained(), 2);
  EXPECT_EQ(kept.kept_bytes(), 0);
}

}  // namespace
}  // namespace tandem
