// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/residuals.h"

#include <atomic>
#include <cmath>
#include <functional>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/safetensors.h"
#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/world.h"
#include "optimized/data_parallel/compressed_sync.h"

namespace tandem {
namespace {

RunConfig config_of(int ranks, const std::string& codec) {
  RunConfig config;
  config.model.vocabulary = 29;
  config.model.sequence = 8;
  config.model.layers = 1;
  config.model.hidden = 12;
  config.model.heads = 3;
  config.plan.parallel.data = ranks;
  config.plan.batch = {6, 1};
  config.plan.compression.codec = codec;
  config.plan.compression.block = 16;
  config.plan.compression.rank = 2;
  return config;
}

void with_engines(const RunConfig& config, const std::function<void(Engine&)>& use) {
  run_world({.ranks = config.plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    Arena arena({.poison = true, .huge_pages = false});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}}, {config.model, config.plan, config.optimizer, {}, 4, 1});
    engine.store().initialise(config.model, Initialization::scattered, 1);
    use(engine);
  });
}

void train_and_save(const RunConfig& config, const std::filesystem::path& folder) {
  const SyntheticCorpus corpus({.vocabulary = 29, .sequence = 8});
  with_engines(config, [&](Engine& engine) {
    for (int step = 0; step < 2; ++step) engine.train_step(corpus.training_batch(step, 6), step);
    static_cast<void>(save_checkpoint(folder, engine, {config, 2, "synthetic"}));
  });
}

double sum_of(const SafetensorsFile& file, const std::string& name, std::int64_t element) {
  return file.contains(name) ? file.read_as<double>(name)[static_cast<std::size_t>(element)] : 0.0;
}

TEST(Residuals, AreSavedForEveryRankAndThoseOfSumsOnce) {
  const TestFolder folder;
  train_and_save(config_of(3, "int8"), folder.path());

  const std::filesystem::path step = find_checkpoint(folder.path());
  std::vector<std::vector<float>> values;
  for (const char* rank : {"00000", "00001", "00002"}) {
    const SafetensorsFile file(step / fmt::format("residuals-{}.safetensors", rank));
    values.push_back(file.read_as<float>("residual.h.0.mlp.c_fc.weight"));
    EXPECT_EQ(file.contains("sum_residual.h.0.mlp.c_fc.weight"), std::string(rank) == "00000");
    EXPECT_EQ(file.metadata().at("gradient_scale"), "1");
  }
  EXPECT_NE(values[0], values[1]);
  EXPECT_NE(values[1], values[2]);
}

TEST(Residuals, OfAnotherNumberOfRanksHaveTheSameSum) {
  const TestFolder folder, again;
  train_and_save(config_of(3, "int8"), folder.path());
  const std::filesystem::path saved = find_checkpoint(folder.path());
  const RunConfig two = config_of(2, "top_k");
  with_engines(two, [&](Engine& engine) {
    load_checkpoint(saved, read_checkpoint_info(saved), engine);
    static_cast<void>(save_checkpoint(again.path(), engine, {two, 2, "synthetic"}));
  });

  const std::string name = "h.0.attn.c_attn.weight";
  const std::filesystem::path loaded = find_checkpoint(again.path());
  for (const std::int64_t element : {0, 7, 200, 431}) {
    double before = 0, after = 0;
    for (const char* file : {"residuals-00000.safetensors", "residuals-00001.safetensors", "residuals-00002.safetensors"}) {
      const SafetensorsFile of_rank(saved / file);
      before += sum_of(of_rank, "residual." + name, element) + sum_of(of_rank, "sum_residual." + name, element);
    }
    for (const char* file : {"residuals-00000.safetensors", "residuals-00001.safetensors"}) {
      after += sum_of(SafetensorsFile(loaded / file), "residual." + name, element);
    }
    EXPECT_NE(before, 0.0);
    EXPECT_EQ(after, static_cast<float>(before)) << element;
  }
}

TEST(Residuals, OfACodeWithoutErrorFeedbackAreNone) {
  const TestFolder folder;
  RunConfig config = config_of(2, "int8");
  config.plan.compression.error_feedback = false;
  train_and_save(config, folder.path());
  const std::filesystem::path step = find_checkpoint(folder.path());

  EXPECT_FALSE(std::filesystem::exists(step / "residuals-00000.safetensors"));
  EXPECT_NO_THROW(with_engines(config, [&](Engine& engine) { load_checkpoint(step, read_checkpoint_info(step), engine); }));
}

TEST(Residuals, ThatAreMissingAreAnError) {
  const TestFolder folder;
  const RunConfig config = config_of(2, "power_sgd");
  train_and_save(config, folder.path());
  const std::filesystem::path step = find_checkpoint(folder.path());
  std::filesystem::remove(step / "residuals-00001.safetensors");

  EXPECT_NE(find_damage(step, VerifyDepth::manifest).value_or("").find("residuals-00001.safetensors: is missing"),
            std::string::npos);
  EXPECT_THROW(with_engines(config, [&](Engine& engine) { load_checkpoint(step, read_checkpoint_info(step), engine); }), Error);
}

TEST(CompressedSync, PredictsWhatItKeeps) {
  for (const char* codec : {"int8", "top_k", "power_sgd"}) {
    const RunConfig config = config_of(3, codec);
    RunConfig plain = config;
    plain.plan.compression.codec = "none";
    const auto gradients = [](const RunConfig& of) {
      std::atomic<std::int64_t> bytes = 0;
      with_engines(of, [&](Engine& engine) {
        if (engine.groups().rank() != 1) return;
        bytes = engine.context().arena->ledger().current()[static_cast<std::size_t>(MemoryCategory::gradients)];
      });
      return bytes.load();
    };
    const ProcessGrid grid(config.plan);
    const std::int64_t predicted =
        compressed_state_bytes(config.plan, grid, 1, local_parameters(config.model, config.plan, grid, 1));
    const std::int64_t kept = gradients(config) - gradients(plain);
    // Blocks at the ends of tensors are not full, buffers are rounded up to 64 bytes.
    EXPECT_LE(kept, predicted + 4 * 64) << codec;
    EXPECT_GE(kept, 0.9 * static_cast<double>(predicted)) << codec;
  }
}

TEST(CompressedSync, EndsTheWorldWhereARankLeavesWithASumUnderWay) {
  RunConfig config = config_of(2, "int8");
  config.plan.overlap.gradients = true;
  const std::vector<LocalParameter> parameters = local_parameters(config.model, config.plan, ProcessGrid(config.plan), 0);
  const auto leave = [&](Communicator& comm) {
    Arena arena({.huge_pages = false});
    const auto kernels = make_cpu_kernels({});
    ProcessGroups groups(comm, config.plan);
    std::vector<float> gradients(static_cast<std::size_t>(buckets_of(config.plan, parameters).front().elements.size()));
    CompressedSync sync({&comm, kernels.get(), &arena, nullptr, {}, {}}, arena, config.plan, 1, groups, parameters);
    sync.begin_step(0, 1);
    if (comm.rank() == 1) comm.barrier();
    static_cast<void>(sync.start(0, view_of(gradients, {std::ssize(gradients)}), Progress::background));
    throw InputError("rank 0 gives up");
  };

  EXPECT_THROW(run_world({.ranks = 2}, leave), Error);
}

}  // namespace
}  // namespace tandem
