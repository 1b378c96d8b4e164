// SPDX-License-Identifier: Apache-2.0
#include "harness/trace_compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <thread>

#include "core/error.h"
#include "core/rng.h"
#include "harness/trace_compare_assemble.h"
#include "harness/trace_compare_recorder.h"

namespace tandem {
namespace {

constexpr std::int64_t kTokens = 6;
constexpr std::int64_t kWidth = 4;

TraceHeader header_of(DType precision, bool is_reference) {
  TraceHeader header;
  header.framework = is_reference ? "truth" : "candidate";
  header.is_reference = is_reference;
  header.precision = header.accumulate = header.gradient_accumulate = precision;
  header.model.vocabulary = 11;
  header.model.sequence = 3;
  header.model.layers = 2;
  header.model.hidden = kWidth;
  header.model.heads = 2;
  return header;
}

// A made-up step: the values of each tensor by a generator keyed by its name.
struct MadeUpTensor {
  std::string name;
  TraceKind kind;
  Shape shape;
};
const std::vector<MadeUpTensor>& tensors() {
  static const std::vector<MadeUpTensor> list = {
      {"embedding", TraceKind::activation, {kTokens, kWidth}},
      {"h.0.attn.c_proj", TraceKind::activation, {kTokens, kWidth}},
      {"h.0", TraceKind::activation, {kTokens, kWidth}},
      {"h.1.mlp.c_fc", TraceKind::activation, {kTokens, kWidth}},
      {"d.h.1.mlp.c_fc", TraceKind::activation_gradient, {kTokens, kWidth}},
      {"d.h.0.ln_1", TraceKind::activation_gradient, {kTokens, kWidth}},
      {"d.wte.weight", TraceKind::parameter_gradient, {11, kWidth}},
      {"d.h.0.ln_1.weight", TraceKind::parameter_gradient, {kWidth}},
      {"d.h.1.mlp.c_fc.weight", TraceKind::parameter_gradient, {kWidth, kWidth}},
  };
  return list;
}

std::vector<double> values_of(const MadeUpTensor& tensor) {
  CounterRng rng(1, tensor.name);
  std::vector<double> values;
  for (std::int64_t i = 0; i < num_elements(tensor.shape); ++i) values.push_back(static_cast<float>(rng.next_normal()));
  return values;
}

template <class Real>
void append(TraceRecorder& recorder, const TraceEntry& entry, const std::vector<double>& values) {
  std::vector<Real> narrow(values.begin(), values.end());
  recorder.append(entry, view_of(narrow, {static_cast<std::int64_t>(narrow.size())}));
}

using Change = std::function<void(const MadeUpTensor&, std::vector<double>&)>;

std::unique_ptr<TraceRecorder> truth() {
  auto recorder = std::make_unique<TraceRecorder>(header_of(DType::f64, true));
  for (const MadeUpTensor& tensor : tensors()) {
    append<double>(*recorder, whole_entry(tensor.name, tensor.kind, tensor.shape, DType::f64), values_of(tensor));
  }
  return recorder;
}

// Two data ranks with three tokens each; parameters' gradients are partial sums of 3/4 and 1/4.
std::unique_ptr<TraceRecorder> two_ranks(const Change& change = {}) {
  auto recorder = std::make_unique<TraceRecorder>(header_of(DType::f32, false));
  for (const MadeUpTensor& tensor : tensors()) {
    std::vector<double> values = values_of(tensor);
    if (change) change(tensor, values);
    for (int rank = 0; rank < 2; ++rank) {
      TraceEntry entry = whole_entry(tensor.name, tensor.kind, tensor.shape, DType::f32);
      entry.rank = rank;
      if (tensor.kind == TraceKind::parameter_gradient) {
        entry.shard.partial_sum = true;
        std::vector<double> share = values;
        for (double& value : share) value *= rank == 0 ? 0.75 : 0.25;
        append<float>(*recorder, entry, share);
      } else {
        entry.shard.slices[0] = {{3 * rank, 3 * rank + 3}};
        append<float>(*recorder, entry, gather_from(entry.shard, values));
      }
    }
  }
  return recorder;
}

TraceBounds bounds() { return trace_bounds(header_of(DType::f32, false), kTokens); }

Change scaled(std::string name, double factor, std::size_t begin = 0, std::size_t end = 1000) {
  return [=](const MadeUpTensor& tensor, std::vector<double>& values) {
    if (tensor.name != name) return;
    for (std::size_t i = begin; i < std::min(end, values.size()); ++i) values[i] *= factor;
  };
}

TEST(TraceCompare, AgreesWhereOnlyRoundingDiffers) {
  const auto comparison = compare_traces({two_ranks().get(), truth().get()}, bounds(), Completeness::required);
  EXPECT_TRUE(comparison.agrees()) << verdict_line(comparison);
  EXPECT_EQ(comparison.tensors.size(), tensors().size());
}

TEST(TraceBounds, FollowPrecisionAndTheLongestSum) {
  TraceHeader header = header_of(DType::f32, false);
  header.model.vocabulary = 400;
  const TraceBounds single = trace_bounds(header, 100);
  EXPECT_DOUBLE_EQ(single.rounding(TraceKind::activation), 0x1p-24 * 10);
  EXPECT_DOUBLE_EQ(single.rounding(TraceKind::activation_gradient), 0x1p-24 * 20) << "the vocabulary enters";
  EXPECT_DOUBLE_EQ(single.rounding(TraceKind::parameter), 0x1p-24);

  header.precision = header.gradient_accumulate = DType::bf16;
  const TraceBounds mixed = trace_bounds(header, 100);
  EXPECT_DOUBLE_EQ(mixed.rounding(TraceKind::activation_gradient), 0x1p-8) << "sums are formed in fp32";
  EXPECT_DOUBLE_EQ(mixed.rounding(TraceKind::parameter_gradient), 0x1p-8 * 20);
  const TraceHeader coarse = header;
  EXPECT_DOUBLE_EQ(trace_bounds(header_of(DType::f64, false), 100, &coarse).storage_roundoff, 0x1p-8);
}

TEST(TraceCompare, EachTensorCanBeTheOneThatIsWrong) {
  for (const MadeUpTensor& tensor : tensors()) {
    const auto first = first_divergence(*two_ranks(scaled(tensor.name, 1.00001)), *truth(), nullptr, bounds());
    ASSERT_TRUE(first) << tensor.name;
    EXPECT_EQ(first->name, tensor.name);
    EXPECT_NEAR(first->error, 1e-5, 2e-7);
    EXPECT_DOUBLE_EQ(first->bound, 4 * 0x1p-24 * std::sqrt(16.0)) << "K is the width of the MLP";
  }
}

TEST(TraceCompare, NamesLayerOperationPhaseRankSliceAndElement) {
  // Element [4, 2] lies in the part of rank 1.
  const auto first = first_divergence(*two_ranks(scaled("d.h.1.mlp.c_fc", 2, 18, 19)), *truth(), nullptr, bounds());
  ASSERT_TRUE(first);
  EXPECT_EQ(first->layer, 1);
  EXPECT_EQ(first->operation, "mlp.c_fc");
  EXPECT_EQ(first->phase, "backward");
  EXPECT_EQ(first->rank, 1);
  EXPECT_EQ(first->slice, "[3:6, 0:4]");
  EXPECT_EQ(first->element, 18);
  EXPECT_EQ(first->element_indices, "[4, 2]");
  EXPECT_DOUBLE_EQ(first->value, 2 * first->truth);
  EXPECT_NEAR(first->error_over_bound, first->error / first->bound, 1e-9);
}

TEST(TraceCompare, FirstMeansInTheOrderOfExecutionOfTheTruth) {
  const auto both = [](const MadeUpTensor& tensor, std::vector<double>& values) {
    scaled("h.1.mlp.c_fc", 1.5)(tensor, values);
    scaled("h.0.attn.c_proj", 1.001)(tensor, values);
  };
  EXPECT_EQ(first_divergence(*two_ranks(both), *truth(), nullptr, bounds())->name, "h.0.attn.c_proj");
}

TEST(TraceCompare, AParameterGradientComesAfterTheGradientOfItsModule) {
  std::vector<std::string> names;
  for (const TracedGroup& group : in_execution_order(group_by_tensor(*truth()))) names.push_back(group.name);
  EXPECT_EQ(names, (std::vector<std::string>{"embedding", "h.0.attn.c_proj", "h.0", "h.1.mlp.c_fc", "d.h.1.mlp.c_fc",
                                             "d.h.1.mlp.c_fc.weight", "d.h.0.ln_1", "d.h.0.ln_1.weight", "d.wte.weight"}));
}

TEST(TraceCompare, TheYardstickWidensTheBoundToFourTimesItsOwnError) {
  TraceRecorder yardstick(header_of(DType::f32, false));
  for (const MadeUpTensor& tensor : tensors()) {
    std::vector<double> values = values_of(tensor);
    scaled("h.0", 1.0001)(tensor, values);
    append<double>(yardstick, whole_entry(tensor.name, tensor.kind, tensor.shape, DType::f64), values);
  }
  EXPECT_FALSE(first_divergence(*two_ranks(scaled("h.0", 1.00039)), *truth(), &yardstick, bounds()));
  const auto first = first_divergence(*two_ranks(scaled("h.0", 1.00041)), *truth(), &yardstick, bounds());
  ASSERT_TRUE(first);
  EXPECT_NEAR(first->bound, 4e-4, 1e-9);
}

TEST(TraceCompare, TwoCandidatesMayBothLieAtTheEndOfTheirBounds) {
  TraceBounds two = bounds();
  two.allowances = 2;
  const double bound = 4 * 0x1p-24 * 4;
  EXPECT_TRUE(compare_traces({two_ranks(scaled("h.0", 1 + 1.9 * bound)).get(), truth().get()}, two).agrees());
  EXPECT_FALSE(compare_traces({two_ranks(scaled("h.0", 1 + 2.5 * bound)).get(), truth().get()}, two).agrees());
}

TEST(TraceCompare, ValuesThatAreNotFiniteDiverge) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    const auto spoil = [bad](const MadeUpTensor& tensor, std::vector<double>& values) {
      if (tensor.name == "h.0") values[5] = bad;
    };
    const auto first = first_divergence(*two_ranks(spoil), *truth(), nullptr, bounds());
    ASSERT_TRUE(first);
    EXPECT_EQ(first->problem, TraceProblem::not_finite);
    EXPECT_EQ(first->element, 5);
    EXPECT_EQ(first->rank, 0);
  }
}

