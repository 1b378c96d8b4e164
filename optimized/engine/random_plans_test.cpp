// SPDX-License-Identifier: Apache-2.0
// Plans and models drawn at random, within what is legal, against the double reference: the compositions that nobody thought of.
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/rng.h"
#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/engine/whole_tensors.h"
#include "reference/training.h"

namespace tandem {
namespace {

// Under a sanitizer, which is ten to forty times as slow, the first quarter of them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kTrials = 100;
#else
constexpr std::uint64_t kTrials = 400;
#endif
constexpr int kMostRanks = 12;
constexpr std::uint64_t kSeed = 5;
constexpr int kSteps = 3;

class Trial {
 public:
  explicit Trial(std::uint64_t number) : number_(number), rng_(number, "plans") {
    ParallelDegrees& degrees = plan.parallel;
    degrees = {one_of({1, 1, 2, 3, 4}), one_of({1, 1, 2, 3, 4}), one_of({1, 1, 2, 3, 4}), one_of({1, 1, 2, 3}), 1};
    if (one_of({0, 0, 1}) == 1) draw_experts();
    plan.pipeline.schedule = kSchedules[static_cast<std::size_t>(one_of({0, 1, 2, 3, 4}))];
    plan.pipeline.chunks = plan.pipeline.schedule == "zb-v" ? 2 : plan.pipeline.schedule == "interleaved" ? one_of({1, 2, 3}) : 1;
    plan.sequence_parallel = degrees.tensor > 1 && one_of({0, 1}) == 1;
    plan.rank_order = kOrders[static_cast<std::size_t>(one_of({0, 1, 2}))];
    plan.batch = {one_of({1, 2, 3, 5, 7, 9}), one_of({1, 1, 2, 3, 4, 6})};
    plan.zero_stage = one_of({0, 0, 1, 2, 3});
    if (plan.zero_stage == 0) plan.buckets.bucket_bytes = one_of({0, 1, 4096});
    plan.recompute.mode = kRecomputations[static_cast<std::size_t>(one_of({0, 0, 1, 2}))];
    if (plan.recompute.mode == "full") plan.recompute.layers = one_of({1, 2});
    if (degrees.context == 1 && one_of({0, 1}) == 1) plan.attention = "materialized";
    plan.precision = "fp64";
    plan.numerics = numerics_from_precision("fp64");
    model.heads = degrees.tensor * one_of({1, 2});
    model.hidden = model.heads * one_of({2, 3, 4});
    model.mlp_hidden = degrees.tensor * one_of({3, 5, 8});
    model.layers = degrees.pipeline * plan.pipeline.chunks + one_of({0, 1, 2});
    model.vocabulary = one_of({5, 11, 13, 37, 64});
    model.sequence = one_of({4, 9, 14});
    model.tied = one_of({0, 1}) == 1;
    model.embedding_dropout = model.attention_dropout = model.residual_dropout = one_of({0, 1}) * 0.1;
    row_shape_ = one_of({0, 1}) == 1 ? RowShape::packed : RowShape::skewed;
    short_row_ = one_of({1, 2, 3, static_cast<int>(model.sequence)});
    plan.overlap.gradients = one_of({0, 1}) == 1;
    plan.overlap.prefetch = one_of({0, 1, 1}) == 1;
    if (plan.sequence_parallel) plan.overlap.tensor_chunks = one_of({1, 1, 2, 3, 7});
  }

  [[nodiscard]] bool is_legal() const { return plan.parallel.world_size() <= kMostRanks && conflicts(plan, model).empty(); }

  /// The second batch has the shorter rows.
  [[nodiscard]] Batch batch(std::int64_t step, std::int64_t rows) const {
    const std::int64_t sequence = step == 1 ? short_row_ : model.sequence;
    return SyntheticCorpus(
               {.vocabulary = model.vocabulary, .branching = 2, .sequence = sequence, .seed = number_, .row_shape = row_shape_})
        .training_batch(step, rows);
  }

