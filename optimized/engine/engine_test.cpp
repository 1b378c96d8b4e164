// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/engine.h"

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/progress_scope.h"
#include "reference/data_parallel.h"
#include "reference/training.h"

namespace tandem {
namespace {

GptConfig small_model(bool tied, double dropout) {
  GptConfig model;
  model.vocabulary = 37;
  model.sequence = 11;
  model.layers = 2;
  model.hidden = 18;
  model.heads = 3;
  model.mlp_hidden = 41;
  model.tied = tied;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = dropout;
  return model;
}

TrainingPlan plan_of(int ranks, int micro_batches, const std::string& precision) {
  TrainingPlan plan;
  plan.parallel.data = ranks;
  plan.batch = {7, micro_batches};
  plan.precision = precision;
  plan.numerics = numerics_from_precision(precision);
  return plan;
}

SyntheticCorpus corpus_of(const GptConfig& model, RowShape shape) {
  return SyntheticCorpus({.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = 3, .row_shape = shape});
}

using Tensors = std::map<std::string, std::vector<double>>;

struct EngineRecord {
  Tensors gradients, parameters;
  std::vector<double> losses;
};

EngineRecord run_engine(const GptConfig& model, const TrainingPlan& plan, const OptimizerConfig& optimizer,
                        const BatchSource& data, int steps) {
  EngineRecord run;
  run_world({.ranks = plan.parallel.data}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, {model, plan, optimizer, {}, steps, 5});
    engine.store().initialise(model, Initialization::scattered, 5);
    const bool leads = comm.rank() == comm.size() - 1;  // the last rank speaks: it has the fewest rows
    const auto collect = [&](Tensors& into, TensorView (ParameterStore::*view)(std::size_t) const) {
      for (std::size_t i = 0; i < engine.store().size(); ++i) {
        into[engine.store().spec(i).name] = ParameterStore::values_of((engine.store().*view)(i));
      }
    };
    for (int step = 0; step < steps; ++step) {
      if (leads && step == 0)
        engine.set_gradient_observer([&](const Engine&) { collect(run.gradients, &ParameterStore::gradient); });
      const StepResult result = engine.train_step(data.training_batch(step, plan.batch.rows), step);
      engine.set_gradient_observer({});
      if (leads) run.losses.push_back(result.loss);
    }
    if (leads) collect(run.parameters, &ParameterStore::parameter);
  });
  return run;
}

double relative_l2(const std::vector<double>& values, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    difference += (values[i] - expected[i]) * (values[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

class EngineAgainstReference : public testing::TestWithParam<std::tuple<int, int, bool, double>> {};

TEST_P(EngineAgainstReference, ComputesTheSameGradientsAndUpdatesInDouble) {
  const auto [ranks, micro_batches, tied, dropout] = GetParam();
  const GptConfig model = small_model(tied, dropout);
  const SyntheticCorpus corpus = corpus_of(model, dropout > 0 ? RowShape::packed : RowShape::skewed);
  reference::TrainingRun definition;
  definition.model = model;
  definition.steps = 3;
  definition.seed = 5;
  definition.initialization = Initialization::scattered;
  definition.batch = [&](std::int64_t step) { return corpus.training_batch(step, 7); };
  const auto expected = reference::train<double>(definition);

  const EngineRecord run = run_engine(model, plan_of(ranks, micro_batches, "fp64"), definition.optimizer, corpus, 3);

  // Sums of at most a few hundred terms in double: 2^-53 sqrt(400) with a margin of 50 for the depth of the chain.
  constexpr double kBound = 1e-13;
  for (const auto& [name, values] : expected.gradients_step0) {
    if (name.ends_with("c_attn.bias")) continue;  // its key third is rounding noise
    EXPECT_LE(relative_l2(run.gradients.at(name), {values.begin(), values.end()}), kBound) << name;
    EXPECT_LE(relative_l2(run.parameters.at(name), {expected.parameters.at(name).begin(), expected.parameters.at(name).end()}),
              1e-10)
        << name;
  }
  for (std::size_t step = 0; step < expected.losses.size(); ++step) EXPECT_NEAR(run.losses[step], expected.losses[step], 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Layouts, EngineAgainstReference,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Values(1, 3), testing::Bool(),
                                          testing::Values(0.0, 0.2)));

TEST(Engine, GivesTheSameBitsTwice) {
  const GptConfig model = small_model(true, 0.1);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::full);
  const TrainingPlan plan = plan_of(3, 2, "fp32");

  const EngineRecord first = run_engine(model, plan, {}, corpus, 3);
  const EngineRecord second = run_engine(model, plan, {}, corpus, 3);

  EXPECT_EQ(first.parameters, second.parameters);
  EXPECT_EQ(first.gradients, second.gradients);
}

TEST(Engine, GivesTheSameBitsForAnyBucketSize) {
  const GptConfig model = small_model(false, 0.0);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::skewed);
  TrainingPlan plan = plan_of(4, 1, "fp32");
  const EngineRecord one_bucket = run_engine(model, plan, {}, corpus, 2);
  plan.buckets.bucket_bytes = 1;

  EXPECT_EQ(run_engine(model, plan, {}, corpus, 2).parameters, one_bucket.parameters);
}

TEST(Engine, RefusesATokenBeyondTheVocabulary) {
  const GptConfig model = small_model(true, 0.0);
  GptConfig larger = model;
  larger.vocabulary = 900;
  const SyntheticCorpus corpus = corpus_of(larger, RowShape::full);

  try {
    run_engine(model, plan_of(2, 1, "fp32"), {}, corpus, 1);
    FAIL() << "a token beyond the vocabulary went through";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("outside the vocabulary of 37"), std::string::npos) << error.what();
  }
}