// One tensor, whole on two ranks, the values of rank 1 changed.
std::unique_ptr<TraceRecorder> replicas(double factor_on_rank_1) {
  auto recorder = std::make_unique<TraceRecorder>(header_of(DType::f32, false));
  const MadeUpTensor& tensor = tensors()[2];
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<double> values = values_of(tensor);
    if (rank == 1) values[7] *= factor_on_rank_1;
    TraceEntry entry = whole_entry(tensor.name, tensor.kind, tensor.shape, DType::f32);
    entry.rank = rank;
    append<float>(*recorder, entry, values);
  }
  return recorder;
}

TEST(TraceCompare, AWrongReplicaDoesNotHideBehindARightOne) {
  const auto comparison = compare_traces({replicas(2).get(), truth().get()}, bounds());
  const auto first = comparison.first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->problem, TraceProblem::replicas_differ);
  EXPECT_EQ(first->rank, 1);
  EXPECT_EQ(first->element, 7);
}

TEST(TraceCompare, ReplicasThatDifferWithinTheBoundAreCounted) {
  const auto comparison = compare_traces({replicas(1 + 0x1p-23).get(), truth().get()}, bounds());
  EXPECT_TRUE(comparison.agrees());
  EXPECT_EQ(comparison.tensors.front().replica_conflicts, 1);
}

