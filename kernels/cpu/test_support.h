// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/rng.h"
#include "core/tensor.h"
#include "kernels/kernels.h"

/// What the tests of this folder share. Nothing else includes it.
namespace tandem::cpu {

inline constexpr const char* kInstructionSets[] = {"avx512", "avx2", "baseline"};

/// Null, with the reason printed, where this machine or build cannot make it.
inline std::unique_ptr<Kernels> try_kernels(int threads, const std::string& instruction_set, const std::string& library = "auto",
                                            const PitfallSet& pitfalls = {}) {
  try {
    return make_cpu_kernels(
        {.threads = threads, .pitfalls = pitfalls, .instruction_set = instruction_set, .matrix_library = library});
  } catch (const InputError& error) {
    fmt::print("not tested: {}\n", error.what());
    return nullptr;
  }
}

template <class Real>
std::vector<Real> random_values(std::int64_t count, std::uint64_t seed, double stddev = 1.0, double mean = 0.0) {
  CounterRng rng(seed, "kernels");
  std::vector<Real> values(static_cast<std::size_t>(count));
  // Values of float precision, so that double and float see the same numbers.
  for (Real& value : values) value = static_cast<Real>(static_cast<float>(mean + stddev * rng.next_normal()));
  return values;
}

/// A tensor one element off any alignment, between guards; outputs start as NaN, so that an element left out or read shows.
template <class Real>
class Guarded {
 public:
  explicit Guarded(const Shape& shape)
      : Guarded(shape, std::vector<Real>(count(shape), std::numeric_limits<Real>::quiet_NaN())) {}
  Guarded(const Shape& shape, const std::vector<Real>& values)
      : shape_(shape), memory_(values.size() + kBefore + kAfter, kGuard) {
    std::copy(values.begin(), values.end(), memory_.begin() + kBefore);
  }
  [[nodiscard]] TensorView view() { return TensorView(memory_.data() + kBefore, dtype_of<Real>, shape_); }
  /// The values; fails the test where a guard was overwritten.
  [[nodiscard]] std::vector<Real> values() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      const bool guard = i < kBefore || i >= memory_.size() - kAfter;
      EXPECT_TRUE(!guard || memory_[i] == kGuard) << "written outside the tensor, at " << i;
    }
    return {memory_.begin() + kBefore, memory_.end() - kAfter};
  }

 private:
  static std::size_t count(const Shape& shape) { return static_cast<std::size_t>(num_elements(shape)); }
  static constexpr std::size_t kBefore = 1, kAfter = 67;
  static constexpr Real kGuard = Real(12345.5);
  Shape shape_;
  std::vector<Real> memory_;
};

template <class Real>
using Outputs = std::vector<std::vector<Real>>;

template <class Real>
bool same_bits(const Outputs<Real>& a, const Outputs<Real>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    if (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(Real)) != 0) return false;
  }
  return true;
}

/// ||got - truth|| / ||truth||; the norm of got where truth is zero; NaN where a value is.
template <class Real>
double relative_error(const std::vector<Real>& got, const std::vector<double>& truth) {
  if (got.size() != truth.size()) return std::numeric_limits<double>::quiet_NaN();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = static_cast<double>(got[i]) - truth[i];
    difference += error * error;
    size += truth[i] * truth[i];
  }
  return std::sqrt(difference) / (size > 0 ? std::sqrt(size) : 1.0);
}

/// The rounding criterion: the definition computed in the same precision is the yardstick, or eps sqrt(K) where that is larger,
/// K the number of roundings behind an element (the longest sum, or the operations of an elementwise chain).
template <class Real>
void expect_close(const Outputs<Real>& got, const Outputs<double>& truth, const Outputs<Real>& same_precision, double chain) {
  ASSERT_EQ(got.size(), truth.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double yardstick = same_precision.empty() ? 0.0 : relative_error(same_precision[i], truth[i]);
    const double bound = 4.0 * std::max(yardstick, static_cast<double>(std::numeric_limits<Real>::epsilon()) * std::sqrt(chain));
    const double error = relative_error(got[i], truth[i]);
    EXPECT_TRUE(error <= bound) << "output " << i << ": error " << error << ", bound " << bound;
  }
}

/// run(kernels) -> Outputs<Real> must give the same bits for 1, 2, 3 threads; returns them.
template <class Real, class Run>
Outputs<Real> with_any_threads(const std::string& instruction_set, const std::string& library, Run run) {
  Outputs<Real> first;
  for (const int threads : {1, 2, 3}) {
    const auto kernels = try_kernels(threads, instruction_set, library);
    if (kernels == nullptr) return {};
    Outputs<Real> outputs = run(*kernels);
    if (threads == 1) {
      first = std::move(outputs);
    } else {
      EXPECT_TRUE(same_bits(first, outputs)) << threads << " threads, " << instruction_set << ", " << library;
    }
  }
  return first;
}

}  // namespace tandem::cpu
