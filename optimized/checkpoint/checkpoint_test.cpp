// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/checkpoint.h"

#include <fstream>
#include <limits>
#include <memory>

#include <gtest/gtest.h>

#include "optimized/checkpoint/checkpoint_test_support.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/timings.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/scripted_store.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::vector<std::vector<double>> state_of(const Engine& engine) {
  std::vector<std::vector<double>> state;
  for (const OwnedPart& part : engine.store().parts()) {
    state.push_back(ParameterStore::values_of(engine.store().stored(part)));
    state.push_back(ParameterStore::values_of(engine.store().master(part)));
    state.push_back(ParameterStore::values_of(engine.store().first_moment(part)));
    state.push_back(ParameterStore::values_of(engine.store().second_moment(part)));
  }
  return state;
}

void load_into_new_engines(const RunConfig& config, const fs::path& step_folder) {
  with_engines(config, [&](Engine& engine) { load_checkpoint(step_folder, read_checkpoint_info(step_folder), engine); });
}

TEST(Checkpoint, GivesBackEveryFieldOfState) {
  for (const std::string precision : {"fp32", "bf16", "fp64", "fp8"}) {
    const TestFolder folder;
    RunConfig config = in_precision(tiny_config(), precision);
    config.schedule = {ScheduleKind::cosine, 3, 0, 0.1};
    const SyntheticCorpus corpus({.vocabulary = 13, .sequence = 7});
    std::vector<std::vector<double>> state;
    CheckpointInfo saved{config, 2, "synthetic", "rows of 7"};
    with_engines(config, [&](Engine& engine) {
      for (std::int64_t step = 0; step < 2; ++step) engine.train_step(corpus.training_batch(step, 4), step);
      engine.loss_scaler().set_state({1, 0, 0});
      static_cast<void>(save_checkpoint(folder.path(), engine, saved));
      state = state_of(engine);
      if (engine.fp8_scaling() != nullptr) saved.fp8 = engine.fp8_scaling()->state();
    });

    const fs::path step_folder = find_checkpoint(folder.path());
    const CheckpointInfo info = read_checkpoint_info(step_folder);

    EXPECT_EQ(step_folder.filename(), "step-00000002");
    EXPECT_EQ(TestFolder::read(folder / "latest"), "step-00000002\n");
    EXPECT_EQ(info.next_step, 2);
    EXPECT_EQ(info.updates, 2);
    EXPECT_EQ(info.data, "synthetic");
    EXPECT_EQ(info.data_identity, "rows of 7");
    EXPECT_EQ(info.learning_rate, config.optimizer.learning_rate);
    EXPECT_EQ(info.fp8, saved.fp8);
    EXPECT_EQ(to_json(info.config), to_json(config));
    with_engines(info.config, [&](Engine& engine) {
      load_checkpoint(step_folder, info, engine);
      EXPECT_EQ(state_of(engine), state) << precision;
      EXPECT_EQ(engine.updates(), 2);
    });
  }
}

TEST(Checkpoint, ARunWithoutScaleHandsNoneOn) {
  const TestFolder folder;
  save_trained(tiny_config(), folder.path());
  const fs::path step_folder = find_checkpoint(folder.path());
  RunConfig half = in_precision(tiny_config(), "fp16");
  half.plan.loss_scale.initial = 4096;

  with_engines(half, [&](Engine& engine) {
    load_checkpoint(step_folder, read_checkpoint_info(step_folder), engine);
    EXPECT_EQ(engine.loss_scaler().scale(), 4096);
    EXPECT_EQ(engine.updates(), 2);
  });
}

TEST(Checkpoint, MovesBetweenOptimizersAsFarAsTheyShareState) {
  const TestFolder folder, plain;
  save_trained(tiny_config(), folder.path());
  RunConfig sgd = tiny_config();
  sgd.optimizer.kind = OptimizerKind::sgd;
  save_trained(sgd, plain.path());

  EXPECT_NO_THROW(load_into_new_engines(sgd, find_checkpoint(folder.path())));
  const std::string message =
      message_of<InputError>([&] { load_into_new_engines(tiny_config(), find_checkpoint(plain.path())); });
  EXPECT_NE(message.find("has no tensor 'm.wte.weight'"), std::string::npos) << message;
}

