// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>
#include <vector>

#include "core/batch.h"
#include "kernels/cuda/device_test_support.h"
#include "reference/ops.h"

namespace tandem::device_test {
namespace {

class CudaLoss : public DeviceTest {};

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr std::int64_t kValid = 1000;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<std::int32_t> make_targets(std::int64_t tokens, std::int64_t vocabulary) {
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < tokens; ++t) {
    targets.push_back(t % 3 == 1 ? kIgnoredTarget : static_cast<std::int32_t>((t * 7919 + vocabulary - 1) % vocabulary));
  }
  return targets;
}

/// Roundings behind an element: the sums of the threads, and those of logits of a size of 20 or so in an exponent.
double chain(std::int64_t vocabulary) { return static_cast<double>(100 + std::min<std::int64_t>(vocabulary, 2048)); }

/// Loss sum and gradient of logits in exact arithmetic.
struct Truth {
  double loss;
  std::vector<double> gradient;

  Truth(const std::vector<double>& logits, const std::vector<std::int32_t>& targets) : loss(0), gradient(logits.size()) {
    std::vector<double> log_sum_exp(targets.size());
    loss = reference::cross_entropy_forward<double>(logits, targets, kValid, log_sum_exp) * kValid;
    reference::cross_entropy_backward<double>(logits, targets, kValid, log_sum_exp, gradient);
  }
};

struct Case {
  std::int64_t tokens, vocabulary;
};

TEST_F(CudaLoss, AndItsGradientAreTheDefinition) {
  for (const DType dtype : kDTypes) {
    for (const auto& [tokens, vocabulary] : {Case{1, 1}, {7, 3}, {5, 257}, {3, 5003}, {3, 50257}}) {
      for (const Place place : {Place::aligned, Place::odd}) {
        if (vocabulary > 10000 && place == Place::aligned) continue;
        const std::string what = fmt::format("{} {} x {}", name(dtype), tokens, vocabulary);
        const std::vector<double> values = random_numbers(dtype, tokens * vocabulary, 1, 4.0);
        const std::vector<std::int32_t> targets = make_targets(tokens, vocabulary);
        const DeviceTensor logits(kernels(), dtype, {tokens, vocabulary}, values, place);

        const double forward = kernels().cross_entropy_forward(logits.view(), targets);
        EXPECT_EQ(logits.values(), values) << what << ": the loss alone changes logits";
        const double loss = kernels().cross_entropy_forward_backward(logits.view(), targets, 1.0 / kValid);

        const Truth truth(values, targets);
        expect_close(what + " loss", {loss, forward}, {truth.loss, truth.loss}, wide(dtype), {}, chain(vocabulary));
        EXPECT_EQ(loss, forward) << what;
        expect_close(what + " gradient", logits.values(), truth.gradient, dtype, {}, chain(vocabulary));
      }
    }
  }
}

TEST_F(CudaLoss, OfARowDependsOnNeitherItsPlaceNorItsNeighbours) {
  // Rows of odd width begin at every address that an element may have.
  for (const DType dtype : {DType::bf16, DType::f32}) {
    constexpr std::int64_t kTokens = 9, kWidth = 1029;
    const std::vector<double> row = random_numbers(dtype, kWidth, 2, 4.0);
    std::vector<double> values;
    for (std::int64_t t = 0; t < kTokens; ++t) values.insert(values.end(), row.begin(), row.end());
    const DeviceTensor logits(kernels(), dtype, {kTokens, kWidth}, values);
    static_cast<void>(kernels().cross_entropy_forward_backward(logits.view(), std::vector<std::int32_t>(kTokens, 77), 1.0));
    const std::vector<double> got = logits.values();
    for (std::int64_t t = 1; t < kTokens; ++t) {
      EXPECT_TRUE(std::equal(got.begin(), got.begin() + kWidth, got.begin() + t * kWidth)) << name(dtype) << " row " << t;
    }
  }
}

TEST_F(CudaLoss, AddsTheLossesOfManyRows) {
  constexpr std::int64_t kTokens = 2500, kVocabulary = 2;
  const std::vector<double> values = random_numbers(DType::f64, kTokens * kVocabulary, 3);
  const std::vector<std::int32_t> targets = make_targets(kTokens, kVocabulary);
  const DeviceTensor logits(kernels(), DType::f64, {kTokens, kVocabulary}, values);
  const double loss = kernels().cross_entropy_forward_backward(logits.view(), targets, 1.0 / kValid);
  const Truth truth(values, targets);
  EXPECT_NEAR(loss, truth.loss, 1e-12 * truth.loss);
}

TEST_F(CudaLoss, PutOffIsAddedBySynchronizeInAGraphToo) {
  const std::vector<double> values = random_numbers(DType::f32, 4 * 33, 4);
  const std::vector<std::int32_t> targets = make_targets(4, 33);
  const Truth truth(values, targets);
  double sum = 1;
  for (int step = 0; step < 2; ++step) {
    const DeviceTensor logits(kernels(), DType::f32, {4, 33}, values);
    kernels().synchronize();
    const double before = sum;
    kernels().begin_graph(7);
    kernels().cross_entropy_deferred(logits.view(), targets, 1.0 / kValid, sum);
    EXPECT_EQ(sum, before);
    kernels().end_graph();
    kernels().synchronize();
    EXPECT_NEAR(sum - before, truth.loss, 1e-5 * truth.loss);
    expect_close("gradient", logits.values(), truth.gradient, DType::f32, {}, chain(33));
  }
  kernels().cross_entropy_deferred(DeviceTensor(kernels(), DType::f32, {4, 33}, values).view(), targets, 1, sum);
  kernels().synchronize();
  EXPECT_NEAR(sum - 1, 3 * truth.loss, 1e-5 * truth.loss);
}

TEST_F(CudaLoss, OfALogitThatIsNoNumberIsNone) {
  for (const DType dtype : kDTypes) {
    for (const double bad : {kNaN, kInfinity}) {
      std::vector<double> values(140, 0.5);
      values[40] = bad;
      const DeviceTensor logits(kernels(), dtype, {2, 70}, values);
      EXPECT_TRUE(std::isnan(kernels().cross_entropy_forward_backward(logits.view(), std::vector<std::int32_t>{5, 5}, 1.0)));
      const std::vector<double> got = logits.values();
      EXPECT_TRUE(std::isnan(got[3])) << name(dtype);
      EXPECT_TRUE(std::isfinite(got[73])) << name(dtype) << ": of another row";
    }
  }
}

TEST_F(CudaLoss, OverflowsForNeitherLargeLogitsNorMaskedOnes) {
  for (const DType dtype : kDTypes) {
    // Columns from 20 on are masked: whole runs of a thread's elements are -inf.
    std::vector<double> values(5000, -kInfinity);
    for (std::size_t i = 0; i < 20; ++i) values[i] = i % 2 == 0 ? 30000.0 : -30000.0;
    const DeviceTensor logits(kernels(), dtype, {1, 5000}, values);
    const double large = logits.values()[0];
    const double loss = kernels().cross_entropy_forward_backward(logits.view(), std::vector<std::int32_t>{2}, 1.0);
    EXPECT_NEAR(loss, std::log(10.0), 1e-6 * large);
    const std::vector<double> got = logits.values();
    EXPECT_NEAR(got[0], 0.1, 1e-3);
    EXPECT_NEAR(got[2], -0.9, 1e-2);
    EXPECT_EQ(got[1], 0);
    EXPECT_EQ(got[4999], 0);
  }
}

/// Columns of the vocabulary dealt to two ranks, the second one padded: statistics of each, then gradients of each.
void check_split(Kernels& kernels, DType dtype, std::int64_t tokens, std::int64_t vocabulary, Place place) {
  SCOPED_TRACE(fmt::format("{} {} x {}", name(dtype), tokens, vocabulary));
  const std::int64_t width = (vocabulary + 1) / 2 + 3;
  const std::vector<double> values = random_numbers(dtype, tokens * vocabulary, 5, 4.0);
  const std::vector<std::int32_t> targets = make_targets(tokens, vocabulary);
  std::vector<double> sums(targets.size()), target_logits(targets.size());
  std::vector<std::vector<double>> parts;
  std::vector<std::vector<std::int32_t>> local;
  for (const std::int64_t first : {std::int64_t{0}, width}) {
    const std::int64_t columns = std::clamp<std::int64_t>(vocabulary - first, 0, width);
    std::vector<double> part(static_cast<std::size_t>(tokens * width), kNaN);
    std::vector<std::int32_t> here;
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(values.begin() + t * vocabulary + std::min(first, vocabulary), columns, part.begin() + t * width);
      const std::int64_t target = targets[static_cast<std::size_t>(t)] - first;
      here.push_back(target >= 0 && target < columns ? static_cast<std::int32_t>(target) : -1);
    }
    const DeviceTensor logits(kernels, dtype, {tokens, width}, part, place), statistics(kernels, wide(dtype), {tokens, 3}, place);
    kernels.cross_entropy_statistics(logits.view(), columns, here, statistics.view());
    const std::vector<double> got = statistics.values();
    for (std::size_t t = 0; t < sums.size(); ++t) {
      EXPECT_TRUE(columns > 0 || (got[3 * t] == -kInfinity && got[3 * t + 1] == 0));
      if (got[3 * t + 1] > 0) sums[t] += got[3 * t + 1] * std::exp(got[3 * t]);
      target_logits[t] += got[3 * t + 2];
    }
    parts.push_back(part);
    local.push_back(here);
  }
  double loss = 0;
  std::vector<double> logsumexp;
  std::vector<std::uint8_t> valid;
  for (std::size_t t = 0; t < sums.size(); ++t) {
    logsumexp.push_back(std::log(sums[t]));
    valid.push_back(targets[t] == kIgnoredTarget ? 0 : 1);
    if (valid.back() != 0) loss += logsumexp.back() - target_logits[t];
  }
  const Truth truth(values, targets);
  expect_close("loss", {loss}, {truth.loss}, wide(dtype), {}, chain(vocabulary));
  const DeviceTensor kept(kernels, wide(dtype), {tokens}, logsumexp);
  for (std::size_t p = 0; p < 2; ++p) {
    const std::int64_t first = p == 0 ? 0 : width, columns = std::clamp<std::int64_t>(vocabulary - first, 0, width);
    const DeviceTensor logits(kernels, dtype, {tokens, width}, parts[p], place);
    kernels.cross_entropy_gradient(logits.view(), columns, local[p], valid, kept.view(), 1.0 / kValid);
    std::vector<double> expected(parts[p].size(), 0.0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(truth.gradient.begin() + t * vocabulary + std::min(first, vocabulary), columns, expected.begin() + t * width);
    }
    const std::vector<double> got = logits.values();
    expect_close("gradient", got, expected, dtype, {}, chain(vocabulary));
    for (std::int64_t i = 0; i < tokens * width; ++i) {
      ASSERT_TRUE(i % width < columns || got[static_cast<std::size_t>(i)] == 0.0) << "padding";
    }
  }
}

