// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/memory_tier.h"

#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "optimized/checkpoint/checkpoint_test_support.h"
#include "optimized/comm/exchange.h"
#include "optimized/recovery/memory_assembly.h"
#include "optimized/recovery/neighbour_copy.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

RunConfig two_nodes() {
  RunConfig config = tiny_config({.data = 2, .tensor = 2});
  config.plan.zero_stage = 1;
  return config;
}

SyntheticCorpus corpus_of(const RunConfig& config) {
  return SyntheticCorpus({.vocabulary = config.model.vocabulary, .sequence = config.model.sequence});
}

// Trains to step `steps` and keeps a copy of each state from step `first_copy` on.
void train_with_copies(const RunConfig& config, const std::function<MemoryTierPlace(int rank)>& place, std::int64_t first_copy,
                       std::int64_t steps, const PitfallSet& pitfalls = {}) {
  const SyntheticCorpus corpus = corpus_of(config);
  with_engines(config, [&](Engine& engine) {
    MemoryTier tier(place(engine.context().world->rank()), engine, pitfalls);
    for (std::int64_t step = 0; step < steps; ++step) {
      engine.train_step(corpus.training_batch(step, config.plan.batch.rows), step);
      if (step + 1 < first_copy) continue;
      tier.save({config, step + 1, "synthetic", corpus.identity()});
      EXPECT_EQ(tier.problem(), "");
      EXPECT_EQ(tier.newest(), step + 1);
    }
  });
}

std::ptrdiff_t open_files() { return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()); }

using State = std::map<std::string, std::vector<double>>;  // by rank and tensor

// All that training goes on with, in engines of any layout.
State load_into(const RunConfig& config, const fs::path& folder) {
  State state;
  std::mutex mutex;
  const CheckpointInfo info = read_checkpoint_info(folder);
  with_engines(config, [&](Engine& engine) {
    load_checkpoint(folder, info, engine);
    const std::lock_guard lock(mutex);
    const std::string rank = std::to_string(engine.context().world->rank()) + ".";
    for (const OwnedPart& part : engine.store().parts()) {
      const std::string name = rank + engine.store().spec(part.parameter).name;
      state[name] = ParameterStore::values_of(engine.store().master(part));
      state[name + ".m"] = ParameterStore::values_of(engine.store().first_moment(part));
      state[name + ".v"] = ParameterStore::values_of(engine.store().second_moment(part));
    }
    state[rank + "updates"] = {static_cast<double>(engine.updates())};
  });
  return state;
}

TEST(MemoryTier, GivesEverythingBackWhenANodeIsGoneToAnyLayout) {
  const RunConfig config = two_nodes();
  const TestFolder disk;
  save_trained(config, disk.path(), 3);
  const fs::path truth = disk / step_folder_name(3);
  struct Loss {
    const char* gone;
    int ranks_per_node;
  };
  for (const auto& [gone, ranks_per_node] : {Loss{"node-0", 2}, Loss{"node-1", 1}, Loss{"nothing", 1}}) {
    const TestFolder folder;
    const MemoryTierPlace place{folder / "run", ranks_per_node};
    const std::ptrdiff_t files = open_files();
    train_with_copies(
        config, [&](int) { return place; }, 2, 3);
    EXPECT_EQ(open_files(), files) << "files of copies stay open";
    fs::remove_all(place.folder / gone);
    EXPECT_EQ(newest_in_memory(place), 3);
    const auto whole = assemble_from_memory(place, {});
    ASSERT_TRUE(whole.has_value()) << gone;
    EXPECT_EQ(find_damage(*whole, VerifyDepth::contents), std::nullopt);
    for (const ParallelDegrees& degrees : {ParallelDegrees{.data = 3}, ParallelDegrees{.tensor = 2}}) {
      EXPECT_EQ(load_into(tiny_config(degrees), *whole), load_into(tiny_config(degrees), truth));
    }
    clear_memory_tier(place);
    EXPECT_FALSE(fs::exists(place.folder));
    EXPECT_FALSE(newest_in_memory(place).has_value());
  }
}