TEST(TraceCompare, APartThatNobodyRecordedDiverges) {
  TraceRecorder recorder(header_of(DType::f32, false));
  TraceEntry entry = whole_entry("h.0", TraceKind::activation, {kTokens, kWidth}, DType::f32);
  entry.shard.slices[0] = {{0, 5}};
  append<float>(recorder, entry, gather_from(entry.shard, values_of(tensors()[2])));
  const auto first = compare_traces({&recorder, truth().get()}, bounds()).first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->problem, TraceProblem::part_missing);
  EXPECT_EQ(first->element_indices, "[5, 0]");
}

TEST(TraceCompare, APartThatNobodyRecordedDivergesEvenWhereTheTruthIsZero) {
  TraceRecorder zero(header_of(DType::f64, true)), recorder(header_of(DType::f32, false));
  TraceEntry entry = whole_entry("h.0", TraceKind::activation, {2, 2}, DType::f32);
  append<double>(zero, entry, {1, 2, 0, 0});
  entry.shard.slices[0] = {{0, 1}};
  append<float>(recorder, entry, {1, 2});
  const auto first = compare_traces({&recorder, &zero}, bounds()).first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->problem, TraceProblem::part_missing);
}

TEST(TraceCompare, MissingAndUnknownTensorsAreFaultsOnlyOfACompleteRecord) {
  const auto recorder = two_ranks();
  append<float>(*recorder, whole_entry("h.0.attn.q_norm", TraceKind::activation, {2}, DType::f32), {1, 2});
  EXPECT_TRUE(compare_traces({recorder.get(), truth().get()}, bounds()).agrees());
  const auto unknown = first_divergence(*recorder, *truth(), nullptr, bounds());
  ASSERT_TRUE(unknown);
  EXPECT_EQ(unknown->problem, TraceProblem::unknown_tensor);

  const auto missing = first_divergence(*replicas(1), *truth(), nullptr, bounds());
  ASSERT_TRUE(missing);
  EXPECT_EQ(missing->problem, TraceProblem::tensor_missing);
  EXPECT_EQ(missing->name, "embedding");
}