TEST(Checkpoint, NumbersSurviveBitForBit) {
  CheckpointManifest manifest;
  manifest.info.config = tiny_config();
  manifest.info.config.seed = std::numeric_limits<std::uint64_t>::max();
  manifest.info.next_step = (std::int64_t{1} << 53) + 1;
  manifest.info.updates = manifest.info.next_step - 1;
  manifest.info.learning_rate = 0.1 + 0.2;
  manifest.info.loss_scaler = {0x1p-1000, 3, 4};
  manifest.info.fp8 = {{0.0, 5e-324, 1.7976931348623157e308, 1.0 / 3.0}, 2};
  manifest.info.data = "a \"quoted\" name\n";

  const CheckpointManifest again = parse_manifest(to_json(manifest), "manifest.json");

  EXPECT_EQ(again.info.next_step, manifest.info.next_step);
  EXPECT_EQ(again.info.updates, manifest.info.updates);
  EXPECT_EQ(again.info.learning_rate, manifest.info.learning_rate);
  EXPECT_EQ(again.info.loss_scaler, manifest.info.loss_scaler);
  EXPECT_EQ(again.info.fp8, manifest.info.fp8);
  EXPECT_EQ(again.info.data, manifest.info.data);
  EXPECT_EQ(again.info.config.seed, manifest.info.config.seed);
  EXPECT_EQ(to_json(again), to_json(manifest));
  manifest.info.learning_rate = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW((void)to_json(manifest), ContractError);
}

TEST(Checkpoint, TheNewestCountsAndOlderOnesStay) {
  const TestFolder folder;
  save_trained(tiny_config(), folder.path(), 1);
  save_trained(tiny_config(), folder.path(), 3);
  write_file_atomically(folder.path() / "latest", "step-00000001\n");
  fs::create_directory(folder.path() / "step-00000009.unfinished");

  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000003");
  EXPECT_EQ(read_checkpoint_info(find_checkpoint(folder.path() / "step-00000001/")).next_step, 1);
}

TEST(Checkpoint, RefusesAFolderWithoutOne) {
  const TestFolder folder;
  const auto refusal = [](const fs::path& path) {
    return message_of<InputError>([&] { static_cast<void>(find_checkpoint(path)); });
  };
  EXPECT_NE(refusal(folder.path()).find("no checkpoint here"), std::string::npos);
  EXPECT_NE(refusal(folder.path() / "nothing").find("no such folder"), std::string::npos);
  fs::create_directory(folder.path() / "step-00000004");
  EXPECT_NE(refusal(folder.path()).find("none of its 1 checkpoints is whole"), std::string::npos);
  EXPECT_NE(refusal(folder.path()).find("step-00000004: has no manifest.json"), std::string::npos);
}

TEST(Checkpoint, RefusesTensorsOfAnotherModel) {
  const TestFolder folder;
  save_trained(tiny_config(), folder.path());
  const fs::path step_folder = find_checkpoint(folder.path());
  const auto refusal = [&](const std::function<void(GptConfig&)>& change) {
    RunConfig other = tiny_config();
    change(other.model);
    return message_of<InputError>([&] { load_into_new_engines(other, step_folder); });
  };

  const std::string wider = refusal([](GptConfig& model) { model.mlp_hidden = 9; });
  EXPECT_NE(wider.find("h.0.mlp.c_fc.weight is [8, 32], the model needs [8, 9]"), std::string::npos) << wider;
  const std::string deeper = refusal([](GptConfig& model) { model.layers = 2; });
  EXPECT_NE(deeper.find("manifest.json: has no tensor 'h.1.ln_1.weight'"), std::string::npos) << deeper;
  const std::string untied = refusal([](GptConfig& model) { model.tied = false; });
  EXPECT_NE(untied.find("has no tensor 'lm_head.weight'"), std::string::npos) << untied;
}

TEST(Checkpoint, RefusesTensorsThatTheModelDoesNotHave) {
  const TestFolder folder;
  RunConfig untied = tiny_config();
  untied.model.tied = false;
  save_trained(untied, folder.path());

  const std::string message =
      message_of<InputError>([&] { load_into_new_engines(tiny_config(), find_checkpoint(folder.path())); });

  EXPECT_NE(message.find("tensor 'lm_head.weight' is none of the model's"), std::string::npos) << message;
}

TEST(Checkpoint, RefusesALearningRateThatItsScheduleDoesNotGive) {
  const TestFolder folder;
  save_trained(tiny_config(), folder.path());
  const fs::path step_folder = find_checkpoint(folder.path());
  change_manifest(step_folder, [](CheckpointManifest& manifest) { manifest.info.learning_rate = 0.5; });

  const std::string message = message_of<InputError>([&] { load_into_new_engines(tiny_config(), step_folder); });

  EXPECT_NE(message.find("field 'learning_rate' is 0.5, the saved schedule gives 0.001 at step 2"), std::string::npos) << message;
}