TEST(MemoryTier, IsWholeByItselfOnOneNodeAndKeepsTheLastTwoSteps) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run"};
  train_with_copies(
      config, [&](int) { return place; }, 1, 4);
  EXPECT_EQ(list_checkpoints(place.folder / "node-0").size(), 2U);
  const fs::path newest = place.folder / "node-0" / step_folder_name(4);
  EXPECT_EQ(assemble_from_memory(place, {}), newest);
  EXPECT_EQ(find_damage(place.folder / "node-0" / step_folder_name(3), VerifyDepth::contents), std::nullopt);
}

TEST(MemoryTier, KeepsTwoStepsOfEveryNodeAlsoBeyondARestart) {
  const RunConfig config = two_nodes();
  for (const int ranks_per_node : {1, 2}) {
    const TestFolder folder;
    const MemoryTierPlace place{folder / "run", ranks_per_node};
    train_with_copies(
        config, [&](int) { return place; }, 2, 3);
    const SyntheticCorpus corpus = corpus_of(config);
    with_engines(config, [&](Engine& engine) {
      MemoryTier tier(place, engine);
      tier.save({config, 4, "synthetic", corpus.identity()});
      EXPECT_EQ(tier.problem(), "");
    });
    for (int node = 0; node < 4 / ranks_per_node; ++node) {
      std::vector<std::int64_t> steps;
      for (const CheckpointEntry& entry : list_checkpoints(place.folder / fmt::format("node-{}", node)))
        steps.push_back(entry.step);
      EXPECT_EQ(steps, (std::vector<std::int64_t>{4, 3})) << "node " << node << " of " << ranks_per_node << " ranks";
    }
  }
}

TEST(MemoryTier, LeavesWhatIsNotItsOwnWhenItIsCleared) {
  const TestFolder folder;
  const fs::path mine = folder / "mine";
  for (const char* own : {"node-0/step-00000001", "node-12"}) fs::create_directories(mine / own);
  for (const char* other : {"node-", "node-a", "nodes"}) fs::create_directories(mine / other);
  std::ofstream(mine / "thesis.txt") << "years";

  clear_memory_tier({mine});

  std::set<std::string> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(mine)) left.insert(entry.path().filename().string());
  EXPECT_EQ(left, (std::set<std::string>{"node-", "node-a", "nodes", "thesis.txt"}));
  fs::create_directories(folder / "own/node-3");
  clear_memory_tier({folder / "own"});
  EXPECT_FALSE(fs::exists(folder / "own"));
}

TEST(MemoryTier, WritesOverTheStepBeforeTheNewest) {
  const RunConfig config = tiny_config();
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run"};
  const SyntheticCorpus corpus = corpus_of(config);
  std::vector<ino_t> files;
  with_engines(config, [&](Engine& engine) {
    MemoryTier tier(place, engine);
    for (std::int64_t step = 1; step <= 4; ++step) {
      tier.save({config, step, "synthetic", corpus.identity()});
      struct stat facts {};
      EXPECT_EQ(::stat((place.folder / "node-0" / step_folder_name(step) / "shard-00000.safetensors").c_str(), &facts), 0);
      files.push_back(facts.st_ino);
    }
  });
  EXPECT_EQ(files[2], files[0]);
  EXPECT_EQ(files[3], files[1]);
  EXPECT_NE(files[1], files[0]);
}

// What a process that is killed in a save may leave: the older step on its way to be the next one, some files written.
TEST(MemoryTier, FindsTheStepBeforeOneThatWasNeverCompleted) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run", 2};
  const auto here = [&](int) { return place; };
  train_with_copies(config, here, 2, 3);
  const fs::path node = place.folder / "node-1";
  fs::remove(node / step_folder_name(2) / kManifestName);
  fs::rename(node / step_folder_name(2), node / (step_folder_name(4) + ".unfinished"));
  fs::resize_file(node / (step_folder_name(4) + ".unfinished") / "shard-00002.safetensors", 100);
  fs::resize_file(node / (step_folder_name(4) + ".unfinished") / "shard-00003.safetensors", 100000);  // of another layout
  std::ofstream(node / (step_folder_name(4) + ".unfinished") / "shard-00004.safetensors") << "of another layout";
  EXPECT_EQ(newest_in_memory(place), 3);
  // The other node was through already, and is gone then: its step 4 is in no one's memory.
  fs::create_directories(place.folder / "node-0" / step_folder_name(4));
  fs::copy_file(place.folder / "node-0" / step_folder_name(3) / kManifestName,
                place.folder / "node-0" / step_folder_name(4) / kManifestName);
  std::vector<std::string> notes;
  const auto whole = assemble_from_memory(place, {}, [&](const std::string& line) { notes.push_back(line); });
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(read_checkpoint_info(*whole).next_step, 3);
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("step 4"), std::string::npos);
  // The next attempt makes use of what is left, and leaves nothing but its own.
  train_with_copies(config, here, 5, 6);
  EXPECT_EQ(assemble_from_memory(place, {}), place.folder / "node-0" / step_folder_name(6));
  for (const fs::directory_entry& entry : fs::directory_iterator(node)) {
    EXPECT_TRUE(parse_step_folder_name(entry.path().filename().string())) << entry.path();
    EXPECT_EQ(find_damage(entry.path(), VerifyDepth::contents), std::nullopt);
  }
}