TEST(TraceCompare, RefusesTracesWithNothingInCommon) {
  TraceRecorder recorder(header_of(DType::f32, false));
  append<float>(recorder, whole_entry("model.layers.0", TraceKind::activation, {2}, DType::f32), {1, 2});
  EXPECT_THROW(static_cast<void>(compare_traces({&recorder, truth().get()}, bounds())), InputError);
}

TEST(TraceCompare, AnotherSizeDiverges) {
  TraceRecorder recorder(header_of(DType::f32, false));
  append<float>(recorder, whole_entry("h.0", TraceKind::activation, {2}, DType::f32), {1, 2});
  EXPECT_EQ(compare_traces({&recorder, truth().get()}, bounds()).first_divergence()->problem, TraceProblem::size_differs);
}

TEST(TraceCompare, ATensorThatIsTrulyZeroIsJudgedAbsolutely) {
  TraceRecorder zero(header_of(DType::f64, true));
  TraceRecorder noise(header_of(DType::f32, false));
  TraceRecorder wrong(header_of(DType::f32, false));
  for (TraceRecorder* recorder : {&zero, &noise, &wrong}) {
    append<double>(*recorder, whole_entry("d.h.0.a.weight", TraceKind::parameter_gradient, {4}, DType::f64),
                   {1000, 1000, 1000, 1000});
    const double value = recorder == &zero ? 0 : recorder == &noise ? 1e-4 : 1e-2;  // bound: 4 eps sqrt(16) 2000 sqrt(1 / 2)
    append<double>(*recorder, whole_entry("d.h.0.b.weight", TraceKind::parameter_gradient, {4}, DType::f64), {value, 0, 0, 0});
  }
  EXPECT_TRUE(compare_traces({&noise, &zero}, bounds()).agrees());
  const auto first = compare_traces({&wrong, &zero}, bounds()).first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->name, "d.h.0.b.weight");
}