TEST(Checkpoint, AMissingTensorIsTakenAsInitialisedByTheFault) {
  const TestFolder folder;
  save_trained(tiny_config(), folder.path());
  const fs::path step_folder = find_checkpoint(folder.path());
  change_manifest(step_folder, [](CheckpointManifest& manifest) {
    std::erase_if(manifest.tensors, [](const CheckpointTensor& tensor) { return tensor.name == "ln_f.weight"; });
  });

  const std::string message = message_of<InputError>([&] { load_into_new_engines(tiny_config(), step_folder); });
  EXPECT_NE(message.find("has no tensor 'ln_f.weight'"), std::string::npos) << message;
  const Pitfall planted[] = {Pitfall::missing_tensor_keeps_initial};
  with_engines(
      tiny_config(),
      [&](Engine& engine) {
        const TensorView norm = engine.store().parameter(engine.store().index_of("ln_f.weight"));
        const std::vector<double> initial = ParameterStore::values_of(norm);
        load_checkpoint(step_folder, read_checkpoint_info(step_folder), engine);
        EXPECT_EQ(ParameterStore::values_of(norm), initial);
      },
      PitfallSet(planted));
}

TEST(Checkpoint, AFullDiskLeavesTheOlderOneAndNothingElse) {
  const TestFolder folder;
  save_trained(tiny_config(), folder.path(), 1);
  {
    const FileSizeLimit limit(2000);
    EXPECT_THROW(save_trained(tiny_config(), folder.path(), 2), IoError);
  }
  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000001");
  EXPECT_FALSE(fs::exists(folder.path() / "step-00000002.unfinished"));
}

TEST(Checkpoint, TakesOverWhatARunOfAnotherLayoutLeftUnfinished) {
  const TestFolder folder;
  fs::create_directory(folder.path() / "step-00000002.unfinished");
  folder.write("step-00000002.unfinished/shard-00000.safetensors", "half");
  folder.write("step-00000002.unfinished/shard-00007.safetensors", "of eight ranks");
  save_trained(tiny_config({.data = 2}), folder.path(), 2);
  EXPECT_EQ(find_checkpoint(folder.path()).filename(), "step-00000002");
}

TEST(Checkpoint, GivesBackTheNumberOfSkippedSteps) {
  const TestFolder folder;
  const RunConfig config = in_precision(tiny_config(), "fp16");
  save_trained(config, folder.path());
  const fs::path step_folder = find_checkpoint(folder.path());
  change_manifest(step_folder, [](CheckpointManifest& manifest) { manifest.info.loss_scaler.skipped_steps = 1; });
  with_engines(config, [&](Engine& engine) {
    load_checkpoint(step_folder, read_checkpoint_info(step_folder), engine);
    EXPECT_EQ(engine.loss_scaler().state().skipped_steps, 1);
  });
}

TEST(Checkpointer, IsSafeOnceItIsOnEveryTierAndTimesThat) {
  const TestFolder folder;
  const RunConfig config = tiny_config({.data = 2});
  const auto store = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(folder / "store"), StoreScript{});
  store->set_script({.down = {0, StoreScript::kForEver}});
  with_engines(config, [&](Engine& engine) {
    Checkpointer checkpointer({.folder = folder / "run", .store = store}, engine);
    EXPECT_TRUE(checkpointer.last_is_safe());
    checkpointer.save({config, 1, "synthetic", ""});
    EXPECT_FALSE(checkpointer.last_is_safe());
    checkpointer.finish();
    EXPECT_FALSE(checkpointer.last_is_safe());
    EXPECT_EQ(checkpointer.problems().size(), 1U);
    EXPECT_TRUE(checkpointer.times().back().published && checkpointer.times().back().ended);
    engine.groups().world().barrier();
    if (engine.groups().rank() == 0) store->set_script({});
    engine.groups().world().barrier();
    checkpointer.save({config, 2, "synthetic", ""});
    checkpointer.finish();
    EXPECT_TRUE(checkpointer.last_is_safe());
    EXPECT_GT(checkpointer.times().back().uploading_seconds, 0);
    EXPECT_EQ(checkpointer.problems().size(), 1U);
  });
}

TEST(Checkpointer, TriesTheLastUploadOnceMoreAndElseSaysWhatToDo) {
  const RunConfig config = tiny_config({.data = 2});
  for (const std::int64_t down_for : {std::int64_t{1}, StoreScript::kForEver}) {
    const TestFolder folder;
    const auto store = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(folder / "store"), StoreScript{});
    store->set_script({.down = {0, down_for}});
    with_engines(config, [&](Engine& engine) {
      Checkpointer checkpointer({.folder = folder / "run", .store = store}, engine);
      checkpointer.save({config, 1, "synthetic", ""});
      checkpointer.finish();
      EXPECT_EQ(checkpointer.last_is_safe(), down_for == 1);
      ASSERT_EQ(checkpointer.problems().size(), down_for == 1 ? 0U : 1U);
      if (down_for != 1) {
        EXPECT_NE(checkpointer.problems()[0].find("copy this folder to the store"), std::string::npos);
      }
    });
  }
}