TEST(Engine, RefusesAPlanThatCannotRun) {
  const GptConfig model = small_model(true, 0.0);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::full);
  TrainingPlan plan = plan_of(1, 1, "fp32");
  plan.zero_stage = 4;

  EXPECT_THROW(run_engine(model, plan, {}, corpus, 1), InputError);
}

TEST(Engine, EvaluatesTheLossThatTrainingReportsWithoutDropout) {
  const GptConfig model = small_model(true, 0.0);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::skewed);
  const TrainingPlan plan = plan_of(3, 2, "fp32");
  run_world({.ranks = 3}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, {model, plan, {}, {}, 1, 5});
    engine.store().initialise(model, Initialization::scattered, 5);
    const Batch batch = corpus.training_batch(0, 7);

    const double evaluated = engine.evaluate(batch);

    EXPECT_NEAR(evaluated, engine.train_step(batch, 0).loss, 1e-6);
  });
}

TEST(Engine, EvaluatesInNoMoreActivationsThanItTrainsWith) {
  const GptConfig model = small_model(true, 0.0);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::full);
  run_world({.ranks = 1}, [&](Communicator& comm) {
    Arena arena;
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, {model, plan_of(1, 1, "fp32"), {}, {}, 1, 5});
    engine.store().initialise(model, Initialization::gpt2, 5);
    const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
    engine.train_step(corpus.training_batch(0, 7), 0);
    const std::int64_t trained = arena.ledger().peak()[activations];
    arena.ledger().reset_peaks();

    (void)engine.evaluate(corpus.training_batch(1, 7));

    EXPECT_LE(arena.ledger().peak()[activations], trained);
  });
}

TEST(Engine, GivesBackAllMemoryButItsState) {
  const GptConfig model = small_model(true, 0.1);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::full);
  run_world({.ranks = 2}, [&](Communicator& comm) {
    Arena arena;
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}}, {model, plan_of(2, 3, "fp32"), {}, {}, 1, 5});
    engine.store().initialise(model, Initialization::gpt2, 5);
    const BytesByCategory before = arena.ledger().current();

    engine.train_step(corpus.training_batch(0, 7), 0);
    (void)engine.evaluate(corpus.training_batch(1, 7));

    EXPECT_EQ(arena.ledger().current(), before);
    EXPECT_GT(arena.ledger().peak()[static_cast<std::size_t>(MemoryCategory::activations)], 0);
  });
}

TEST(ProgressScope, WhoLeavesAnOperationByItsFailureHasGotNothingDoneAndStillWaits) {
  ProgressSlot slot;
  { const ProgressScope waiting(&slot, true); }
  EXPECT_FALSE(slot.waiting);
  EXPECT_EQ(slot.progress, 1U);
  EXPECT_THROW(
      {
        const ProgressScope waiting(&slot, true);
        throw TimeoutError("the others have not come");
      },
      TimeoutError);
  EXPECT_TRUE(slot.waiting);
  EXPECT_EQ(slot.progress, 1U);
}

TEST(Engine, CountsItsOwnWorkByWholeStepsAndSaysThatItWaitsForNobodyAtTheirEnd) {
  const GptConfig model = small_model(true, 0.0);
  const SyntheticCorpus corpus = corpus_of(model, RowShape::skewed);
  ProgressBoard board(2);
  run_world({.ranks = 2}, [&](Communicator& comm) {
    Arena arena;
    const auto kernels = make_cpu_kernels({});
    RankContext context{&comm, kernels.get(), &arena, nullptr, {}};
    context.progress = &board.slot(comm.rank());
    Engine engine(context, {model, plan_of(2, 2, "fp32"), {}, {}, 1, 5});
    engine.store().initialise(model, Initialization::scattered, 5);
    engine.train_step(corpus.training_batch(0, 7), 0);
    const std::int64_t busy_ns = board.slot(comm.rank()).busy_ns;
    const std::uint64_t progress = board.slot(comm.rank()).progress;
    EXPECT_GT(busy_ns, 0);
    EXPECT_GT(progress, 10U);
    EXPECT_FALSE(board.slot(comm.rank()).waiting);
    engine.train_step(corpus.training_batch(1, 7), 1);
    EXPECT_GT(board.slot(comm.rank()).busy_ns, busy_ns);
    EXPECT_EQ(board.slot(comm.rank()).progress, 2 * progress);
  });
}

}  // namespace
}  // namespace tandem