TEST(TraceCompare, GradientsAreDividedByTheLossScale) {
  auto candidate = two_ranks([](const MadeUpTensor& tensor, std::vector<double>& values) {
    if (tensor.kind == TraceKind::activation) return;
    for (double& value : values) value *= 1024;
  });
  EXPECT_FALSE(compare_traces({candidate.get(), truth().get()}, bounds()).agrees());
  candidate->header().loss_scale = 1024;
  EXPECT_TRUE(compare_traces({candidate.get(), truth().get()}, bounds()).agrees());
}

TEST(TraceCompare, TheLossIsComparedBetweenForwardAndBackward) {
  const auto candidate = two_ranks(scaled("d.h.0.ln_1", 2));
  const auto reference = truth();
  reference->header().loss = 2.0;
  candidate->header().loss = 2.001;
  const auto first = first_divergence(*candidate, *reference, nullptr, bounds());
  ASSERT_TRUE(first);
  EXPECT_EQ(first->operation, "loss");
  EXPECT_NEAR(first->error, 5e-4, 1e-9);
}

TEST(TraceCompare, RefusesASumOfWhichOnlySomePartsArePartial) {
  TraceRecorder recorder(header_of(DType::f32, false));
  TraceEntry entry = whole_entry("h.0", TraceKind::activation, {kTokens, kWidth}, DType::f32);
  append<float>(recorder, entry, values_of(tensors()[2]));
  entry.rank = 1;
  entry.shard.partial_sum = true;
  append<float>(recorder, entry, values_of(tensors()[2]));
  EXPECT_THROW(static_cast<void>(compare_traces({&recorder, truth().get()}, bounds())), InputError);
}

TEST(TraceCompare, RenderingHasTheVerdictTheTableAndValidJson) {
  const auto comparison = compare_traces({two_ranks(scaled("h.0", 2, 12, 24)).get(), truth().get()}, bounds());
  EXPECT_EQ(verdict_line(comparison)
                .find("diverges: 1 of 9 tensors; first layer 0, block output, forward (h.0): rank 1, micro-batch 0,"
                      " slice [3:6, 0:4]"),
            0U)
      << verdict_line(comparison);
  EXPECT_NE(render(comparison, TableStyle::plain, 5).find("h.0\tbeyond bound\t1\t0\t[3:6, 0:4]"), std::string::npos);
  EXPECT_NE(to_json({comparison}).find("\"operation\": \"block output\""), std::string::npos);
  const auto good = compare_traces({two_ranks().get(), truth().get()}, bounds());
  EXPECT_EQ(verdict_line(good).find("agrees: 9 tensors within their bounds"), 0U);
}

TEST(TraceRecorder, TakesTheSinksOfSeveralThreads) {
  TraceRecorder recorder(header_of(DType::f32, false));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&recorder, rank] {
      const TraceSink sink = recorder.sink(rank);
      for (const MadeUpTensor& tensor : tensors()) {
        if (tensor.kind == TraceKind::parameter_gradient) continue;
        TracedTensor traced{tensor.name, 0, whole(tensor.name, tensor.shape, DType::f32), {}};
        traced.shard.slices[0] = {{3 * rank, 3 * rank + 3}};
        const std::vector<double> part = gather_from(traced.shard, values_of(tensor));
        std::vector<float> values(part.begin(), part.end());
        traced.values = view_of(values, {3, kWidth});
        sink(traced);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  const auto comparison = compare_traces({&recorder, truth().get()}, bounds(), Completeness::required);
  EXPECT_TRUE(comparison.agrees()) << "sinks see no gradients of parameters: " << verdict_line(comparison);
  EXPECT_EQ(comparison.tensors.size(), 6U);
  EXPECT_EQ(comparison.incomplete.size(), 3U);
}

}  // namespace
}  // namespace tandem
