// SPDX-License-Identifier: Apache-2.0
#include "reference/zero.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/error.h"
#include "reference/parallel_test_support.h"

namespace tandem::reference {
namespace {

constexpr auto kParameters = static_cast<std::size_t>(MemoryCategory::parameters);
constexpr auto kGradients = static_cast<std::size_t>(MemoryCategory::gradients);
constexpr auto kOptimizer = static_cast<std::size_t>(MemoryCategory::optimizer);

GptConfig expert_model() {
  GptConfig model = parallel_test_model(false);
  model.experts = 3;
  model.expert_choices = 2;
  return model;
}

OptimizerConfig adamw() { return {.learning_rate = 1e-2, .weight_decay = 0.3, .max_grad_norm = 0.05}; }
OptimizerConfig sgd() {
  OptimizerConfig optimizer = adamw();
  optimizer.kind = OptimizerKind::sgd;
  return optimizer;
}

/// What has no ZeRO, on the gradients of plain data parallelism.
template <class Real>
struct Unsharded {
  NamedTensors<Real> parameters;
  OptimizerState<Real> optimizer;
  std::vector<double> norms;
  std::vector<NamedTensors<Real>> gradients;
  std::vector<double> losses;
};

template <class Real>
struct Sharded {
  ZeroState<Real> state;
  std::vector<ZeroStep<Real>> steps;
};

constexpr int kSteps = 3;

Batch batch_of(const GptConfig& model, int step) {
  Batch batch = ragged_batch(model, 9, {9, 1, 0, 4, 6}, 6 + static_cast<std::uint64_t>(step));
  pack_documents(batch, {2, 6});
  return batch;
}

template <class Real>
Unsharded<Real> run_unsharded(const GptConfig& model, const OptimizerConfig& optimizer, DataParallelLayout layout) {
  Unsharded<Real> run{converted<Real>(lively_parameters(model, 3)), initial_optimizer_state<Real>(model), {}, {}, {}};
  for (int s = 0; s < kSteps; ++s) {
    RankGradients<Real> reduced = data_parallel_gradients<Real>(model, run.parameters, batch_of(model, s), layout,
                                                                DropoutStep{17, static_cast<std::uint32_t>(s)});
    run.losses.push_back(reduced.loss);
    run.gradients.push_back(reduced.gradients);
    run.norms.push_back(norm_by_parts(model, layout.ranks, reduced.gradients));
    scale(reduced.gradients, clip_coefficient(run.norms.back(), optimizer.max_grad_norm));
    optimizer_step(model, optimizer, optimizer.learning_rate, reduced.gradients, run.parameters, run.optimizer);
  }
  return run;
}

template <class Real>
Sharded<Real> run_sharded(const GptConfig& model, const OptimizerConfig& optimizer, const ZeroLayout& layout) {
  Sharded<Real> run{initial_zero_state(model, layout, optimizer.kind, converted<Real>(lively_parameters(model, 3))), {}};
  for (int s = 0; s < kSteps; ++s) {
    run.steps.push_back(zero_step(model, optimizer, optimizer.learning_rate, batch_of(model, s), layout,
                                  DropoutStep{17, static_cast<std::uint32_t>(s)}, run.state));
  }
  return run;
}

template <class Real>
void expect_same_bits(const GptConfig& model, const OptimizerConfig& optimizer, const ZeroLayout& layout) {
  SCOPED_TRACE(testing::Message() << "stage " << layout.stage << ", ranks " << layout.data.ranks << ", micro-batches "
                                  << layout.data.micro_batches << ", " << name(optimizer.kind));
  const Unsharded<Real> expected = run_unsharded<Real>(model, optimizer, layout.data);
  const Sharded<Real> got = run_sharded<Real>(model, optimizer, layout);

  EXPECT_EQ(joined_parameters(got.state), expected.parameters);
  EXPECT_NE(expected.parameters, converted<Real>(lively_parameters(model, 3)));
  if (optimizer.kind == OptimizerKind::adamw) {
    EXPECT_EQ(joined_optimizer_state(got.state).m, expected.optimizer.m);
    EXPECT_EQ(joined_optimizer_state(got.state).v, expected.optimizer.v);
  }
  EXPECT_EQ(joined_optimizer_state(got.state).updates, kSteps);
  for (int s = 0; s < kSteps; ++s) {
    const auto index = static_cast<std::size_t>(s);
    EXPECT_EQ(got.steps[index].gradients, expected.gradients[index]);
    EXPECT_EQ(got.steps[index].gradient_norm, expected.norms[index]);
    EXPECT_LT(got.steps[index].clip_coefficient, 1.0);
    EXPECT_EQ(got.steps[index].loss, expected.losses[index]);
  }
}

TEST(Zero, Stage1EqualsItsUnshardedTwinBitForBit) {
  for (const int ranks : {1, 2, 3, 7}) {
    for (const int micro_batches : {1, 2}) expect_same_bits<float>(parallel_test_model(), adamw(), {1, {ranks, micro_batches}});
  }
  expect_same_bits<double>(parallel_test_model(false), sgd(), {1, {3, 2}});
  expect_same_bits<float>(expert_model(), adamw(), {1, {3, 1}});
}

TEST(Zero, Stages2And3EqualItBitForBitWithoutAccumulation) {
  for (const int stage : {2, 3}) {
    for (const int ranks : {1, 2, 3, 4, 7}) expect_same_bits<float>(parallel_test_model(), adamw(), {stage, {ranks, 1}});
    expect_same_bits<float>(parallel_test_model(false), sgd(), {stage, {3, 1}});
    expect_same_bits<double>(expert_model(), adamw(), {stage, {2, 1}});
  }
}

TEST(Zero, Stages2And3AccumulateMicroBatchesInAnotherOrder) {
  const GptConfig model = parallel_test_model();
  const Unsharded<double> expected = run_unsharded<double>(model, sgd(), {2, 3});
  for (const int stage : {2, 3}) {
    const Sharded<double> got = run_sharded<double>(model, sgd(), {stage, {2, 3}});
    // Sums of at most 2 * 3 terms in another order, then three steps of a smooth function.
    EXPECT_LT(worst_deviation(got.steps.front().gradients, expected.gradients.front()), 1e-13);
    EXPECT_LT(worst_deviation(joined_parameters(got.state), expected.parameters), 1e-13);
    EXPECT_NEAR(got.steps.back().gradient_norm, expected.norms.back(), 1e-12 * expected.norms.back());
  }
  EXPECT_EQ(joined_parameters(run_sharded<double>(model, sgd(), {2, {2, 3}}).state),
            joined_parameters(run_sharded<double>(model, sgd(), {3, {2, 3}}).state));
}

TEST(Zero, NormByPartsIsTheNorm) {
  const GptConfig model = expert_model();
  const NamedTensors<double> tensors = lively_parameters(model, 5);
  for (const int ranks : {1, 3, 7}) EXPECT_NEAR(norm_by_parts(model, ranks, tensors) / global_norm(tensors), 1.0, 1e-14);
}

std::vector<std::int64_t> elements_of(const std::vector<ZeroUnit>& units) {
  std::vector<std::int64_t> elements;
  for (const ZeroUnit& unit : units) elements.push_back(unit.elements);
  return elements;
}

TEST(Zero, UnitsAreTheModel) {
  const GptConfig model = expert_model();
  std::string names;
  for (const ZeroUnit& unit : zero_units(model)) names += unit.name + " ";
  EXPECT_EQ(names, "wte wpe h.0 h.0.experts h.1 h.1.experts ln_f lm_head ");
  const std::vector<std::int64_t> elements = elements_of(zero_units(model));
  EXPECT_EQ(std::accumulate(elements.begin(), elements.end(), std::int64_t{0}), num_parameters(model));
  EXPECT_EQ(elements[3], 3 * (24 * 36 + 36 + 36 * 24 + 24));
}

TEST(Zero, RanksHoldWhatTheClosedFormSays) {
  for (const OptimizerConfig& optimizer : {adamw(), sgd()}) {
    for (const int stage : {1, 2, 3}) {
      for (const int ranks : {2, 3, 7}) {
        const GptConfig model = parallel_test_model();
        const Sharded<float> run = run_sharded<float>(model, optimizer, {stage, {ranks, 1}});
        const std::vector<std::int64_t> elements = elements_of(run.state.units);
        const std::int64_t largest = *std::max_element(elements.begin(), elements.end());
        const ZeroElementBytes bytes = zero_element_bytes(numerics_from_precision("fp32"), optimizer.kind);
        for (int r = 0; r < ranks; ++r) {
          const ZeroStep<float>& step = run.steps.back();
          const auto rank = static_cast<std::size_t>(r);
          const BytesByCategory expected = zero_state_bytes(elements, ranks, r, stage, bytes);
          EXPECT_EQ(step.held_bytes[rank], expected);
          // Beside it a pass holds at most one unit's parameters; gradients of one beside those of the table tied to the head.
          const std::int64_t parameters = step.peak_bytes[rank][kParameters] - expected[kParameters];
          const std::int64_t gradients = step.peak_bytes[rank][kGradients] - expected[kGradients];
          const std::int64_t table = 13 * 24;
          EXPECT_EQ(parameters, stage == 3 ? 4 * largest : 0);
          EXPECT_EQ(gradients, stage >= 2 ? 4 * (largest + table) : 0);
          EXPECT_EQ(step.peak_bytes[rank][kOptimizer], expected[kOptimizer]);
        }
      }
    }
  }
}

TEST(Zero, RanksSendWhatTheClosedFormSays) {
  for (const GptConfig& model : {parallel_test_model(), parallel_test_model(false), expert_model()}) {
    for (const int stage : {1, 2, 3}) {
      for (const int micro_batches : {1, 2}) {
        const int ranks = 3;
        const Sharded<float> run = run_sharded<float>(model, adamw(), {stage, {ranks, micro_batches}});
        ZeroWireBytes expected;
        for (const ZeroUnit& unit : run.state.units) {
          const ZeroWireBytes more = zero_wire_bytes(unit.elements, zero_gathers(model, unit), ranks, stage, micro_batches, 4, 4);
          expected.gradients += more.gradients;
          expected.parameters += more.parameters;
        }
        EXPECT_EQ(run.steps.back().gradient_wire_bytes, expected.gradients);
        EXPECT_EQ(run.steps.back().parameter_wire_bytes, expected.parameters);
      }
    }
  }
}

TEST(Zero, AParameterTakesTheBytesThatThePaperCounts) {
  const auto of = [](std::string_view precision, OptimizerKind kind, bool stored = false) {
    Numerics numerics = numerics_from_precision(precision);
    if (stored) numerics.accumulate = numerics.storage;
    const ZeroElementBytes bytes = zero_element_bytes(numerics, kind);
    return std::vector<std::int64_t>{bytes.parameters, bytes.gradients, bytes.optimizer};
  };
  EXPECT_EQ(of("fp32", OptimizerKind::adamw), (std::vector<std::int64_t>{4, 4, 8}));
  EXPECT_EQ(of("bf16-autocast", OptimizerKind::adamw), (std::vector<std::int64_t>{4, 4, 8}));
  EXPECT_EQ(of("bf16", OptimizerKind::adamw), (std::vector<std::int64_t>{2, 4, 12}));
  EXPECT_EQ(of("fp16", OptimizerKind::adamw, true), (std::vector<std::int64_t>{2, 2, 12}));
  EXPECT_EQ(of("fp32", OptimizerKind::sgd), (std::vector<std::int64_t>{4, 4, 0}));
  EXPECT_EQ(of("bf16", OptimizerKind::sgd), (std::vector<std::int64_t>{2, 4, 4}));
  EXPECT_EQ(of("fp64", OptimizerKind::adamw), (std::vector<std::int64_t>{8, 8, 16}));
}

// Figure 1 of the paper: 7.5 billion parameters, 64 ranks, in units of 1e9 bytes.
TEST(Zero, PublishedExampleComesOut) {
  const ZeroElementBytes bytes{2, 2, 12};
  EXPECT_NEAR(published_zero_bytes(7.5e9, 64, 0, bytes) / 1e9, 120, 0.05);
  EXPECT_NEAR(published_zero_bytes(7.5e9, 64, 1, bytes) / 1e9, 31.4, 0.05);
  EXPECT_NEAR(published_zero_bytes(7.5e9, 64, 2, bytes) / 1e9, 16.6, 0.05);
  EXPECT_NEAR(published_zero_bytes(7.5e9, 64, 3, bytes) / 1e9, 1.9, 0.05);
}

TEST(Zero, UnevenPartsAreCountedExactly) {
  const ZeroElementBytes bytes{2, 4, 12};
  // Units of 7 and 2 elements over 3 ranks: parts of 3, 2, 2 and of 1, 1, 0.
  EXPECT_EQ(zero_state_bytes({7, 2}, 3, 0, 0, bytes)[kOptimizer], 9 * 12);
  EXPECT_EQ(zero_state_bytes({7, 2}, 3, 0, 1, bytes), (BytesByCategory{9 * 2, 9 * 4, 4 * 12}));
  EXPECT_EQ(zero_state_bytes({7, 2}, 3, 1, 2, bytes), (BytesByCategory{9 * 2, 3 * 4, 3 * 12}));
  EXPECT_EQ(zero_state_bytes({7, 2}, 3, 2, 3, bytes), (BytesByCategory{2 * 2, 2 * 4, 2 * 12}));
}

TEST(Zero, WireBytesAreTwiceTwiceAndThreeTimesTheParameters) {
  // 100 elements, 4 ranks, 4 bytes: one all-gather or reduce-scatter moves 3 * 400 bytes.
  const auto total = [](int stage, int micro_batches) {
    const ZeroWireBytes bytes = zero_wire_bytes(100, 2, 4, stage, micro_batches, 4, 4);
    return bytes.gradients + bytes.parameters;
  };
  EXPECT_EQ(total(0, 1), 2 * 1200);
  EXPECT_EQ(total(1, 1), 2 * 1200);
  EXPECT_EQ(total(2, 1), 2 * 1200);
  EXPECT_EQ(total(3, 1), 3 * 1200);
  EXPECT_EQ(total(1, 5), 2 * 1200);
  EXPECT_EQ(total(2, 5), 6 * 1200);
  EXPECT_EQ(total(3, 5), 15 * 1200);
  EXPECT_EQ(zero_wire_bytes(100, 2, 4, 1, 1, 4, 2).parameters, 600);
  EXPECT_EQ(zero_wire_bytes(100, 2, 1, 3, 1, 4, 4).gradients, 0);
}

TEST(Zero, RefusesWhatDoesNotFit) {
  const GptConfig model = parallel_test_model();
  const NamedTensors<double> parameters = lively_parameters(model, 3);
  EXPECT_THROW((void)initial_zero_state(model, {0, {2, 1}}, OptimizerKind::adamw, parameters), ContractError);
  EXPECT_THROW((void)initial_zero_state(model, {1, {0, 1}}, OptimizerKind::adamw, parameters), ContractError);
  EXPECT_THROW((void)zero_state_bytes({7}, 2, 2, 1, {}), ContractError);
  EXPECT_THROW((void)zero_state_bytes({7}, 2, 0, 4, {}), ContractError);
  ZeroState<double> state = initial_zero_state(model, {2, {2, 1}}, OptimizerKind::sgd, parameters);
  EXPECT_THROW((void)zero_step(model, sgd(), 0.1, batch_of(model, 0), {2, {3, 1}}, std::nullopt, state), ContractError);
}

}  // namespace
}  // namespace tandem::reference
