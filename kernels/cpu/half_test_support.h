// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cpu/test_support.h"

/// What the tests of operations on 16-bit tensors share: the same calls on tensors of 16 bits and on fp32 ones that hold the same
/// numbers must differ by one rounding of each output.
namespace tandem::cpu {

/// Numbers near normal ones, made faster than random_values().
inline std::vector<float> floats(std::int64_t count, std::uint64_t seed, double stddev = 1.0, double mean = 0.0) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (float& value : values) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const auto low = static_cast<std::int32_t>(state >> 8 & 0xFFFFF), high = static_cast<std::int32_t>(state >> 32 & 0xFFFFF),
               top = static_cast<std::int32_t>(state >> 44);
    value = static_cast<float>(mean + stddev * 0x1p-19 * (low + high + top - 3 * (1 << 19)));  // the sum of three uniform ones
  }
  return values;
}

inline float narrowed_to(float value, DType dtype) { return is_16bit(dtype) ? round_to(value, dtype) : value; }

/// Bytes behind which nothing may be read or written: the page that follows them is not there, and the program ends on it.
class FencedMemory {
 public:
  explicit FencedMemory(std::size_t bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))), bytes_(bytes) {
    mapped_ = (bytes + page_ - 1) / page_ * page_ + page_;
    void* const start = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<unsigned char*>(start);
    if (mprotect(start_ + mapped_ - page_, page_, PROT_NONE) != 0) throw std::bad_alloc();
  }
  FencedMemory(const FencedMemory&) = delete;
  FencedMemory& operator=(const FencedMemory&) = delete;
  ~FencedMemory() { munmap(start_, mapped_); }

  [[nodiscard]] std::span<unsigned char> bytes() const noexcept { return {start_ + mapped_ - page_ - bytes_, bytes_}; }

 private:
  std::size_t page_, bytes_, mapped_ = 0;
  unsigned char* start_ = nullptr;
};

/// Tensors of one call, guarded in front and fenced behind. `storage` is what data is kept in; its values are rounded to
/// `numbers`, so that an fp32 run sees what a 16-bit one does.
class CallTensors {
 public:
  CallTensors(DType numbers, DType storage, DType sums) : numbers_(numbers), storage_(storage), sums_(sums) {}

  TensorView data(const Shape& shape, const std::vector<float>& values) { return make(shape, values, storage_, numbers_); }
  /// An output of the data's dtype, NaN before.
  TensorView data(const Shape& shape) { return data(shape, nan_values(shape)); }
  TensorView statistic(const Shape& shape, const std::vector<float>& values) {
    return make(shape, values, DType::f32, DType::f32);
  }
  TensorView statistic(const Shape& shape) { return statistic(shape, nan_values(shape)); }
  /// What a call accumulates into: of `sums`, or where that is 16 bits wide of the storage.
  TensorView sum(const Shape& shape, const std::vector<float>& values) {
    return is_16bit(sums_) ? data(shape, values) : statistic(shape, values);
  }
  void number(double value) { numbers_returned_.push_back(value); }

  [[nodiscard]] const std::vector<double>& numbers() const { return numbers_returned_; }
  /// The values of every tensor, rounded to what the 16-bit run keeps; fails the test where a guard was overwritten.
  [[nodiscard]] Outputs<float> values() const {
    Outputs<float> all;
    for (const Tensor& tensor : tensors_) all.push_back(values_of(tensor));
    return all;
  }

 private:
  static constexpr std::size_t kGuards = 67;
  static constexpr unsigned char kGuardByte = 0xA5;
  struct Tensor {
    std::unique_ptr<FencedMemory> memory;
    DType dtype, numbers;
    std::size_t count;
  };

  static std::vector<float> nan_values(const Shape& shape) {
    return std::vector<float>(static_cast<std::size_t>(num_elements(shape)), std::numeric_limits<float>::quiet_NaN());
  }

