// SPDX-License-Identifier: Apache-2.0
// The engine under every kind of parallelism against the double reference, in double.
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/engine/lower.h"
#include "reference/training.h"

namespace tandem {
namespace {

struct Layout {
  std::string name;
  ParallelDegrees degrees;
  std::string schedule = "1f1b";
  int chunks = 1;
  bool sequence_parallel = false;
  int experts = 0;
  int choices = 1;
  bool tied = true;
  std::string stage_layers = "";
  std::string rank_order = "tensor-context-data-pipeline";
  int micro_batches = 2;
  int layers = 4;
  RecomputeConfig recompute = {};
};

GptConfig model_of(const Layout& layout) {
  GptConfig model;
  model.vocabulary = 37;
  model.sequence = 11;
  model.layers = layout.layers;
  model.hidden = 24;
  model.heads = 4;
  model.mlp_hidden = 40;
  model.tied = layout.tied;
  model.experts = layout.experts;
  model.expert_choices = layout.choices;
  model.capacity_factor = 1.1;
  model.auxiliary_loss_weight = 0.1;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  return model;
}

TrainingPlan plan_of(const Layout& layout) {
  TrainingPlan plan;
  plan.parallel = layout.degrees;
  plan.pipeline = {layout.schedule, layout.chunks, layout.stage_layers};
  plan.sequence_parallel = layout.sequence_parallel;
  plan.rank_order = layout.rank_order;
  plan.recompute = layout.recompute;
  plan.batch = {7, layout.micro_batches};
  plan.precision = "fp64";
  plan.numerics = numerics_from_precision("fp64");
  return plan;
}

using Tensors = std::map<std::string, std::vector<double>>;

struct EngineRecord {
  Tensors gradients, parameters;
  std::vector<double> losses, norms, auxiliary_losses;
};

EngineRecord run_engine(const GptConfig& model, const TrainingPlan& plan, const OptimizerConfig& optimizer,
                        const BatchSource& data, int steps) {
  EngineRecord run;
  std::mutex mutex;
  run_world({.ranks = plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}}, {model, plan, optimizer, {}, steps, 5});
    engine.store().initialise(model, Initialization::scattered, 5);
    const auto collect = [&](Tensors& into, TensorView (ParameterStore::*view)(std::size_t) const) {
      const std::scoped_lock lock(mutex);
      for (std::size_t i = 0; i < engine.store().size(); ++i) {
        const ShardSpec& shard = engine.store().shard(i);
        if (shard.replica_index != 0) continue;
        std::vector<double>& whole = into[shard.global_name];
        whole.resize(static_cast<std::size_t>(num_elements(shard.global_shape)), std::nan(""));
        scatter_into(shard, ParameterStore::values_of((engine.store().*view)(i)), whole);
      }
    };
    for (int step = 0; step < steps; ++step) {
      if (step == 0) engine.set_gradient_observer([&](const Engine&) { collect(run.gradients, &ParameterStore::gradient); });
      const StepResult result = engine.train_step(data.training_batch(step, plan.batch.rows), step);
      engine.set_gradient_observer({});
      if (comm.rank() != comm.size() - 1) continue;
      run.losses.push_back(result.loss);
      run.norms.push_back(result.gradient_norm);
      run.auxiliary_losses.push_back(result.auxiliary_loss);
    }
    collect(run.parameters, &ParameterStore::parameter);
  });
  return run;
}

double relative_l2(const std::vector<double>& values, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

class ParallelEngine : public testing::TestWithParam<Layout> {};

TEST_P(ParallelEngine, ComputesTheReferencesGradientsAndUpdatesInDouble) {
  const GptConfig model = model_of(GetParam());
  const TrainingPlan plan = plan_of(GetParam());
  const SyntheticCorpus corpus(
      {.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = 3, .row_shape = RowShape::packed});
  reference::TrainingRun definition;
  definition.model = model;
  definition.steps = 3;
  definition.seed = 5;
  definition.initialization = Initialization::scattered;
  definition.optimizer.max_grad_norm = 0.5;
  definition.batch = [&](std::int64_t step) { return corpus.training_batch(step, 7); };
  const auto expected = reference::train<double>(definition);

  const EngineRecord run = run_engine(model, plan, definition.optimizer, corpus, 3);

  for (const auto& [name, values] : expected.gradients_step0) {
    ASSERT_TRUE(run.gradients.contains(name)) << name;
    if (name.ends_with("c_attn.bias")) continue;  // its key third is rounding noise
    EXPECT_LE(relative_l2(run.gradients.at(name), values), 2e-13) << name;
    EXPECT_LE(relative_l2(run.parameters.at(name), expected.parameters.at(name)), 1e-9) << name;
  }
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(run.losses[step], expected.losses[step], 1e-12);
    EXPECT_NEAR(run.norms[step], expected.gradient_norms[step], 1e-11);
  }
}

TEST_P(ParallelEngine, EvaluatesTheLossThatTrainingReportsWithoutDropout) {
  GptConfig model = model_of(GetParam());
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.0;
  const TrainingPlan plan = plan_of(GetParam());
  const SyntheticCorpus corpus(
      {.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = 3, .row_shape = RowShape::packed});
  run_world({.ranks = plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}}, {model, plan, {}, {}, 1, 5, {}});
    engine.store().initialise(model, Initialization::scattered, 5);
    const BytesByCategory before = arena.ledger().current();
    const double fewer_rows = engine.evaluate(corpus.training_batch(1, 2));
    const double evaluated = engine.evaluate(corpus.training_batch(0, 7));
    EXPECT_EQ(arena.ledger().current(), before);

    EXPECT_NEAR(evaluated, engine.train_step(corpus.training_batch(0, 7), 0).loss, 1e-13);
    EXPECT_GT(fewer_rows, 1.0);
    EXPECT_EQ(arena.ledger().current(), before);
  });
}