TEST(Checkpointer, AnUploadThatFailedIsForgottenWhenItsStepIsSavedAgain) {
  const TestFolder folder;
  const RunConfig config = tiny_config();
  const auto store = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(folder / "store"), StoreScript{});
  store->set_script({.down = {0, 1}});
  with_engines(config, [&](Engine& engine) {
    Checkpointer checkpointer({.folder = folder / "run", .store = store}, engine);
    const auto save = [&] {
      checkpointer.save({config, 1, "synthetic", ""});
      while (checkpointer.busy()) checkpointer.poll();
    };
    save();
    EXPECT_FALSE(checkpointer.last_is_safe());
    save();  // after a rollback
    EXPECT_TRUE(checkpointer.last_is_safe());
    store->set_script({.down = {0, StoreScript::kForEver}});

    checkpointer.finish();

    EXPECT_TRUE(checkpointer.last_is_safe());
    EXPECT_EQ(checkpointer.problems().size(), 1U);
    EXPECT_EQ(store->counts().operations, 0);
  });
}

TEST(Publish, RefusesWhereAFileOfARankIsNotThereOrTooShort) {
  const TestFolder folder;
  save_trained(tiny_config({.data = 2}), folder.path());
  const fs::path whole = find_checkpoint(folder.path());
  const fs::path unfinished = unfinished_folder(folder.path(), 2);
  const CheckpointManifest manifest = read_manifest_of(whole);
  fs::rename(whole, unfinished);
  fs::remove(unfinished / kManifestName);
  const auto refusal = [&] {
    return message_of<IoError>([&] { (void)publish_checkpoint(system_files(), manifest, {.folder = folder.path()}); });
  };
  const fs::path shard = unfinished / shard_name(1);
  fs::resize_file(shard, fs::file_size(shard) - 1);
  EXPECT_NE(refusal().find("were written"), std::string::npos) << refusal();
  fs::remove(shard);
  EXPECT_NE(refusal().find("the same file system"), std::string::npos) << refusal();
  EXPECT_FALSE(fs::exists(whole));
}

TEST(Timings, GiveBackWhatWasWrittenAndPassOverTornLines) {
  const TestFolder folder;
  append_timings(folder.path(), {{.step = 3, .total_bytes = 40, .blocking_seconds = 0.1, .uploading_seconds = 1e-9}, 0.25});
  std::ofstream(folder / "timings.jsonl", std::ios::app) << "{\"step\": 4, \"by\n";
  append_timings(folder.path(), {{.step = 5}, 0.5});
  const std::vector<TimedCheckpoint> read = read_timings(folder.path());
  ASSERT_EQ(read.size(), 2U);
  EXPECT_EQ(read[0].times.step, 3);
  EXPECT_EQ(read[0].times.total_bytes, 40);
  EXPECT_EQ(read[0].times.blocking_seconds, 0.1);
  EXPECT_EQ(read[0].times.uploading_seconds, 1e-9);
  EXPECT_EQ(read[1].step_seconds, 0.5);
}

TEST(CheckpointCatalogue, NamesOfStepFoldersAreRead) {
  EXPECT_EQ(step_folder_name(120), "step-00000120");
  EXPECT_EQ(step_folder_name(1234567890), "step-1234567890");
  EXPECT_EQ(parse_step_folder_name("step-00000120"), 120);
  EXPECT_EQ(parse_step_folder_name("step-1234567890"), 1234567890);
  for (const char* other :
       {"step-120", "step-00000120.unfinished", "step--0000120", "step-0000012x", "latest", "step-01234567890"}) {
    EXPECT_EQ(parse_step_folder_name(other), std::nullopt) << other;
  }
}

TEST(CheckpointCatalogue, PruningKeepsTheNewestWholeOnes) {
  const TestFolder folder;
  for (const std::int64_t step : {1, 2, 3, 4, 5}) save_trained(tiny_config(), folder.path(), step);
  fs::remove(folder.path() / "step-00000005" / "shard-00000.safetensors");
  fs::remove(folder.path() / "step-00000003" / kManifestName);
  fs::create_directory(folder.path() / "step-00000000");
  folder.write("step-00000000/state.json", "{}");
  const auto steps = [&] {
    std::vector<std::int64_t> found;
    for (const CheckpointEntry& entry : list_checkpoints(folder.path())) found.push_back(entry.step);
    return found;
  };

  prune_checkpoints(folder.path(), 0, system_files());
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{5, 4, 3, 2, 1, 0}));
  prune_checkpoints(folder.path(), 2, system_files(), {1});
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{5, 4, 2, 1, 0}));
  prune_checkpoints(folder.path(), 1, system_files());
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{5, 4, 0}));
  fs::remove(folder.path() / "step-00000004" / kManifestName);
  prune_checkpoints(folder.path(), 1, system_files());
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{5, 4, 0}));
}

}  // namespace
}  // namespace tandem
