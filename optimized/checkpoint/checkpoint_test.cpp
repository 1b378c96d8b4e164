// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/checkpoint.h"

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "core/io/atomic_file.h"
#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

RunConfig small_config() {
  RunConfig config;
  config.model.vocabulary = 13;
  config.model.sequence = 7;
  config.model.layers = 1;
  config.model.hidden = 8;
  config.model.heads = 2;
  config.plan.batch.rows = 3;
  return config;
}

void with_engine(const RunConfig& config, const std::function<void(Engine&)>& use) {
  run_world({.ranks = 1}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, {config.model, config.plan, config.optimizer, {}, 10, 1});
    use(engine);
  });
}

std::vector<std::vector<double>> state_of(const Engine& engine) {
  std::vector<std::vector<double>> state;
  for (const OwnedPart& part : engine.store().parts()) {
    state.push_back(ParameterStore::values_of(engine.store().master(part)));
    state.push_back(ParameterStore::values_of(engine.store().first_moment(part)));
    state.push_back(ParameterStore::values_of(engine.store().second_moment(part)));
  }
  return state;
}

// A trained engine's checkpoint in `folder`; returns its state.
std::vector<std::vector<double>> save_trained(const fs::path& folder, std::int64_t steps = 2) {
  const RunConfig config = small_config();
  const SyntheticCorpus corpus({.vocabulary = 13, .branching = 4, .sequence = 7});
  std::vector<std::vector<double>> state;
  with_engine(config, [&](Engine& engine) {
    engine.store().initialise(config.model, Initialization::gpt2, 1);
    for (std::int64_t step = 0; step < steps; ++step) engine.train_step(corpus.training_batch(step, 3), step);
    (void)save_checkpoint(folder, engine, {config, steps, "synthetic"});
    state = state_of(engine);
  });
  return state;
}

std::string refusal(const fs::path& folder) {
  return message_of<InputError>([&] {
    const fs::path step_folder = find_checkpoint(folder);
    const CheckpointInfo info = read_checkpoint_info(step_folder);
    with_engine(info.config, [&](Engine& engine) { load_checkpoint(step_folder, info, engine); });
  });
}

TEST(Checkpoint, GivesBackEveryFieldOfState) {
  const TestFolder folder;
  const auto saved = save_trained(folder.path());

  const fs::path step_folder = find_checkpoint(folder.path());
  const CheckpointInfo info = read_checkpoint_info(step_folder);

  EXPECT_EQ(info.next_step, 2);
  EXPECT_EQ(info.updates, 2);
  EXPECT_EQ(info.data, "synthetic");
  EXPECT_EQ(info.config.model, small_config().model);
  with_engine(info.config, [&](Engine& engine) {
    load_checkpoint(step_folder, info, engine);
    EXPECT_EQ(state_of(engine), saved);
    EXPECT_EQ(engine.updates(), 2);
  });
}

TEST(Checkpoint, ARunWithoutScaleHandsNoneOn) {
  const TestFolder folder;
  static_cast<void>(save_trained(folder.path()));
  const fs::path step_folder = find_checkpoint(folder.path());
  RunConfig half = small_config();
  half.plan.precision = "fp16";
  half.plan.numerics = numerics_from_precision("fp16");
  half.plan.loss_scale.initial = 4096;

  with_engine(half, [&](Engine& engine) {
    load_checkpoint(step_folder, read_checkpoint_info(step_folder), engine);
    EXPECT_EQ(engine.loss_scaler().scale(), 4096);
    EXPECT_EQ(engine.updates(), 2);
  });
}

TEST(Checkpoint, LatestNamesTheNewestAndOlderOnesStay) {
  const TestFolder folder;
  (void)save_trained(folder.path(), 1);
  (void)save_trained(folder.path(), 3);

  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000003");
  EXPECT_EQ(read_checkpoint_info(find_checkpoint(folder.path() / "step-00000001")).next_step, 1);
}

TEST(Checkpoint, LeftoversOfAnInterruptedSaveAreNotSeen) {
  const TestFolder folder;
  (void)save_trained(folder.path(), 1);
  fs::create_directory(folder.path() / "step-00000002.unfinished");

  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000001");
}

TEST(Checkpoint, RefusesAFolderWithoutOne) {
  const TestFolder folder;
  EXPECT_NE(refusal(folder.path()).find("no checkpoint here"), std::string::npos);
}

TEST(Checkpoint, RefusesALatestThatNamesNothing) {
  const TestFolder folder;
  write_file_atomically(folder.path() / "latest", "step-00000009\n");
  EXPECT_NE(refusal(folder.path()).find("'latest' names 'step-00000009'"), std::string::npos);
}

TEST(Checkpoint, RefusesAStateThatIsNotJson) {
  const TestFolder folder;
  (void)save_trained(folder.path());
  write_file_atomically(find_checkpoint(folder.path()) / "state.json", "{\"format\": ");
  EXPECT_NE(refusal(folder.path()).find("not JSON"), std::string::npos);
}

TEST(Checkpoint, RefusesAStateWithoutAField) {
  const TestFolder folder;
  (void)save_trained(folder.path());
  write_file_atomically(find_checkpoint(folder.path()) / "state.json", R"({"format": "tandem-checkpoint-1"})");
  EXPECT_NE(refusal(folder.path()).find("'next_step' is missing"), std::string::npos);
}

TEST(Checkpoint, RefusesTruncatedTensors) {
  const TestFolder folder;
  (void)save_trained(folder.path());
  const fs::path file = find_checkpoint(folder.path()) / "optimizer.safetensors";
  fs::resize_file(file, fs::file_size(file) - 4);
  EXPECT_NE(refusal(folder.path()).find("optimizer.safetensors"), std::string::npos);
}

TEST(Checkpoint, RefusesTensorsOfAnotherModel) {
  const TestFolder folder;
  (void)save_trained(folder.path());
  CheckpointInfo info = read_checkpoint_info(find_checkpoint(folder.path()));
  info.config.model.mlp_hidden = 9;

  const std::string message = message_of<InputError>(
      [&] { with_engine(info.config, [&](Engine& engine) { load_checkpoint(find_checkpoint(folder.path()), info, engine); }); });

  EXPECT_NE(message.find("h.0.mlp.c_fc.weight is [8, 32], the model needs [8, 9]"), std::string::npos) << message;
}

TEST(Checkpoint, AFullDiskLeavesTheOlderOneAndNothingElse) {
  const TestFolder folder;
  (void)save_trained(folder.path(), 1);
  {
    const FileSizeLimit limit(2000);
    EXPECT_THROW((void)save_trained(folder.path(), 2), IoError);
  }
  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000001");
  EXPECT_FALSE(fs::exists(folder.path() / "step-00000002.unfinished"));
}

}  // namespace
}  // namespace tandem