TEST_F(CudaLoss, OfColumnsDealtToRanksIsTheDefinitionWhateverThePaddingHolds) {
  for (const DType dtype : kDTypes) {
    for (const auto& [tokens, vocabulary] : {Case{1, 1}, {7, 3}, {5, 257}, {3, 9001}}) {
      check_split(kernels(), dtype, tokens, vocabulary, vocabulary == 257 ? Place::odd : Place::aligned);
    }
  }
}

TEST_F(CudaLoss, OfNoTokensIsZero) {
  const DeviceTensor logits(kernels(), DType::f32, {0, 5});
  const std::vector<std::int32_t> none;
  EXPECT_EQ(kernels().cross_entropy_forward_backward(logits.view(), none, 1.0), 0);
  EXPECT_EQ(kernels().cross_entropy_forward(logits.view(), none), 0);
}

TEST_F(CudaLoss, RefusesTargetsOutsideTheColumns) {
  const DeviceTensor logits(kernels(), DType::f32, {2, 4}), statistics(kernels(), DType::f32, {2, 3}),
      logsumexp(kernels(), DType::f32, {2});
  const std::vector<std::uint8_t> valid = {1, 1};
  const std::vector<std::int32_t> padding = {-1, 3}, outside = {0, 4}, negative = {0, -1};
  EXPECT_THROW(kernels().cross_entropy_statistics(logits.view(), 3, padding, statistics.view()), ContractError);
  EXPECT_THROW(kernels().cross_entropy_gradient(logits.view(), 3, padding, valid, logsumexp.view(), 1), ContractError);
  EXPECT_THROW(static_cast<void>(kernels().cross_entropy_forward(logits.view(), outside)), ContractError);
  EXPECT_THROW(static_cast<void>(kernels().cross_entropy_forward(logits.view(), negative)), ContractError);
}

}  // namespace
}  // namespace tandem::device_test
