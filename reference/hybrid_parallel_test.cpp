// SPDX-License-Identifier: Apache-2.0
#include "reference/hybrid_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/parallel_test_support.h"
#include "reference/pipeline_parallel.h"
#include "reference/tensor_parallel.h"

namespace tandem::reference {
namespace {

constexpr std::array kAllAxes = {GroupAxis::world,   GroupAxis::data,     GroupAxis::tensor,   GroupAxis::pipeline,
                                 GroupAxis::context, GroupAxis::expert,   GroupAxis::gradient, GroupAxis::expert_gradient,
                                 GroupAxis::model,   GroupAxis::embedding};
static_assert(kAllAxes.size() == kGroupAxes);

std::vector<int> divisors(int number) {
  std::vector<int> found;
  for (int i = 1; i <= number; ++i) {
    if (number % i == 0) found.push_back(i);
  }
  return found;
}

/// Calls body(degrees) for every way to write `world` as data * tensor * pipeline * context, with every expert divisor of data.
template <class Body>
void for_each_factorisation(int world, const Body& body) {
  for (const int data : divisors(world)) {
    for (const int tensor : divisors(world / data)) {
      for (const int pipeline : divisors(world / data / tensor)) {
        for (const int expert : divisors(data)) {
          body(ParallelDegrees{data, tensor, pipeline, world / data / tensor / pipeline, expert});
        }
      }
    }
  }
}

std::vector<std::string> all_rank_orders() {
  std::vector<std::string> names = {"context", "data", "pipeline", "tensor"};
  std::vector<std::string> orders;
  do {
    orders.push_back(fmt::format("{}-{}-{}-{}", names[0], names[1], names[2], names[3]));
  } while (std::next_permutation(names.begin(), names.end()));
  return orders;
}

std::string text(const TrainingPlan& plan) {
  const ParallelDegrees& d = plan.parallel;
  return fmt::format("data {} tensor {} pipeline {} context {} expert {}, {}, {}", d.data, d.tensor, d.pipeline, d.context,
                     d.expert, plan.rank_order, plan.pipeline.schedule);
}

/// The first thing in which the grid of core differs from the definition; empty where they agree.
std::string disagreement(const TrainingPlan& plan) {
  const HybridGrid expected = hybrid_grid(plan);
  const ProcessGrid grid(plan);
  if (grid.size() != std::ssize(expected.ranks)) return fmt::format("{} ranks", grid.size());
  for (int r = 0; r < grid.size(); ++r) {
    const Coordinates at = grid.coordinates(r);
    if (at != expected.ranks[static_cast<std::size_t>(r)]) return fmt::format("coordinates of rank {}", r);
    if (grid.rank_of(at) != r) return fmt::format("coordinates of rank {} belong to {}", r, grid.rank_of(at));
    if (grid.expert_coordinate(r) != at.data % plan.parallel.expert) return fmt::format("expert coordinate of rank {}", r);
  }
  for (const GroupAxis axis : kAllAxes) {
    std::vector<int> times_seen(expected.ranks.size(), 0);
    for (const std::vector<int>& group : hybrid_groups(expected, axis)) {
      for (const int r : group) {
        ++times_seen[static_cast<std::size_t>(r)];
        if (grid.group(axis, r) != group) return fmt::format("{} group of rank {}", name(axis), r);
      }
    }
    const bool partition = std::all_of(times_seen.begin(), times_seen.end(), [](int times) { return times == 1; });
    if (!partition) return fmt::format("{} groups are no partition", name(axis));
  }
  return {};
}

TEST(HybridGrids, AgreeWithTheProcessGridForEveryFactorisation) {
  int checked = 0;
  for (int world = 1; world <= 64; ++world) {
    for_each_factorisation(world, [&](const ParallelDegrees& degrees) {
      TrainingPlan plan;
      plan.parallel = degrees;
      EXPECT_EQ(disagreement(plan), "") << text(plan);
      ++checked;
    });
  }
  EXPECT_GT(checked, 2000);
}

TEST(HybridGrids, AgreeWithTheProcessGridForEveryOrderOfTheAxes) {
  const std::vector<std::string> orders = all_rank_orders();
  ASSERT_EQ(orders.size(), 24U);
  for (const int world : {1, 2, 4, 6, 8, 12, 16, 24}) {
    for_each_factorisation(world, [&](const ParallelDegrees& degrees) {
      for (const std::string& order : orders) {
        TrainingPlan plan;
        plan.parallel = degrees;
        plan.rank_order = order;
        EXPECT_EQ(disagreement(plan), "") << text(plan);
      }
    });
  }
}

TEST(HybridGrids, AgreeWithTheProcessGridForVShapedPipelines) {
  for (const int world : {2, 4, 8, 12}) {
    for_each_factorisation(world, [&](const ParallelDegrees& degrees) {
      TrainingPlan plan;
      plan.parallel = degrees;
      plan.pipeline.schedule = "zb-v";
      EXPECT_EQ(disagreement(plan), "") << text(plan);
    });
  }
}

TEST(HybridGrids, CrossTwoAxesInExactlyOneRank) {
  constexpr std::array kPlain = {GroupAxis::data, GroupAxis::tensor, GroupAxis::pipeline, GroupAxis::context};
  for (const int world : {8, 16, 24, 36}) {
    for_each_factorisation(world, [&](const ParallelDegrees& degrees) {
      TrainingPlan plan;
      plan.parallel = degrees;
      plan.rank_order = "data-pipeline-tensor-context";
      const ProcessGrid grid(plan);
      for (int r = 0; r < grid.size(); ++r) {
        for (const GroupAxis a : kPlain) {
          for (const GroupAxis b : kPlain) {
            if (a == b) continue;
            const std::vector<int> first = grid.group(a, r);
            const std::vector<int> second = grid.group(b, r);
            const auto in_both = std::count_if(first.begin(), first.end(), [&](int member) {
              return std::find(second.begin(), second.end(), member) != second.end();
            });
            ASSERT_EQ(in_both, 1) << text(plan) << ": " << name(a) << " and " << name(b) << " of rank " << r;
          }
        }
      }
    });
  }
}

TEST(HybridGrids, NumberTheFirstNamedAxisFastest) {
  TrainingPlan plan;
  plan.parallel = {.data = 2, .tensor = 3, .pipeline = 2};
  plan.rank_order = "data-tensor-context-pipeline";

  const HybridGrid grid = hybrid_grid(plan);

  EXPECT_EQ(grid.ranks[1], (Coordinates{0, 0, 1, 0}));
  EXPECT_EQ(grid.ranks[2], (Coordinates{1, 0, 0, 0}));
  EXPECT_EQ(grid.ranks[6], (Coordinates{0, 0, 0, 1}));
  EXPECT_EQ(hybrid_group(grid, GroupAxis::data, 3), (std::vector<int>{2, 3}));
  EXPECT_EQ(hybrid_group(grid, GroupAxis::tensor, 3), (std::vector<int>{1, 3, 5}));
}

TEST(HybridGrids, RefuseAnOrderThatIsNotOneOfTheFourAxes) {
  for (const char* order : {"", "tensor", "tensor-context-data", "tensor-tensor-data-pipeline", "tensor-context-data-stage",
                            "tensor-context-data-pipeline-"}) {
    TrainingPlan plan;
    plan.rank_order = order;
    EXPECT_THROW(static_cast<void>(hybrid_grid(plan)), ContractError) << order;
  }
}

GptConfig hybrid_model(int experts, bool tied) {
  GptConfig model = parallel_test_model(tied);
  model.layers = 4;
  model.experts = experts;
  return model;
}

/// All ranks that a value reaches when it is summed over these groups one after the other, starting from `rank`.
std::vector<int> reached(const HybridGrid& grid, const std::vector<GroupAxis>& sums, int rank) {
  std::set<int> ranks = {rank};
  for (const GroupAxis axis : sums) {
    std::set<int> next;
    for (const int r : ranks) {
      for (const int member : hybrid_group(grid, axis, r)) next.insert(member);
    }
    ranks = next;
  }
  return {ranks.begin(), ranks.end()};
}

TEST(HybridGradients, AreSummedOverGroupsThatReachEverySummandAndNoOther) {
  // Of layers and experts the first and the last: those between are like one of them.
  const auto is_inner = [](const GptConfig& model, const ParameterSpec& parameter) {
    return (parameter.layer > 0 && parameter.layer < model.layers - 1) ||
           (parameter.expert > 0 && parameter.expert < model.experts - 1);
  };
  for (const bool sequence_parallel : {false, true}) {
    for (const bool tied : {false, true}) {
      for_each_factorisation(8, [&](const ParallelDegrees& degrees) {
        TrainingPlan plan;
        plan.parallel = degrees;
        plan.sequence_parallel = sequence_parallel;
        const GptConfig model = hybrid_model(degrees.data, tied);
        if (degrees.pipeline > model.layers) return;
        const HybridGrid grid = hybrid_grid(plan);
        for (const ParameterSpec& parameter : gpt_parameters(model)) {
          if (is_inner(model, parameter)) continue;
          for (int r = 0; r < std::ssize(grid.ranks); ++r) {
            const std::vector<int> summands = gradient_summands(grid, plan, model, parameter, r);
            if (summands.empty()) continue;
            EXPECT_EQ(reached(grid, gradient_sums(plan, model, parameter), r), summands)
                << text(plan) << ": " << parameter.name << " on rank " << r;
          }
        }
      });
    }
  }
}

TEST(HybridGradients, OfAnExpertLeaveOutRanksWithOtherExperts) {
  TrainingPlan plan;
  plan.parallel = {.data = 4, .tensor = 1, .pipeline = 1, .context = 2, .expert = 2};
  const GptConfig model = hybrid_model(4, true);
  const HybridGrid grid = hybrid_grid(plan);
  const auto parameters = gpt_parameters(model);
  const auto find = [&](const std::string& name) {
    return *std::find_if(parameters.begin(), parameters.end(), [&](const ParameterSpec& p) { return p.name == name; });
  };

  // Ranks are context + 2 data; data ranks 0 and 2 hold experts 0 and 1.
  EXPECT_EQ(gradient_summands(grid, plan, model, find("h.0.mlp.experts.1.c_fc.weight"), 0), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(gradient_summands(grid, plan, model, find("h.0.mlp.experts.2.c_fc.weight"), 0), std::vector<int>{});
  EXPECT_EQ(gradient_summands(grid, plan, model, find("h.0.mlp.router.weight"), 0), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(HybridGradients, AreSummedOverTensorRanksWhereOneSeesAPart) {
  using Axes = std::vector<GroupAxis>;
  TrainingPlan plan;
  plan.parallel = {.data = 2, .tensor = 2, .pipeline = 2, .context = 1, .expert = 2};
  const GptConfig model = hybrid_model(2, true);
  const auto parameters = gpt_parameters(model);
  const auto sums = [&](const std::string& name) {
    const auto found = std::find_if(parameters.begin(), parameters.end(), [&](const ParameterSpec& p) { return p.name == name; });
    return gradient_sums(plan, model, *found);
  };
  for (const bool sequence_parallel : {false, true}) {
    plan.sequence_parallel = sequence_parallel;
    const Axes replicated = sequence_parallel ? Axes{GroupAxis::tensor, GroupAxis::gradient} : Axes{GroupAxis::gradient};
    EXPECT_EQ(sums("h.0.ln_1.weight"), replicated);
    EXPECT_EQ(sums("h.1.attn.c_proj.bias"), replicated);
    EXPECT_EQ(sums("wpe.weight"), replicated);
    EXPECT_EQ(sums("h.0.attn.c_attn.bias"), Axes{GroupAxis::gradient});
    EXPECT_EQ(sums("wte.weight"), (Axes{GroupAxis::gradient, GroupAxis::embedding}));
    EXPECT_EQ(sums("h.0.mlp.router.weight"), (Axes{GroupAxis::tensor, GroupAxis::gradient}));
    EXPECT_EQ(sums("h.0.mlp.experts.1.c_fc.weight"), Axes{GroupAxis::expert_gradient});
    EXPECT_EQ(sums("h.0.mlp.experts.1.c_proj.bias"), Axes{GroupAxis::expert_gradient});
  }
}

/// Local gradients of every rank of a grid of data x pipeline, and of data x tensor, summed as the definition says.
class HybridSteps : public testing::TestWithParam<std::string> {
 protected:
  /// `local[r]` are rank r's; returns rank r's sums.
  std::vector<RankGradients<double>> summed(const TrainingPlan& plan, const std::vector<RankGradients<double>>& local) const {
    const HybridGrid grid = hybrid_grid(plan);
    std::vector<RankGradients<double>> sums = local;
    for (const ParameterSpec& parameter : gpt_parameters(model_)) {
      for (std::size_t r = 0; r < local.size(); ++r) {
        const auto summands = gradient_summands(grid, plan, model_, parameter, static_cast<int>(r));
        if (summands.empty()) continue;
        PerRank<double> values;
        for (const int s : summands) values.push_back(local[static_cast<std::size_t>(s)].gradients.at(parameter.name));
        sums[r].gradients[parameter.name] = sum_over_ranks(values);
      }
    }
    return sums;
  }
  [[nodiscard]] Batch rows_of(int data_ranks, int data_rank) const {
    const Interval rows = balanced_part(batch_.rows, data_ranks, data_rank);
    return slice_rows(batch_, rows.begin, rows.size());
  }

  GptConfig model_ = hybrid_model(0, true);
  NamedTensors<double> parameters_ = lively_parameters(model_, 1);
  Batch batch_ = parallel_test_batch(model_);
  Pass<double> pass_ = parallel_test_pass<double>(batch_);
  OneDeviceStep expected_ = one_device_step(model_, parameters_, batch_, pass_);
};

TEST_P(HybridSteps, OfDataAndPipelineGiveTheGradientOfOneDevice) {
  TrainingPlan plan;
  plan.parallel = {.data = 3, .tensor = 1, .pipeline = 2};
  plan.rank_order = GetParam();
  const HybridGrid grid = hybrid_grid(plan);
  const PipelineParallelLayout layout{pipeline_layout(plan, model_), 2};

  std::vector<RankGradients<double>> local(grid.ranks.size());
  for (std::size_t r = 0; r < local.size(); ++r) {
    const auto step = pipeline_parallel_local_gradients(model_, parameters_, rows_of(3, grid.ranks[r].data), layout, pass_);
    local[r] = step.ranks[static_cast<std::size_t>(grid.ranks[r].pipeline)];
  }
  const auto sums = summed(plan, local);

  for (int d = 0; d < 3; ++d) {
    std::vector<RankGradients<double>> of_pipeline(2);
    for (std::size_t r = 0; r < sums.size(); ++r) {
      if (grid.ranks[r].data == d) of_pipeline[static_cast<std::size_t>(grid.ranks[r].pipeline)] = sums[r];
    }
    EXPECT_LE(worst_deviation(joined_stages(model_, layout.stages, of_pipeline), expected_.gradients), 1e-12);
    EXPECT_EQ(of_pipeline[0].gradients.at("wte.weight"), of_pipeline[1].gradients.at("wte.weight"));
  }
}

TEST_P(HybridSteps, OfDataAndTensorGiveTheGradientOfOneDevice) {
  for (const bool sequence_parallel : {false, true}) {
    TrainingPlan plan;
    plan.parallel = {.data = 2, .tensor = 3};
    plan.rank_order = GetParam();
    plan.sequence_parallel = sequence_parallel;
    const HybridGrid grid = hybrid_grid(plan);

    std::vector<RankGradients<double>> local(grid.ranks.size());
    for (std::size_t r = 0; r < local.size(); ++r) {
      const auto step =
          tensor_parallel_local_gradients(model_, parameters_, rows_of(2, grid.ranks[r].data), {3, sequence_parallel}, pass_);
      local[r] = step.ranks[static_cast<std::size_t>(grid.ranks[r].tensor)];
    }
    const auto sums = summed(plan, local);

    for (int d = 0; d < 2; ++d) {
      std::vector<RankGradients<double>> of_tensor(3);
      for (std::size_t r = 0; r < sums.size(); ++r) {
        if (grid.ranks[r].data == d) of_tensor[static_cast<std::size_t>(grid.ranks[r].tensor)] = sums[r];
      }
      EXPECT_LE(worst_deviation(joined_tensors(model_, of_tensor), expected_.gradients), 1e-12);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, HybridSteps, testing::Values("tensor-context-data-pipeline", "pipeline-data-context-tensor"),
                         [](const auto& instance) {
                           std::string order = instance.param;
                           std::replace(order.begin(), order.end(), '-', '_');
                           return order;
                         });

}  // namespace
}  // namespace tandem::reference
