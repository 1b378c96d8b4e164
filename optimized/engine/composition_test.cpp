// SPDX-License-Identifier: Apache-2.0
// What compositions owe beside gradients, against the double reference: evaluation, totals of the routing, rows shorter than the
// model's, heads in several pieces, tensors gathered whole.
#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/engine/lower.h"
#include "optimized/engine/whole_tensors.h"
#include "reference/training.h"

namespace tandem {
namespace {

constexpr std::uint64_t kSeed = 5;

struct Layout {
  std::string name;
  ParallelDegrees degrees;
  bool sequence_parallel = false;
  int experts = 0;
  std::string schedule = "1f1b";
  int chunks = 1;
  std::int64_t rows = 7;
  int micro_batches = 2;
};

GptConfig model_of(const Layout& layout, double dropout) {
  GptConfig model;
  model.vocabulary = 37;
  model.sequence = 11;
  model.layers = 4;
  model.hidden = 24;
  model.heads = 4;
  model.mlp_hidden = 40;
  model.experts = layout.experts;
  model.expert_choices = layout.experts > 0 ? 2 : 1;
  model.capacity_factor = 1.1;
  model.auxiliary_loss_weight = 0.1;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = dropout;
  return model;
}

TrainingPlan plan_of(const Layout& layout) {
  TrainingPlan plan;
  plan.parallel = layout.degrees;
  plan.pipeline = {layout.schedule, layout.chunks, ""};
  plan.sequence_parallel = layout.sequence_parallel;
  plan.batch = {layout.rows, layout.micro_batches};
  plan.precision = "fp64";
  plan.numerics = numerics_from_precision("fp64");
  return plan;
}

OptimizerConfig clipped() {
  OptimizerConfig optimizer;
  optimizer.max_grad_norm = 0.5;
  return optimizer;
}

Batch batch_of(std::int64_t step, std::int64_t rows, std::int64_t sequence) {
  return SyntheticCorpus({.vocabulary = 37, .sequence = sequence, .seed = 3, .row_shape = RowShape::packed})
      .training_batch(step, rows);
}

reference::TrainingRun definition_of(const GptConfig& model) {
  reference::TrainingRun definition;
  definition.model = model;
  definition.seed = kSeed;
  definition.initialization = Initialization::scattered;
  definition.optimizer = clipped();
  return definition;
}

template <class Use>
void with_engines(const GptConfig& model, const TrainingPlan& plan, int steps, const Use& use) {
  run_world({.ranks = plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}}, {model, plan, clipped(), {}, steps, kSeed});
    engine.store().initialise(model, Initialization::scattered, kSeed);
    use(engine, comm.rank());
  });
}

// Elements that differ by more than `tolerance`, NaN among them; all where there are not as many as expected.
std::size_t elements_off(const std::vector<double>& values, const std::vector<double>& expected, double tolerance) {
  if (values.size() != expected.size()) return std::max(values.size(), expected.size());
  std::size_t off = 0;
  for (std::size_t i = 0; i < values.size(); ++i) off += std::abs(values[i] - expected[i]) <= tolerance ? 0 : 1;
  return off;
}

class Composition : public testing::TestWithParam<Layout> {};

TEST_P(Composition, EvaluatesTheReferencesLossOnBatchesOfAnyShape) {
  struct Part {
    std::int64_t rows, sequence;
  };
  // Down to fewer tokens than there are ranks to share them.
  constexpr std::array<Part, 7> kParts = {{{7, 11}, {5, 8}, {5, 11}, {1, 8}, {2, 3}, {1, 1}, {7, 11}}};
  std::vector<double> expected;
  for (const Part& part : kParts) {
    reference::TrainingRun definition = definition_of(model_of(GetParam(), 0.0));
    definition.batch = [&](std::int64_t) { return batch_of(0, part.rows, part.sequence); };
    expected.push_back(reference::train<double>(definition).losses.front());
  }
  // Masks are of training alone.
  with_engines(model_of(GetParam(), 0.1), plan_of(GetParam()), 1, [&](Engine& engine, int rank) {
    for (std::size_t i = 0; i < kParts.size(); ++i) {
      EXPECT_NEAR(engine.evaluate(batch_of(0, kParts[i].rows, kParts[i].sequence)), expected[i], 1e-12)
          << "rank " << rank << ", batch " << i;
    }
  });
}

// Masks are keyed by places in the model's whole rows, positions and capacity follow the batch's.
TEST_P(Composition, TrainsOnShorterRowsAndReportsTheReferencesTotals) {
  constexpr std::array<std::int64_t, 6> kSequences = {11, 8, 9, 1, 3, 11};
  const GptConfig model = model_of(GetParam(), 0.1);
  const auto batch = [&](std::int64_t step) {
    return batch_of(step, GetParam().rows, kSequences[static_cast<std::size_t>(step)]);
  };
  reference::TrainingRun definition = definition_of(model);
  definition.steps = std::ssize(kSequences);
  definition.batch = batch;
  const auto expected = reference::train<double>(definition);

  with_engines(model, plan_of(GetParam()), static_cast<int>(kSequences.size()), [&](Engine& engine, int rank) {
    for (std::size_t step = 0; step < kSequences.size(); ++step) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", step " << step);
      const StepResult result = engine.train_step(batch(static_cast<std::int64_t>(step)), static_cast<std::int64_t>(step));
      // Sums of a few thousand terms in another order; the parameters behind them differ by as little.
      EXPECT_NEAR(result.loss, expected.losses[step], 1e-11);
      EXPECT_NEAR(result.gradient_norm, expected.gradient_norms[step], 1e-10);
      EXPECT_NEAR(result.auxiliary_loss, expected.auxiliary_losses[step], 1e-11);
      EXPECT_EQ(result.kept_assignments, expected.kept_assignments[step]);
      EXPECT_EQ(result.dropped_assignments, expected.dropped_assignments[step]);
    }
  });
}

