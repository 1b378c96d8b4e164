// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "kernels/cpu/test_support.h"

/// What tests of kernels on 16-bit tensors share.
namespace tandem::cpu {

/// A tensor of fp32, bf16 or fp16 one element off any alignment, between guards; without values it starts as NaN.
class StoredTensor {
 public:
  StoredTensor(DType dtype, const Shape& shape) : StoredTensor(dtype, shape, {}) {}
  /// Rounds the values.
  StoredTensor(DType dtype, const Shape& shape, const std::vector<double>& values)
      : dtype_(dtype), shape_(shape), count_(static_cast<std::size_t>(num_elements(shape))) {
    bytes_.assign((kBefore + count_ + kAfter) * element_bytes(), kGuard);
    for (std::size_t i = 0; i < count_; ++i) {
      set(i, values.empty() ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(values[i]));
    }
  }
  [[nodiscard]] TensorView view() { return TensorView(bytes_.data() + kBefore * element_bytes(), dtype_, shape_); }
  [[nodiscard]] DType dtype() const { return dtype_; }
  /// The stored numbers; fails the test where a guard was overwritten.
  [[nodiscard]] std::vector<double> values() const {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const bool guard = i < kBefore * element_bytes() || i >= (kBefore + count_) * element_bytes();
      EXPECT_TRUE(!guard || bytes_[i] == kGuard) << "written outside the tensor, at byte " << i;
    }
    std::vector<double> result(count_);
    for (std::size_t i = 0; i < count_; ++i) result[i] = get(i);
    return result;
  }

 private:
  [[nodiscard]] std::size_t element_bytes() const { return size_bytes(dtype_); }
  void set(std::size_t i, float value) {
    std::uint8_t* to = bytes_.data() + (kBefore + i) * element_bytes();
    const std::uint16_t bits = dtype_ == DType::bf16 ? to_bf16_bits(value) : to_f16_bits(value);
    std::memcpy(to, dtype_ == DType::f32 ? static_cast<const void*>(&value) : &bits, element_bytes());
  }
  [[nodiscard]] double get(std::size_t i) const {
    const std::uint8_t* from = bytes_.data() + (kBefore + i) * element_bytes();
    if (dtype_ == DType::f32) {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return static_cast<double>(value);
    }
    std::uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return static_cast<double>(dtype_ == DType::bf16 ? from_bf16_bits(bits) : from_f16_bits(bits));
  }

  static constexpr std::size_t kBefore = 1, kAfter = 67;
  static constexpr std::uint8_t kGuard = 0xA5;
  DType dtype_;
  Shape shape_;
  std::size_t count_;
  std::vector<std::uint8_t> bytes_;
};

/// Normal numbers of the dtype.
inline std::vector<double> rounded_values(DType dtype, std::int64_t count, std::uint64_t seed, double stddev = 1.0) {
  auto values = random_values<double>(count, seed, stddev);
  for (double& value : values) value = static_cast<double>(round_to(static_cast<float>(value), dtype));
  return values;
}

/// A result with the error that arithmetic in fp32 may have made before it was stored.
struct Expected {
  std::vector<double> values;
  std::vector<double> arithmetic_error;
};

/// Each element within its arithmetic error, and half a unit of what is stored: u |value|, or half the least subnormal.
inline void expect_stored(const std::vector<double>& got, const Expected& truth, DType stored, const std::string& name) {
  ASSERT_EQ(got.size(), truth.values.size()) << name;
  const double u = unit_roundoff(stored), least = stored == DType::f16 ? 0x1p-25 : 0x1p-126;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double arithmetic = truth.arithmetic_error[i];
    const double bound = arithmetic + u * (std::fabs(truth.values[i]) + arithmetic) + least;
    ASSERT_TRUE(std::fabs(got[i] - truth.values[i]) <= bound)
        << name << " element " << i << ": " << got[i] << ", expected " << truth.values[i] << " within " << bound;
  }
}

/// run(kernels) -> Outputs<double> must give the same numbers for 1, 2, 3 threads; returns them, or nothing where not available.
template <class Run>
Outputs<double> same_with_any_threads(CpuKernelsOptions options, Run run) {
  Outputs<double> first;
  for (const int threads : {1, 2, 3}) {
    options.threads = threads;
    try {
      const auto kernels = make_cpu_kernels(options);
      Outputs<double> outputs = run(*kernels);
      if (threads == 1) {
        first = std::move(outputs);
      } else {
        EXPECT_TRUE(same_bits(first, outputs)) << threads << " threads";
      }
    } catch (const InputError& error) {
      fmt::print("not tested: {}\n", error.what());
      return {};
    }
  }
  return first;
}

}  // namespace tandem::cpu