TEST_P(ParallelEngine, RunsProgramsThatTheCheckerProves) {
  const GptConfig model = model_of(GetParam());
  const TrainingPlan plan = plan_of(GetParam());
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < plan.parallel.world_size(); ++rank) programs.push_back(lower(plan, model, model.sequence, rank));

  const ProgramFacts facts = check_programs(programs, expectation(plan, model, model.sequence));

  EXPECT_TRUE(facts.problems.empty()) << facts.problems.size() << " problems, first: " << facts.problems.front();
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, ParallelEngine,
    testing::Values(
        Layout{.name = "alone", .degrees = {}}, Layout{.name = "experts1", .degrees = {}, .experts = 3},
        Layout{.name = "experts2", .degrees = {}, .experts = 4, .choices = 2}, Layout{.name = "t2", .degrees = {.tensor = 2}},
        Layout{.name = "t4untied", .degrees = {.tensor = 4}, .tied = false},
        Layout{.name = "t2sp", .degrees = {.tensor = 2}, .sequence_parallel = true},
        Layout{.name = "t4sp", .degrees = {.tensor = 4}, .sequence_parallel = true, .tied = false},
        Layout{.name = "c2", .degrees = {.context = 2}}, Layout{.name = "c3", .degrees = {.context = 3}},
        Layout{.name = "p2", .degrees = {.pipeline = 2}},
        Layout{.name = "p2gpipe", .degrees = {.pipeline = 2}, .schedule = "gpipe", .micro_batches = 3},
        Layout{.name = "p4uneven", .degrees = {.pipeline = 4}, .stage_layers = "2-1-1-1", .micro_batches = 5, .layers = 5},
        Layout{.name = "p2v2", .degrees = {.pipeline = 2}, .schedule = "interleaved", .chunks = 2, .micro_batches = 4},
        Layout{.name = "p2zbh1", .degrees = {.pipeline = 2}, .schedule = "zb-h1", .micro_batches = 5},
        Layout{.name = "p2zbv", .degrees = {.pipeline = 2}, .schedule = "zb-v", .chunks = 2, .micro_batches = 5},
        Layout{.name = "p3zbvuntied",
               .degrees = {.pipeline = 3},
               .schedule = "zb-v",
               .chunks = 2,
               .tied = false,
               .micro_batches = 3,
               .layers = 7},
        Layout{.name = "p2empty", .degrees = {.pipeline = 2}, .micro_batches = 10},
        Layout{.name = "p4zbh1empty", .degrees = {.pipeline = 4}, .schedule = "zb-h1", .micro_batches = 9},
        Layout{.name = "d2t2p2v2empty",
               .degrees = {.data = 2, .tensor = 2, .pipeline = 2},
               .chunks = 2,
               .sequence_parallel = true,
               .micro_batches = 6},
        Layout{.name = "d2t2", .degrees = {.data = 2, .tensor = 2}},
        Layout{.name = "d3p2", .degrees = {.data = 3, .pipeline = 2}},
        Layout{.name = "d2t2p2sp", .degrees = {.data = 2, .tensor = 2, .pipeline = 2}, .sequence_parallel = true},
        Layout{.name = "t2c2p2", .degrees = {.tensor = 2, .pipeline = 2, .context = 2}},
        Layout{.name = "t2c2sp",
               .degrees = {.tensor = 2, .context = 2},
               .sequence_parallel = true,
               .rank_order = "pipeline-data-context-tensor"},
        Layout{.name = "d2e2", .degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2},
        Layout{.name = "d4e2", .degrees = {.data = 4, .expert = 2}, .experts = 4},
        Layout{.name = "d2e2c2", .degrees = {.data = 2, .context = 2, .expert = 2}, .experts = 4, .choices = 2},
        Layout{.name = "d2e2t2", .degrees = {.data = 2, .tensor = 2, .expert = 2}, .experts = 4, .choices = 2},
        Layout{.name = "d2e2t2sp",
               .degrees = {.data = 2, .tensor = 2, .expert = 2},
               .sequence_parallel = true,
               .experts = 4,
               .choices = 2},
        Layout{.name = "selective", .degrees = {}, .recompute = {"selective"}},
        Layout{.name = "full", .degrees = {}, .recompute = {"full"}},
        Layout{.name = "every3", .degrees = {}, .layers = 7, .recompute = {"full", 3}},
        Layout{.name = "t2spselective", .degrees = {.tensor = 2}, .sequence_parallel = true, .recompute = {"selective"}},
        Layout{.name = "t2sppfull",
               .degrees = {.tensor = 2, .pipeline = 2},
               .schedule = "zb-h1",
               .sequence_parallel = true,
               .micro_batches = 3,
               .recompute = {"full", 2}},
        Layout{.name = "p2c2zbvfull",
               .degrees = {.pipeline = 2, .context = 2},
               .schedule = "zb-v",
               .chunks = 2,
               .micro_batches = 5,
               .layers = 6,
               .recompute = {"full"}},
        Layout{.name = "d2e2full", .degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2, .recompute = {"full"}},
        Layout{.name = "d2e2c2t2selective",
               .degrees = {.data = 2, .tensor = 2, .context = 2, .expert = 2},
               .sequence_parallel = true,
               .experts = 4,
               .choices = 2,
               .recompute = {"selective"}},
        Layout{.name = "d2e2p2", .degrees = {.data = 2, .pipeline = 2, .expert = 2}, .experts = 2, .choices = 2}),
    [](const auto& layout) { return layout.param.name; });

}  // namespace
}  // namespace tandem
