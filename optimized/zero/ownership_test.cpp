// SPDX-License-Identifier: Apache-2.0
#include "optimized/zero/ownership.h"

#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/process_grid.h"

namespace tandem {
namespace {

GptConfig small_model() {
  GptConfig model;
  model.vocabulary = 5;
  model.sequence = 3;
  model.layers = 2;
  model.hidden = 2;
  model.heads = 2;
  model.mlp_hidden = 3;
  return model;
}

TrainingPlan plan_of(const ParallelDegrees& degrees, int zero_stage) {
  TrainingPlan plan;
  plan.parallel = degrees;
  plan.zero_stage = zero_stage;
  return plan;
}

Ownership ownership_of(const GptConfig& model, const TrainingPlan& plan, int rank) {
  const ProcessGrid grid(plan);
  return ownership(local_parameters(model, plan, grid, rank), plan, grid, rank);
}

// How many ranks keep each element of each global tensor, by name; parts that are no first replica do not count.
std::map<std::string, std::vector<int>> keepers(const GptConfig& model, const TrainingPlan& plan) {
  std::map<std::string, std::vector<int>> counts;
  for (const ParameterSpec& spec : gpt_parameters(model)) counts[spec.name].resize(static_cast<std::size_t>(spec.num_elements()));
  for (int rank = 0; rank < plan.parallel.world_size(); ++rank) {
    for (const OwnedPart& part : ownership_of(model, plan, rank).parts) {
      if (part.shard.replica_index != 0) continue;
      for (const std::int64_t index : global_indices(part.shard)) {
        if (index >= 0) ++counts.at(part.shard.global_name)[static_cast<std::size_t>(index)];
      }
    }
  }
  return counts;
}

TEST(Ownership, EveryElementIsKeptOnce) {
  GptConfig with_experts = small_model();
  with_experts.experts = 4;
  struct Trial {
    GptConfig model;
    ParallelDegrees degrees;
  };
  // More ranks than a bias has elements, too.
  const std::vector<Trial> trials = {{small_model(), {.data = 1}},
                                     {small_model(), {.data = 3}},
                                     {small_model(), {.data = 7}},
                                     {small_model(), {.data = 13}},
                                     {small_model(), {.data = 2, .tensor = 1, .pipeline = 2}},
                                     {small_model(), {.data = 3, .tensor = 1, .pipeline = 1, .context = 1}},
                                     {with_experts, {.data = 4, .tensor = 1, .pipeline = 1, .context = 1, .expert = 2}}};
  for (const Trial& trial : trials) {
    for (const int stage : {0, 1, 3}) {
      const TrainingPlan plan = plan_of(trial.degrees, stage);
      for (const auto& [name, counts] : keepers(trial.model, plan)) {
        for (std::size_t i = 0; i < counts.size(); ++i) {
          EXPECT_EQ(counts[i], 1) << name << " element " << i << ", data " << trial.degrees.data << ", stage " << stage;
        }
      }
    }
  }
}

TEST(Ownership, PartsFollowEachOtherInTheBufferOfParts) {
  const TrainingPlan plan = plan_of({.data = 3}, 2);
  for (int rank = 0; rank < 3; ++rank) {
    const Ownership owned = ownership_of(small_model(), plan, rank);
    std::int64_t next = 0;
    for (const OwnedPart& part : owned.parts) {
      EXPECT_EQ(part.at, next) << part.shard.global_name;
      next += part.elements.size();
    }
    EXPECT_EQ(next, owned.elements);
  }
}

TEST(Ownership, WithoutZeroARankKeepsAllThatItComputesWith) {
  const Ownership owned = ownership_of(small_model(), plan_of({.data = 3}, 0), 1);

  for (const OwnedPart& part : owned.parts) EXPECT_TRUE(part.shard.is_whole()) << part.shard.global_name;
  EXPECT_EQ(owned.elements, num_parameters(small_model()));
}

TEST(Ownership, UnitsAreBlocksTablesAndNorms) {
  GptConfig model = small_model();
  model.tied = false;
  const TrainingPlan plan = plan_of({}, 1);
  const ProcessGrid grid(plan);
  const std::vector<LocalParameter> parameters = local_parameters(model, plan, grid, 0);

  std::vector<std::string> firsts;
  for (const GradientBucket& unit : parameter_units(parameters)) {
    firsts.push_back(parameters[static_cast<std::size_t>(unit.parameters.begin)].spec.name);
  }

  const std::vector<std::string> expected = {"lm_head.weight",  "ln_f.weight", "h.1.ln_1.weight",
                                             "h.0.ln_1.weight", "wpe.weight",  "wte.weight"};
  EXPECT_EQ(firsts, expected);
}

TEST(Ownership, CountsWhatIsKeptOfARange) {
  const TrainingPlan plan = plan_of({.data = 4}, 2);
  const std::int64_t all = num_parameters(small_model());
  std::int64_t kept = 0;
  for (int rank = 0; rank < 4; ++rank) kept += ownership_of(small_model(), plan, rank).kept({3, all - 5});
  EXPECT_EQ(kept, all - 8);
}

TEST(Ownership, BothEndsOfAPipelineDealTheTiedTableAlike) {
  const TrainingPlan plan = plan_of({.data = 3, .tensor = 1, .pipeline = 2}, 2);
  const ProcessGrid grid(plan);
  for (int data = 0; data < 3; ++data) {
    Interval parts[2];
    for (const int stage : {0, 1}) {
      const Ownership owned = ownership_of(small_model(), plan, grid.rank_of({.data = data, .pipeline = stage}));
      for (const OwnedPart& part : owned.parts) {
        if (part.shard.global_name == "wte.weight") parts[stage] = part.elements;
      }
    }
    EXPECT_EQ(parts[0], parts[1]) << "data rank " << data;
    EXPECT_GT(parts[0].size(), 0);
  }
}

}  // namespace
}  // namespace tandem
