// SPDX-License-Identifier: Apache-2.0
// Any layout goes on from what any other has saved, and files can be put into another layout without a run.
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "optimized/checkpoint/checkpoint_test_support.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/reshard.h"
#include "optimized/engine/parameter_store.h"
#include "reference/checkpoint.h"
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
  definition.seed = 1;
  definition.initialization = Initialization::scattered;
  definition.optimizer = layouts.front().optimizer;
  definition.steps = std::ssize(layouts);
  definition.batch = [&](std::int64_t step) { return corpus.training_batch(step, 7); };
  const auto expected = reference::train<double>(definition);

  for (std::size_t step = 0; step < layouts.size(); ++step) {
    const RunConfig& config = layouts[step];
    with_engines(config, [&](Engine& engine) {
      if (step > 0) {
        const std::filesystem::path saved = find_checkpoint(folder.path());
        load_checkpoint(saved, read_checkpoint_info(saved), engine);
      }
      const auto number = static_cast<std::int64_t>(step);
      const StepResult result = engine.train_step(corpus.training_batch(number, 7), number);
      EXPECT_NEAR(result.loss, expected.losses[step], 1e-10) << "layout " << step;
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

std::vector<RunConfig> matrix_of_layouts() {
  RunConfig base = tiny_config();
  base.model.layers = 2;
  base.model.heads = 4;
  base.plan.parallel = {};
  const auto with = [&](const ParallelDegrees& degrees, int zero_stage = 0) {
    RunConfig config = base;
    config.plan.parallel = degrees;
    return sharded(config, zero_stage);
  };
  return {with({}),
          with({.data = 3}),
          with({.tensor = 4}),
          with({.data = 2, .tensor = 2, .pipeline = 2}),
          with({.context = 2}, 1),
          with({.data = 3}, 3),
          sharded(with({.data = 2, .tensor = 2}), 3, "optimizer"),
          in_precision(with({.data = 2, .pipeline = 2}, 2), "bf16")};
}

std::filesystem::path save_under(const RunConfig& config, const std::filesystem::path& from, const std::filesystem::path& folder,
                                 const PitfallSet& pitfalls = {}) {
  with_engines(
      config,
      [&](Engine& engine) {
        CheckpointInfo info = read_checkpoint_info(from);
        load_checkpoint(from, info, engine);
        static_cast<void>(save_checkpoint(folder, engine, info));
      },
      pitfalls);
  return find_checkpoint(folder);
}

using Differences = std::vector<std::string>;
Differences differences(const std::filesystem::path& one, const std::filesystem::path& other) {
  return reference::differences(reference::assemble(one), reference::assemble(other));
}

// Elements of what this rank's optimizer goes on from that are not those of the whole tensors.
int elements_other_than(const reference::State& state, const Engine& engine) {
  constexpr std::pair<const char*, PartView> kViews[] = {
      {"", &ParameterStore::master}, {"m.", &ParameterStore::first_moment}, {"v.", &ParameterStore::second_moment}};
  int different = 0;
  for (const OwnedPart& part : engine.store().parts()) {
    const std::vector<std::int64_t> indices = global_indices(part.shard);
    for (const auto& [prefix, view] : kViews) {
      const reference::StateTensor& whole = state.tensors.at(prefix + part.shard.global_name);
      const auto* const values = static_cast<const std::byte*>((engine.store().*view)(part).data());
      const std::size_t size = size_bytes(whole.dtype);
      const std::vector<std::byte> zero(size);
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const auto* const expected = indices[i] < 0 ? zero.data() : &whole.bytes[static_cast<std::size_t>(indices[i]) * size];
        different += std::memcmp(expected, values + i * size, size) == 0 ? 0 : 1;
      }
    }
  }
  return different;
}

TEST(CheckpointLayouts, EachGivesEachTheSameStateToTheLastBit) {
  const std::vector<RunConfig> layouts = matrix_of_layouts();
  for (std::size_t from = 0; from < layouts.size(); ++from) {
    const TestFolder folder;
    save_trained(layouts[from], folder.path(), 1);
    const std::filesystem::path saved = find_checkpoint(folder.path());
    const reference::State state = reference::assemble(saved);
    for (std::size_t to = 0; to < layouts.size(); ++to) {
      with_engines(layouts[to], [&](Engine& engine) {
        load_checkpoint(saved, read_checkpoint_info(saved), engine);
        EXPECT_EQ(elements_other_than(state, engine), 0) << from << " to " << to << ", rank " << engine.groups().rank();
      });
    }
  }
}

TEST(CheckpointLayouts, PartsOfAFusedTensorInTheOrderOfRanksAreNoticed) {
  const std::vector<RunConfig> layouts = matrix_of_layouts();
  const TestFolder folder, same, other;
  save_trained(layouts[2], folder.path(), 1);
  const std::filesystem::path saved = find_checkpoint(folder.path());
  const Pitfall planted[] = {Pitfall::fused_shards_in_rank_order};

  EXPECT_EQ(differences(saved, save_under(layouts[2], saved, same.path(), PitfallSet(planted))), Differences());
  const Differences found = differences(saved, save_under(layouts[0], saved, other.path(), PitfallSet(planted)));
  EXPECT_EQ(found.size(), 12U);  // of two layers: weight and bias, and their moments
  for (const std::string& name : found) EXPECT_NE(name.find("attn.c_attn."), std::string::npos) << name;
}

TEST(CheckpointLayouts, AnotherPrecisionRoundsMasterCopiesAndThenWhatIsStored) {
  const TestFolder folder;
  save_trained(in_precision(tiny_config(), "fp64"), folder.path());
  const std::filesystem::path saved = find_checkpoint(folder.path());
  std::vector<double> exact;
  with_engines(in_precision(tiny_config(), "fp64"), [&](Engine& engine) {
    load_checkpoint(saved, read_checkpoint_info(saved), engine);
    exact = ParameterStore::values_of(engine.store().master(engine.store().parts().front()));
  });

  for (const DType storage : {DType::bf16, DType::f16, DType::f32}) {
    with_engines(in_precision(tiny_config(), std::string(name(storage))), [&](Engine& engine) {
      load_checkpoint(saved, read_checkpoint_info(saved), engine);
      const OwnedPart& part = engine.store().parts().front();
      const std::vector<double> masters = ParameterStore::values_of(engine.store().master(part));
      const std::vector<double> stored = ParameterStore::values_of(engine.store().stored(part));
      for (std::size_t i = 0; i < exact.size(); ++i) {
        ASSERT_EQ(masters[i], static_cast<float>(exact[i]));
        ASSERT_EQ(stored[i], round_to(static_cast<float>(exact[i]), storage));
      }
    });
  }
}

TEST(Reshard, MakesTheFilesThatARunWouldHaveSaved) {
  const std::vector<RunConfig> layouts = matrix_of_layouts();
  for (const auto& [from, to] : {std::pair{2, 5}, {5, 3}, {3, 0}, {7, 6}}) {
    const TestFolder folder, by_run, by_reshard;
    save_trained(layouts[static_cast<std::size_t>(from)], folder.path(), 1);
    const std::filesystem::path saved = find_checkpoint(folder.path());
    const RunConfig& wanted = layouts[static_cast<std::size_t>(to)];

    const std::filesystem::path expected = save_under(wanted, saved, by_run.path());
    const std::filesystem::path made = reshard_checkpoint(saved, by_reshard.path(), wanted.plan);

    EXPECT_EQ(find_checkpoint(by_reshard.path()), made);
    for (const auto& entry : std::filesystem::directory_iterator(expected)) {
      EXPECT_EQ(TestFolder::read(entry.path()), TestFolder::read(made / entry.path().filename())) << entry.path();
    }
    EXPECT_EQ(differences(saved, made), Differences());
  }
}

TEST(Reshard, InItsOwnFolderReplacesTheCheckpoint) {
  const TestFolder folder;
  save_trained(tiny_config({.data = 2}), folder.path());
  const std::filesystem::path saved = find_checkpoint(folder.path());
  const reference::State before = reference::assemble(saved);

  EXPECT_EQ(reshard_checkpoint(saved, folder.path(), tiny_config({.tensor = 2, .pipeline = 1}).plan), saved);

  EXPECT_EQ(find_checkpoint(folder.path()), saved);
  EXPECT_EQ(read_checkpoint_info(saved).config.plan.parallel.tensor, 2);
  EXPECT_EQ(reference::differences(before, reference::assemble(saved)), Differences());
  EXPECT_EQ(folder.num_files(), 2U);  // and `latest`
}

TEST(Reshard, LeavesResidualsBehindAndSaysSo) {
  const TestFolder folder, again;
  RunConfig coded = tiny_config({.data = 2});
  coded.plan.compression.codec = "int8";
  save_trained(coded, folder.path());
  const std::filesystem::path saved = find_checkpoint(folder.path());
  RunConfig wider = coded;
  wider.plan.parallel.data = 4;
  std::string note;

  const auto made = reshard_checkpoint(saved, again.path(), wider.plan, {[&](const std::string& line) { note += line; }});

  EXPECT_NE(note.find("compression had not sent"), std::string::npos);
  EXPECT_NO_THROW(with_engines(wider, [&](Engine& engine) { load_checkpoint(made, read_checkpoint_info(made), engine); }));
}

TEST(Reshard, RefusesWhatIsDamagedAndPlansThatCannotBe) {
  const TestFolder folder, again;
  save_trained(tiny_config(), folder.path());
  const std::filesystem::path saved = find_checkpoint(folder.path());

  EXPECT_THROW((void)reshard_checkpoint(saved, again.path(), tiny_config({.tensor = 3}).plan), InputError);
  std::filesystem::remove(saved / shard_name(0));
  EXPECT_THROW((void)reshard_checkpoint(saved, again.path(), tiny_config().plan), InputError);
  EXPECT_EQ(again.num_files(), 0U);
}

}  // namespace
}  // namespace tandem