  [[nodiscard]] reference::TrainingRun definition() const {
    reference::TrainingRun run;
    run.model = model;
    run.seed = kSeed;
    run.initialization = Initialization::scattered;
    run.optimizer = optimizer();
    run.steps = kSteps;
    run.batch = [this](std::int64_t step) { return batch(step, plan.batch.rows); };
    return run;
  }

  template <class Use>
  void with_engines(const Use& use) const {
    run_world({.ranks = plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
      Arena arena({.poison = true});
      const auto kernels = make_cpu_kernels({});
      Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}}, {model, plan, optimizer(), {}, kSteps, kSeed});
      engine.store().initialise(model, Initialization::scattered, kSeed);
      use(engine, comm.rank());
    });
  }

  [[nodiscard]] std::string describe() const {
    const ParallelDegrees& d = plan.parallel;
    return fmt::format(
        "trial {}: d{} t{}{} p{} {}x{} c{} e{} {}, {} experts, {} layers, {} rows in {}, rows of {} and {}, zero {}, recompute "
        "{} {}, {}, overlap {}{}{}",
        number_, d.data, d.tensor, plan.sequence_parallel ? "s" : "", d.pipeline, plan.pipeline.schedule, plan.pipeline.chunks,
        d.context, d.expert, plan.rank_order, model.experts, model.layers, plan.batch.rows, plan.batch.micro_batches,
        model.sequence, short_row_, plan.zero_stage, plan.recompute.mode, plan.recompute.layers, plan.attention,
        plan.overlap.gradients ? "gradients " : "", plan.overlap.prefetch ? "prefetch " : "", plan.overlap.tensor_chunks);
  }

  TrainingPlan plan;
  GptConfig model;

 private:
  static constexpr const char* kSchedules[] = {"1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"};
  static constexpr const char* kRecomputations[] = {"none", "selective", "full"};
  static constexpr const char* kOrders[] = {"tensor-context-data-pipeline", "pipeline-data-context-tensor",
                                            "data-tensor-pipeline-context"};

  static OptimizerConfig optimizer() {
    OptimizerConfig config;
    config.max_grad_norm = 0.5;
    config.epsilon = 1e-4;  // a tiny gradient's sign must not decide an update
    return config;
  }

  int one_of(std::initializer_list<int> values) {
    return *(values.begin() + static_cast<std::ptrdiff_t>(rng_.next_below(values.size())));
  }

  void draw_experts() {
    plan.parallel.expert = plan.parallel.data == 3 ? one_of({1, 3}) : plan.parallel.data % 2 == 0 ? one_of({1, 2}) : 1;
    model.experts = plan.parallel.expert * one_of({1, 2, 3});
    model.expert_choices = model.experts > 1 ? one_of({1, 2}) : 1;
    model.capacity_factor = one_of({3, 8, 11, 20}) / 10.0;
    model.auxiliary_loss_weight = 0.1;
  }

  std::uint64_t number_;
  CounterRng rng_;
  RowShape row_shape_ = RowShape::skewed;
  std::int64_t short_row_ = 1;
};

template <class Use>
void for_each_legal_trial(const Use& use) {
  int legal = 0;
  for (std::uint64_t number = 0; number < kTrials; ++number) {
    const Trial trial(number);
    if (!trial.is_legal()) continue;
    ++legal;
    SCOPED_TRACE(trial.describe());
    EXPECT_NO_THROW(use(trial));
    if (testing::Test::HasFailure()) return;  // one is enough to look at
  }
  EXPECT_GE(legal, static_cast<int>(kTrials / 4));
}

