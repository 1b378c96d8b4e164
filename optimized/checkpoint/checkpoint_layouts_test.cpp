// SPDX-License-Identifier: Apache-2.0
// A run that goes on under another layout at every step is the run of one rank.
#include "optimized/checkpoint/checkpoint.h"

#include <vector>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "reference/training.h"

namespace tandem {
namespace {

RunConfig config_of(const GptConfig& model, const ParallelDegrees& degrees, bool sequence_parallel = false,
                    const PipelineConfig& pipeline = {}) {
  RunConfig config;
  config.model = model;
  config.optimizer.max_grad_norm = 0.5;
  config.plan.parallel = degrees;
  config.plan.sequence_parallel = sequence_parallel;
  config.plan.pipeline = pipeline;
  config.plan.batch = {7, 2};
  config.plan.precision = "fp64";
  config.plan.numerics = numerics_from_precision("fp64");
  return config;
}

RunConfig sharded(RunConfig config, int zero_stage, const std::string& offload = "none") {
  config.plan.zero_stage = zero_stage;
  config.plan.offload = offload;
  return config;
}

void expect_one_run(const GptConfig& model, const std::vector<RunConfig>& layouts) {
  const TestFolder folder;
  const SyntheticCorpus corpus({.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = 3});
  reference::TrainingRun definition;
  definition.model = model;
  definition.seed = 5;
  definition.initialization = Initialization::scattered;
  definition.optimizer = layouts.front().optimizer;
  definition.steps = std::ssize(layouts);
  definition.batch = [&](std::int64_t step) { return corpus.training_batch(step, 7); };
  const auto expected = reference::train<double>(definition);

  for (std::size_t step = 0; step < layouts.size(); ++step) {
    const RunConfig& config = layouts[step];
    run_world({.ranks = config.plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)},
              [&](Communicator& comm) {
                Arena arena({.poison = true});
                const auto kernels = make_cpu_kernels({});
                Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}},
                              {config.model, config.plan, config.optimizer, {}, definition.steps, 5});
                engine.store().initialise(model, Initialization::scattered, 5);
                if (step > 0) {
                  const std::filesystem::path saved = find_checkpoint(folder.path());
                  load_checkpoint(saved, read_checkpoint_info(saved), engine);
                }
                const auto number = static_cast<std::int64_t>(step);
                const StepResult result = engine.train_step(corpus.training_batch(number, 7), number);
                EXPECT_NEAR(result.loss, expected.losses[step], 1e-10) << "layout " << step << ", rank " << comm.rank();
                EXPECT_NEAR(result.gradient_norm, expected.gradient_norms[step], 1e-9) << "layout " << step;
                (void)save_checkpoint(folder.path(), engine, {config, number + 1, "synthetic"});
              });
  }
}

GptConfig small_model() {
  GptConfig model;
  model.vocabulary = 37;
  model.sequence = 11;
  model.layers = 4;
  model.hidden = 24;
  model.heads = 4;
  model.mlp_hidden = 40;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  return model;
}

TEST(CheckpointLayouts, AnyLoadsWhatAnyOtherSaved) {
  const GptConfig model = small_model();
  expect_one_run(model, {config_of(model, {.data = 2}), config_of(model, {.tensor = 2, .pipeline = 2, .context = 2}, true),
                         config_of(model, {.tensor = 4}), config_of(model, {.pipeline = 2}, false, {"zb-v", 2, ""}),
                         config_of(model, {.data = 2, .pipeline = 4}), config_of(model, {}),
                         config_of(model, {.data = 2, .tensor = 2}, true)});
}

TEST(CheckpointLayouts, ExpertsMoveBetweenRanks) {
  GptConfig model = small_model();
  model.experts = 4;
  model.expert_choices = 2;
  model.auxiliary_loss_weight = 0.1;
  expect_one_run(model,
                 {config_of(model, {.data = 2, .expert = 2}), config_of(model, {.data = 4, .tensor = 2, .expert = 2}, true),
                  config_of(model, {.tensor = 2, .context = 2}), config_of(model, {.data = 4, .pipeline = 2, .expert = 4}),
                  config_of(model, {})});
}

TEST(CheckpointLayouts, ShardedStateMovesBetweenStagesAndLayouts) {
  const GptConfig model = small_model();
  expect_one_run(model, {sharded(config_of(model, {.data = 3}), 3), config_of(model, {.data = 3}),
                         sharded(config_of(model, {.data = 2, .tensor = 2}, true), 2), sharded(config_of(model, {.data = 7}), 1),
                         sharded(config_of(model, {.data = 2, .pipeline = 2, .context = 2}), 3, "optimizer"),
                         config_of(model, {}), sharded(config_of(model, {.data = 4}), 3)});
}

TEST(CheckpointLayouts, ShardedExpertsMoveBetweenRanks) {
  GptConfig model = small_model();
  model.experts = 4;
  model.expert_choices = 2;
  model.auxiliary_loss_weight = 0.1;
  expect_one_run(model, {sharded(config_of(model, {.data = 4, .expert = 2}), 3), config_of(model, {.data = 2, .expert = 2}),
                         sharded(config_of(model, {.data = 6, .expert = 2}), 2), config_of(model, {})});
}

}  // namespace
}  // namespace tandem