TEST(MemoryTier, PassesOverWhatIsDamaged) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run", 2};
  train_with_copies(
      config, [&](int) { return place; }, 2, 3);
  for (const char* node : {"node-0", "node-1"}) {  // both copies
    std::fstream file(place.folder / node / step_folder_name(3) / "shard-00001.safetensors", std::ios::in | std::ios::out);
    file.seekp(200) << "damage";
  }
  EXPECT_EQ(newest_in_memory(place), 2);
  const auto whole = assemble_from_memory(place, {});
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(read_checkpoint_info(*whole).next_step, 2);
  fs::remove_all(place.folder / "node-0");
  fs::remove_all(place.folder / "node-1");
  EXPECT_FALSE(assemble_from_memory(place, {}).has_value());
}

// Four hosts, each with a memory of its own, one of which is new.
TEST(MemoryTier, AsksOtherHostsForWhatIsNotHere) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const auto place = [&](int rank) { return MemoryTierPlace{folder / ("host-" + std::to_string(rank)), 1}; };
  const auto assemble_everywhere = [&] {
    std::vector<std::optional<fs::path>> found(4);
    run_world({.ranks = 4, .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
      const ProcessExchange exchange = [&](const std::string& own) { return all_gather_bytes(comm, own); };
      found[static_cast<std::size_t>(comm.rank())] = assemble_from_memory(place(comm.rank()), comm.rank(), exchange, {});
    });
    return found;
  };
  EXPECT_EQ(assemble_everywhere(), std::vector<std::optional<fs::path>>(4));
  train_with_copies(config, place, 2, 3);
  fs::remove_all(folder / "host-1");
  const auto found = assemble_everywhere();
  const TestFolder disk;
  save_trained(config, disk.path(), 3);
  const State truth = load_into(tiny_config(), disk / step_folder_name(3));
  for (int rank = 0; rank < 4; ++rank) {
    const auto& whole = found[static_cast<std::size_t>(rank)];
    ASSERT_EQ(whole, memory_restored_folder(place(rank), rank) / step_folder_name(3));
    EXPECT_EQ(load_into(tiny_config(), *whole), truth);
  }
  fs::remove_all(folder / "host-2");  // before the first save of the new attempt: whose neighbour was just lost
  EXPECT_EQ(assemble_everywhere(), found);
}

// Two hosts with two processes each: what was asked for is made once on each, and both of its processes read it.
TEST(MemoryTier, ProcessesOfANodeReadOneFolder) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const auto place = [&](int rank) { return MemoryTierPlace{folder / ("host-" + std::to_string(rank / 2)), 2}; };
  train_with_copies(config, place, 2, 3);
  fs::remove_all(folder / "host-1");
  std::vector<std::optional<fs::path>> found(4);
  run_world({.ranks = 4, .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    const ProcessExchange exchange = [&](const std::string& own) { return all_gather_bytes(comm, own); };
    found[static_cast<std::size_t>(comm.rank())] = assemble_from_memory(place(comm.rank()), comm.rank(), exchange, {});
  });
  EXPECT_EQ(found[0], folder / "host-0/node-0" / step_folder_name(3)) << "all is there already";
  EXPECT_EQ(found[1], found[0]);
  EXPECT_EQ(found[2], folder / "host-1/node-1/restored" / step_folder_name(3));
  EXPECT_EQ(found[3], found[2]);
  EXPECT_EQ(find_damage(*found[2], VerifyDepth::contents), std::nullopt);
}

