// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/dtype.h"
#include "core/error.h"
#include "core/tensor.h"
#include "kernels/kernels.h"

/// What the tests of the CUDA kernels share. They see nothing but the public interface, so that the same test runs on the
/// emulated GPU and on a real one.
namespace tandem::device_test {

/// "simt", or what TANDEM_TEST_BACKEND says.
inline std::string test_backend() {
  const char* const name = std::getenv("TANDEM_TEST_BACKEND");
  return name != nullptr && *name != '\0' ? name : "simt";
}

/// Null, with the reason printed, where this machine or build cannot make them.
inline std::unique_ptr<Kernels> try_kernels(const CudaKernelsOptions& options = {}) {
  try {
    return make_cuda_kernels(test_backend(), options);
  } catch (const InputError& error) {
    fmt::print("not tested: {}\n", error.what());
    return nullptr;
  }
}

/// A fixture with kernels; skips its tests where there are none.
class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (kernels_ != nullptr) return;
    // Whoever asks for a backend wants it: a run in which nothing was tested is no pass.
    if (std::getenv("TANDEM_TEST_BACKEND") != nullptr) FAIL() << "no backend " << test_backend();
    GTEST_SKIP() << "not available here";
  }
  [[nodiscard]] Kernels& kernels() { return *kernels_; }

 private:
  std::unique_ptr<Kernels> kernels_ = try_kernels();
};

/// Where a tensor begins: at a multiple of 256 bytes, or one element further on, where no vector access is aligned.
enum class Place : std::uint8_t { aligned, odd };

inline double rounded_to(double value, DType dtype) {
  if (dtype == DType::f64) return value;
  const auto single = static_cast<float>(value);
  return static_cast<double>(is_16bit(dtype) ? round_to(single, dtype) : single);
}

/// Normal-like numbers (sums of three uniform ones) that `dtype` holds.
inline std::vector<double> random_numbers(DType dtype, std::int64_t count, std::uint64_t seed, double stddev = 1.0,
                                          double mean = 0.0) {
  std::vector<double> values(static_cast<std::size_t>(count));
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (double& value : values) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto low = static_cast<std::int64_t>(state >> 8 & 0xFFFFF), high = static_cast<std::int64_t>(state >> 30 & 0xFFFFF),
               top = static_cast<std::int64_t>(state >> 44);
    // Of single precision at most, so that one list of numbers serves fp64 and fp32.
    const double sum = 0x1p-19 * static_cast<double>(low + high + top - 3 * (1 << 19));
    value = rounded_to(mean + stddev * sum, dtype == DType::f64 ? DType::f32 : dtype);
  }
  return values;
}

