// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/rng.h"
#include "reference/tensors.h"

/// What the tests of this folder share. Nothing else includes it.
namespace tandem::reference {

/// ||got - expected|| / ||expected||, or ||got|| where expected is zero. NaN where a value is.
template <class Real>
double relative_l2(const std::vector<Real>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) return NAN;
  double difference = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = static_cast<double>(got[i]) - expected[i];
    difference += error * error;
    size += expected[i] * expected[i];
  }
  return std::sqrt(difference) / (size > 0.0 ? std::sqrt(size) : 1.0);
}

/// Largest relative L2 over all tensors, NaN where one is. The keys' bias has a true gradient of zero: it is measured against the
/// whole bias.
inline double worst_deviation(const NamedTensors<double>& got, const NamedTensors<double>& expected) {
  if (got.size() != expected.size()) return NAN;
  double worst = 0.0;
  for (const auto& [name, values] : expected) {
    const double deviation = relative_l2(got.at(name), values);
    if (std::isnan(deviation)) return deviation;
    worst = std::max(worst, deviation);
  }
  return worst;
}

inline std::filesystem::path own_golden_folder() { return std::filesystem::path(TANDEM_SOURCE_DIR) / "results" / "golden"; }

/// Where a set of this name is: in the repository, or beside it.
inline std::filesystem::path golden_folder(const std::string& name) {
  const std::filesystem::path own = own_golden_folder() / name;
  if (std::filesystem::exists(own)) return own;
  return std::filesystem::path(TANDEM_SOURCE_DIR) / ".." / "shared" / "golden" / name;
}

template <class Real = double>
std::vector<Real> random_values(std::size_t count, std::uint64_t seed, double stddev = 1.0, double mean = 0.0) {
  CounterRng rng(seed, "test");
  std::vector<Real> values(count);
  for (Real& value : values) value = static_cast<Real>(mean + stddev * rng.next_normal());
  return values;
}

/// Parameters far enough from their usual start that attention is not uniform, no bias is zero and no norm weight one.
inline NamedTensors<double> lively_parameters(const GptConfig& model, std::uint64_t seed) {
  NamedTensors<double> parameters;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const double mean = parameter.kind == ParameterKind::norm_weight ? 1.0 : 0.0;
    parameters[parameter.name] =
        random_values(static_cast<std::size_t>(parameter.num_elements()), seed ^ fnv1a(parameter.name), 0.3, mean);
  }
  return parameters;
}

/// Random tokens; row r has its first `lengths[r]` targets valid.
inline Batch ragged_batch(const GptConfig& model, std::int64_t sequence, const std::vector<std::int64_t>& lengths,
                          std::uint64_t seed) {
  Batch batch = make_batch(static_cast<std::int64_t>(lengths.size()), sequence);
  CounterRng rng(seed, "tokens");
  const auto token = [&] { return static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(model.vocabulary))); };
  for (std::int32_t& id : batch.ids) id = token();
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    for (std::int64_t t = 0; t < lengths[row]; ++t) {
      batch.targets[row * static_cast<std::size_t>(sequence) + static_cast<std::size_t>(t)] = token();
    }
  }
  return batch;
}

/// Splits every row at `starts` (ascending, not 0) into documents whose positions begin at 0 again.
inline void pack_documents(Batch& batch, const std::vector<std::int32_t>& starts) {
  for (std::int64_t i = 0; i < batch.rows * batch.sequence; ++i) {
    const auto t = static_cast<std::int32_t>(i % batch.sequence);
    std::int32_t start = 0;
    for (const std::int32_t candidate : starts) start = candidate <= t ? candidate : start;
    batch.document_starts[static_cast<std::size_t>(i)] = start;
    batch.positions[static_cast<std::size_t>(i)] = t - start;
  }
}

/// Derivative by `x` of f(), which reads x: central differences of fourth order. Their error is h^4 f^(5) / 30, here 3e-16 f^(5),
/// plus the rounding of f divided by h, about 1e-12 for f near 1.
template <class Function>
double finite_difference(double& x, const Function& f) {
  constexpr double kStep = 3e-4;
  const double x0 = x;
  const auto at = [&](double offset) {
    x = x0 + offset;
    const double value = f();
    x = x0;
    return value;
  };
  return (8.0 * (at(kStep) - at(-kStep)) - (at(2 * kStep) - at(-2 * kStep))) / (12.0 * kStep);
}

/// Rounding leaves finite_difference() good to about 1e-11 for these functions, truncation too as long as the fifth derivative
/// stays below 1e5; a forgotten term changes a derivative by its own size.
inline constexpr double kGradientTolerance = 1e-9;

/// Compares `gradient` with the derivatives of f() by each element of x.
template <class Function>
void expect_gradient(const std::string& what, std::vector<double>& x, const std::vector<double>& gradient, const Function& f) {
  ASSERT_EQ(x.size(), gradient.size());
  double largest = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected = finite_difference(x[i], f);
    EXPECT_LE(std::abs(gradient[i] - expected), kGradientTolerance * std::max(1.0, std::abs(expected)))
        << what << "[" << i << "]: backward gives " << gradient[i] << ", finite differences " << expected;
    largest = std::max(largest, std::abs(expected));
  }
  EXPECT_GT(largest, 1e-4) << what << " has no gradient to check";
}

}  // namespace tandem::reference