TEST(MemoryTier, KeepsWhatCompressionHasNotSent) {
  RunConfig config = tiny_config({.data = 4});
  config.plan.compression.codec = "int8";
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run", 2};
  train_with_copies(
      config, [&](int) { return place; }, 2, 2);
  fs::remove_all(place.folder / "node-1");
  const auto whole = assemble_from_memory(place, {});
  ASSERT_TRUE(whole.has_value());
  const CheckpointInfo info = read_checkpoint_info(*whole);
  const SyntheticCorpus corpus = corpus_of(config);
  std::vector<double> uninterrupted, resumed;
  const auto go_on = [&](Engine& engine, std::int64_t first, std::vector<double>& losses) {
    for (std::int64_t step = first; step < 4; ++step) {
      const double loss = engine.train_step(corpus.training_batch(step, config.plan.batch.rows), step).loss;
      if (engine.context().world->rank() == 0 && step >= 2) losses.push_back(loss);
    }
  };
  with_engines(config, [&](Engine& engine) { go_on(engine, 0, uninterrupted); });
  with_engines(config, [&](Engine& engine) {
    load_checkpoint(*whole, info, engine);
    go_on(engine, info.next_step, resumed);
  });
  EXPECT_EQ(resumed, uninterrupted);
}

TEST(MemoryTier, SaysWhenThereIsNoMemoryLeftAndKeepsTheCopyBefore) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run", 2};
  const SyntheticCorpus corpus = corpus_of(config);
  with_engines(config, [&](Engine& engine) {
    Communicator& world = *engine.context().world;
    MemoryTier tier(place, engine);
    const auto info = [&](std::int64_t step) { return CheckpointInfo{config, step, "synthetic", corpus.identity()}; };
    tier.save(info(1));
    const std::int64_t copied = tier.copied_bytes();
    EXPECT_GT(copied, 0);
    {
      world.barrier();
      std::optional<FileSizeLimit> limit;
      if (world.rank() == 3) limit.emplace(1000);  // of the process: all ranks
      world.barrier();
      tier.save(info(2));
      EXPECT_NE(tier.problem().find("step 2"), std::string::npos) << tier.problem();
      EXPECT_EQ(tier.newest(), 1);
      world.barrier();
    }
    world.barrier();
    EXPECT_EQ(newest_in_memory(place), 1);
    world.barrier();
    tier.save(info(3));
    EXPECT_EQ(tier.newest(), 3);
    tier.forget_after(2);
    EXPECT_EQ(tier.newest(), 1);
    EXPECT_EQ(newest_in_memory(place), 1);
  });
}

TEST(MemoryTier, LosesItsUseWithEachPitfall) {
  const RunConfig config = two_nodes();
  const TestFolder folder;
  const MemoryTierPlace place{folder / "run", 2};
  const Pitfall own = Pitfall::neighbour_keeps_own_shard, unused = Pitfall::memory_tier_not_used;
  train_with_copies(
      config, [&](int) { return place; }, 2, 3, PitfallSet(std::span(&own, 1)));
  EXPECT_EQ(newest_in_memory(place), 3);
  EXPECT_FALSE(assemble_from_memory(place, {}, {}, PitfallSet(std::span(&unused, 1))).has_value());
  EXPECT_TRUE(assemble_from_memory(place, {}).has_value());
  fs::remove_all(place.folder / "node-0");
  fs::remove_all(place.folder / "node-1" / "restored");
  EXPECT_FALSE(newest_in_memory(place).has_value());
}

TEST(MemoryTier, KeepsEveryCopyOnAnotherNode) {
  for (int ranks = 2; ranks <= 12; ++ranks) {
    for (int per_node = 1; per_node < ranks; ++per_node) {
      for (int rank = 0; rank < ranks; ++rank) {
        const int keeper = keeper_of(rank, ranks, per_node);
        EXPECT_TRUE(keeper >= 0 && keeper < ranks && keeper / per_node != rank / per_node);
        EXPECT_TRUE(ranks % per_node != 0 || keeper == (rank + per_node) % ranks);
      }
    }
  }
}

}  // namespace
}  // namespace tandem