/// A tensor in the memory of `kernels`, between guards; without values it starts as NaN, so that an element left out or read
/// shows.
class DeviceTensor {
 public:
  DeviceTensor(Kernels& kernels, DType dtype, const Shape& shape, Place place = Place::aligned)
      : DeviceTensor(kernels, dtype, shape,
                     std::vector<double>(static_cast<std::size_t>(num_elements(shape)), std::numeric_limits<double>::quiet_NaN()),
                     place) {}
  /// Rounds the values to the dtype.
  DeviceTensor(Kernels& kernels, DType dtype, const Shape& shape, const std::vector<double>& values, Place place = Place::aligned)
      : memory_(kernels.memory()), dtype_(dtype), shape_(shape), count_(values.size()) {
    if (count_ != static_cast<std::size_t>(num_elements(shape))) throw ContractError("values of another number");
    before_ = kBefore + (place == Place::odd ? element_bytes() : 0);
    std::vector<std::uint8_t> bytes(before_ + count_ * element_bytes() + kAfter, kGuard);
    for (std::size_t i = 0; i < count_; ++i) put(bytes.data() + before_ + i * element_bytes(), values[i]);
    size_bytes_ = static_cast<std::int64_t>(bytes.size());
    address_ = memory_.reserve(size_bytes_);
    memory_.write(bytes.data(), address_, size_bytes_);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { memory_.give_back(address_, size_bytes_); }

  [[nodiscard]] TensorView view() const { return TensorView(static_cast<std::uint8_t*>(address_) + before_, dtype_, shape_); }
  [[nodiscard]] DType dtype() const { return dtype_; }
  /// The numbers after all that was issued; fails the test where a guard was overwritten.
  [[nodiscard]] std::vector<double> values() const {
    const std::vector<std::uint8_t> bytes = read();
    std::vector<double> values(count_);
    for (std::size_t i = 0; i < count_; ++i) values[i] = get(bytes.data() + before_ + i * element_bytes());
    return values;
  }
  /// The same as bytes: for comparisons to the bit.
  [[nodiscard]] std::vector<std::uint8_t> bits() const {
    const std::vector<std::uint8_t> bytes = read();
    return {bytes.begin() + static_cast<std::ptrdiff_t>(before_), bytes.end() - static_cast<std::ptrdiff_t>(kAfter)};
  }

 private:
  static constexpr std::size_t kBefore = 256, kAfter = 256;
  static constexpr std::uint8_t kGuard = 0xA5;

  [[nodiscard]] std::size_t element_bytes() const { return size_bytes(dtype_); }
  [[nodiscard]] std::vector<std::uint8_t> read() const {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size_bytes_));
    memory_.read(address_, bytes.data(), size_bytes_);
    std::size_t touched = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if ((i < before_ || i >= before_ + count_ * element_bytes()) && bytes[i] != kGuard) ++touched;
    }
    EXPECT_EQ(touched, 0U) << "bytes written outside a tensor of " << to_string(shape_);
    return bytes;
  }
  template <class T>
  static void put_as(std::uint8_t* to, T value) {
    std::memcpy(to, &value, sizeof(T));
  }
  void put(std::uint8_t* to, double value) const {
    switch (dtype_) {
      case DType::f64: return put_as(to, value);
      case DType::f32: return put_as(to, static_cast<float>(value));
      case DType::bf16: return put_as(to, to_bf16_bits(static_cast<float>(value)));
      case DType::f16: return put_as(to, to_f16_bits(static_cast<float>(value)));
      default: throw ContractError("a DeviceTensor is of a floating dtype");
    }
  }
  template <class T>
  static T get_as(const std::uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }
  [[nodiscard]] double get(const std::uint8_t* from) const {
    if (dtype_ == DType::f64) return get_as<double>(from);
    if (dtype_ == DType::f32) return static_cast<double>(get_as<float>(from));
    const auto half = get_as<std::uint16_t>(from);
    return static_cast<double>(dtype_ == DType::bf16 ? from_bf16_bits(half) : from_f16_bits(half));
  }

  Memory& memory_;
  DType dtype_;
  Shape shape_;
  std::size_t count_, before_ = 0;
  std::int64_t size_bytes_ = 0;
  void* address_ = nullptr;
};

/// ||got - truth|| / ||truth||; the norm of got where truth is zero; NaN where a value is.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& truth) {
  if (got.size() != truth.size()) return std::numeric_limits<double>::quiet_NaN();
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - truth[i]) * (got[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  return std::sqrt(difference) / (size > 0 ? std::sqrt(size) : 1.0);
}

template <class Real>
std::vector<Real> as(const std::vector<double>& values) {
  std::vector<Real> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), [](double value) { return static_cast<Real>(value); });
  return result;
}
template <class Real>
std::vector<double> as_doubles(const std::vector<Real>& values) {
  return {values.begin(), values.end()};
}

/// The rounding criterion. `truth` comes from exact arithmetic (double) on the numbers that the tensors hold, `same_precision`
/// (may be empty) from the definition computed in fp32; `chain` is the number of roundings behind an element: its longest sum.
///  - fp64 and fp32: the relative error of the whole tensor is at most 4 max(error of same_precision, eps sqrt(chain));
///  - 16 bits: every element is off by one rounding of itself, beside that error of the arithmetic in fp32. Which in turn may
///  have
///    moved an element as far as to the next number.
inline void expect_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& truth, DType dtype,
                         const std::vector<double>& same_precision, double chain) {
  ASSERT_EQ(got.size(), truth.size()) << what;
  if (got.empty()) return;
  const double yardstick = same_precision.empty() ? 0.0 : relative_error(same_precision, truth);
  const double eps = 2 * unit_roundoff(wide(dtype));
  const double bound = 4.0 * std::max(yardstick, eps * std::sqrt(chain));
  if (!is_16bit(dtype)) {
    const double error = relative_error(got, truth);
    EXPECT_TRUE(error <= bound) << what << ": error " << error << ", bound " << bound;
    return;
  }
  double size = 0;
  for (const double value : truth) size += value * value;
  const double arithmetic = bound * std::sqrt(size / static_cast<double>(truth.size()));
  const double least = dtype == DType::f16 ? 0x1p-25 : 0x1p-134;  // half the distance of subnormal numbers
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double reach = std::fabs(truth[i]) + arithmetic;
    const double allowed = arithmetic + std::max(unit_roundoff(dtype) * reach, least);
    ASSERT_TRUE(std::fabs(got[i] - truth[i]) <= allowed)
        << what << ": element " << i << " is " << got[i] << ", expected " << truth[i] << " within " << allowed;
  }
}

}  // namespace tandem::device_test