TEST(RandomPlans, TrainAsTheReferenceDoes) {
  for_each_legal_trial([](const Trial& trial) {
    const auto expected = reference::train<double>(trial.definition());
    if (expected.smallest_margin < 1e-9) return;  // rounding may choose another expert
    trial.with_engines([&](Engine& engine, int rank) {
      const std::string where = fmt::format("{}, rank {}", trial.describe(), rank);
      for (std::size_t step = 0; step < kSteps; ++step) {
        const auto number = static_cast<std::int64_t>(step);
        const StepResult result = engine.train_step(trial.batch(number, trial.plan.batch.rows), number);
        const double norm = expected.gradient_norms[step];
        EXPECT_NEAR(result.loss, expected.losses[step], 1e-10) << where;
        EXPECT_NEAR(result.gradient_norm, norm, 1e-10 * (1 + norm)) << where;
        EXPECT_NEAR(result.auxiliary_loss, expected.auxiliary_losses[step], 1e-10) << where;
        EXPECT_EQ(result.kept_assignments, expected.kept_assignments[step]) << where;
        EXPECT_EQ(result.dropped_assignments, expected.dropped_assignments[step]) << where;
      }
      for (const WholeTensor& tensor :
           gather_whole_tensors(engine.groups().world(), trial.model, trial.plan, engine.store(), &ParameterStore::master)) {
        const std::vector<double> values = ParameterStore::values_of(tensor.values);
        const std::vector<double>& truth = expected.parameters.at(tensor.name);
        ASSERT_EQ(values.size(), truth.size()) << tensor.name << ", " << where;
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < values.size(); ++i) wrong += std::abs(values[i] - truth[i]) <= 1e-9 ? 0 : 1;  // nor NaN
        EXPECT_EQ(wrong, 0U) << tensor.name << ", " << where;
      }
    });
  });
}

// Losses, norms and this rank's parameters after some steps, on every rank.
std::vector<std::vector<double>> record_of(const Trial& trial) {
  std::vector<std::vector<double>> records(static_cast<std::size_t>(trial.plan.parallel.world_size()));
  trial.with_engines([&](Engine& engine, int rank) {
    std::vector<double>& record = records[static_cast<std::size_t>(rank)];
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const StepResult result = engine.train_step(trial.batch(step, trial.plan.batch.rows), step);
      record.push_back(result.loss);
      record.push_back(result.gradient_norm);
    }
    for (const OwnedPart& part : engine.store().parts()) {
      const std::vector<double> values = ParameterStore::values_of(engine.store().master(part));
      record.insert(record.end(), values.begin(), values.end());
    }
  });
  return records;
}

TEST(RandomPlans, TrainTheSameBitsWithAndWithoutOverlap) {
  int number = 0;
  for_each_legal_trial([&](const Trial& trial) {
    if (trial.plan.parallel.data * trial.plan.parallel.context == 1 || ++number % 3 != 0) return;
    Trial plain = trial;
    // Pieces of a product may have other bits than the whole one.
    plain.plan.overlap = {.gradients = false, .prefetch = false, .tensor_chunks = trial.plan.overlap.tensor_chunks};
    Trial overlapped = trial;
    overlapped.plan.overlap.gradients = overlapped.plan.overlap.prefetch = true;
    EXPECT_EQ(record_of(plain), record_of(overlapped));
  });
}

TEST(RandomPlans, EvaluateAsTheReferenceDoes) {
  for_each_legal_trial([](const Trial& trial) {
    std::array<double, 2> expected = {};
    for (std::size_t i = 0; i < expected.size(); ++i) {
      reference::TrainingRun run = trial.definition();
      run.model.embedding_dropout = run.model.attention_dropout = run.model.residual_dropout = 0;
      run.steps = 1;
      const auto number = static_cast<std::int64_t>(i);
      run.batch = [&](std::int64_t) { return trial.batch(number, trial.plan.batch.rows + number); };
      const auto record = reference::train<double>(run);
      if (record.smallest_margin < 1e-9) return;
      expected[i] = record.losses.front();
    }
    trial.with_engines([&](Engine& engine, int rank) {
      for (const std::int64_t number : {0, 1, 0}) {
        EXPECT_NEAR(engine.evaluate(trial.batch(number, trial.plan.batch.rows + number)),
                    expected[static_cast<std::size_t>(number)], 1e-10)
            << "rank " << rank << ", batch " << number;
      }
    });
  });
}

}  // namespace
}  // namespace tandem