  TensorView make(const Shape& shape, const std::vector<float>& values, DType dtype, DType numbers) {
    const std::size_t size = tandem::size_bytes(dtype), count = static_cast<std::size_t>(num_elements(shape));
    EXPECT_EQ(values.size(), count);
    tensors_.push_back({std::make_unique<FencedMemory>((count + kGuards) * size), dtype, numbers, count});
    const std::span<unsigned char> memory = tensors_.back().memory->bytes();
    std::ranges::fill(memory, kGuardByte);
    unsigned char* begin = memory.data() + kGuards * size;
    for (std::size_t i = 0; i < count; ++i) {
      const float value = narrowed_to(values[i], numbers);
      const std::uint16_t bits = dtype == DType::bf16 ? to_bf16_bits(value) : to_f16_bits(value);
      if (is_16bit(dtype)) std::memcpy(begin + i * size, &bits, size);
      if (!is_16bit(dtype)) std::memcpy(begin + i * size, &value, size);
    }
    return TensorView(begin, dtype, shape);
  }

  [[nodiscard]] static std::vector<float> values_of(const Tensor& tensor) {
    const std::size_t size = tandem::size_bytes(tensor.dtype), first = kGuards * size;
    const std::span<const unsigned char> memory = tensor.memory->bytes();
    std::vector<float> values;
    for (std::size_t i = 0; i < tensor.count; ++i) {
      float value = 0;
      std::uint16_t bits = 0;
      if (is_16bit(tensor.dtype)) std::memcpy(&bits, memory.data() + first + i * size, size);
      if (!is_16bit(tensor.dtype)) std::memcpy(&value, memory.data() + first + i * size, size);
      if (tensor.dtype == DType::bf16) value = from_bf16_bits(bits);
      if (tensor.dtype == DType::f16) value = from_f16_bits(bits);
      values.push_back(narrowed_to(value, tensor.numbers));
    }
    for (std::size_t i = 0; i < first; ++i) {
      EXPECT_EQ(memory[i], kGuardByte) << "written in front of the tensor";
    }
    return values;
  }

  DType numbers_, storage_, sums_;
  std::deque<Tensor> tensors_;
  std::vector<double> numbers_returned_;
};

/// First element of another bit pattern (all NaN are one), or empty.
inline std::string first_difference(const Outputs<float>& got, const Outputs<float>& expected) {
  if (got.size() != expected.size()) return "other tensors";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i].size() != expected[i].size()) return fmt::format("tensor {} is of another size", i);
    for (std::size_t j = 0; j < got[i].size(); ++j) {
      const bool both_nan = std::isnan(got[i][j]) && std::isnan(expected[i][j]);
      if (both_nan || std::bit_cast<std::uint32_t>(got[i][j]) == std::bit_cast<std::uint32_t>(expected[i][j])) continue;
      return fmt::format("element {} of tensor {} is {}, expected {}", j, i, got[i][j], expected[i][j]);
    }
  }
  return "";
}

using Call = std::function<void(Kernels&, CallTensors&)>;

/// Instruction set, and the 16-bit dtype of the data.
using HalfCase = std::tuple<const char*, DType>;

class HalfTest : public testing::TestWithParam<HalfCase> {
 protected:
  void SetUp() override {
    for (const int threads : {1, 3}) {
      kernels_.push_back(try_kernels(threads, std::get<0>(GetParam())));
      if (kernels_.back() == nullptr) GTEST_SKIP() << "not available here";
    }
  }
  [[nodiscard]] static DType dtype() { return std::get<1>(GetParam()); }
  [[nodiscard]] Kernels& kernels() const { return *kernels_.front(); }

  /// With any number of threads, and sums in 16 bits and in fp32, the call gives what it gives on fp32 tensors, rounded.
  void expect_rounded(const Call& call) const {
    for (const DType sums : {dtype(), DType::f32}) {
      CallTensors single(dtype(), DType::f32, sums);
      call(*kernels_.front(), single);
      for (const auto& kernels : kernels_) {
        CallTensors half(dtype(), dtype(), sums);
        call(*kernels, half);
        EXPECT_EQ(first_difference(half.values(), single.values()), "") << "sums in " << name(sums);
        EXPECT_EQ(half.numbers(), single.numbers());
      }
    }
  }

 private:
  std::vector<std::unique_ptr<Kernels>> kernels_;
};

inline std::string half_case_name(const testing::TestParamInfo<HalfCase>& test) {
  return std::string(std::get<0>(test.param)) + "_" + std::string(name(std::get<1>(test.param)));
}

inline auto half_cases() {
  return testing::Combine(testing::ValuesIn(kInstructionSets), testing::Values(DType::bf16, DType::f16));
}

}  // namespace tandem::cpu