TEST_P(Composition, CountsTheSameFlopsHoweverTheWorkIsDealt) {
  if (GetParam().experts > 0) GTEST_SKIP() << "room for tokens that do not come is multiplied too, and differs";
  GptConfig model = model_of(GetParam(), 0.0);
  model.vocabulary = 36;  // no padding, which is multiplied too
  const auto flops = [&](const TrainingPlan& plan) {
    std::vector<StepProgram> programs;
    for (int rank = 0; rank < plan.parallel.world_size(); ++rank) programs.push_back(lower(plan, model, model.sequence, rank));
    return check_programs(programs, expectation(plan, model, model.sequence)).flops;
  };
  TrainingPlan alone = plan_of({.name = "alone", .degrees = {}});
  alone.batch = {GetParam().rows, 1};
  EXPECT_DOUBLE_EQ(flops(plan_of(GetParam())), flops(alone));
}

TEST_P(Composition, WorksInAsMuchMemoryHoweverManyMicroBatchesThereAre) {
  const auto peaks = [&](int micro_batches) {
    TrainingPlan plan = plan_of(GetParam());
    plan.batch = {std::int64_t{plan.parallel.data} * micro_batches, micro_batches};
    std::vector<std::int64_t> peak;
    for (int rank = 0; rank < plan.parallel.world_size(); ++rank) {
      std::int64_t now = 0;
      peak.push_back(0);
      for (const Operation& op : lower(plan, model_of(GetParam(), 0.0), 11, rank)) {
        if (op.category != MemoryCategory::workspace) continue;
        if (op.kind == OpKind::allocate) now += op.bytes;
        if (op.kind == OpKind::free) now -= op.bytes;
        peak.back() = std::max(peak.back(), now);
      }
    }
    return peak;
  };
  // Gradients that were sent on, above all, must not pile up; 8 micro-batches fill any of the pipelines.
  EXPECT_EQ(peaks(16), peaks(8));
}

TEST_P(Composition, GathersEveryTensorWhole) {
  const GptConfig model = model_of(GetParam(), 0.0);
  const auto expected = reference::initial_parameters<double>(model, Initialization::scattered, kSeed);
  with_engines(model, plan_of(GetParam()), 1, [&](Engine& engine, int rank) {
    const std::vector<WholeTensor> tensors =
        gather_whole_tensors(engine.groups().world(), model, engine.options().plan, engine.store(), &ParameterStore::master);
    ASSERT_EQ(tensors.size(), rank == 0 ? expected.size() : 0);
    for (const WholeTensor& tensor : tensors) {
      EXPECT_EQ(ParameterStore::values_of(tensor.values), expected.at(tensor.name)) << tensor.name;
    }
  });
}

TEST_P(Composition, ReducesTheReferencesGradientsToEveryReplica) {
  const GptConfig model = model_of(GetParam(), 0.1);
  reference::TrainingRun definition = definition_of(model);
  definition.batch = [&](std::int64_t step) { return batch_of(step, GetParam().rows, 11); };
  const auto expected = reference::train<double>(definition).gradients_step0;
  with_engines(model, plan_of(GetParam()), 1, [&](Engine& engine, int rank) {
    engine.set_gradient_observer([&](const Engine& e) {
      for (std::size_t i = 0; i < e.store().size(); ++i) {
        const ShardSpec& shard = e.store().shard(i);
        EXPECT_EQ(elements_off(ParameterStore::values_of(e.store().gradient(i)),
                               gather_from(shard, expected.at(shard.global_name)), 1e-14),
                  0U)
            << shard.global_name << ", rank " << rank;
      }
    });
    engine.train_step(batch_of(0, GetParam().rows, 11), 0);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, Composition,
    testing::Values(
        Layout{.name = "t2c2p2sp", .degrees = {.tensor = 2, .pipeline = 2, .context = 2}, .sequence_parallel = true},
        Layout{.name = "t2zbv", .degrees = {.tensor = 2, .pipeline = 2}, .schedule = "zb-v", .chunks = 2},
        Layout{.name = "d3c2", .degrees = {.data = 3, .context = 2}},
        Layout{.name = "d2e2t2", .degrees = {.data = 2, .tensor = 2, .expert = 2}, .experts = 4},
        Layout{.name = "d2e2c2t2sp",
               .degrees = {.data = 2, .tensor = 2, .context = 2, .expert = 2},
               .sequence_parallel = true,
               .experts = 4},
        Layout{.name = "d4e2p2", .degrees = {.data = 4, .pipeline = 2, .expert = 2}, .experts = 2},
        // Several micro-batches without rows, whose messages are empty.
        Layout{.name = "d2p2empty", .degrees = {.data = 2, .pipeline = 2}, .rows = 3, .micro_batches = 6},
        // More tokens than the head takes at once.
        Layout{.name = "t2sppieces", .degrees = {.tensor = 2}, .sequence_parallel = true, .rows = 60, .micro_batches = 1}),
    [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace tandem
