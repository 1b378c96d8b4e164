// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "kernels/cuda/device_test_support.h"
#include "reference/ops.h"

namespace tandem::device_test {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Values = std::vector<double>;

// Less than an access, several blocks with a tail for every dtype, odd addresses, none.
struct Size {
  std::int64_t count;
  Place place = Place::aligned;
};
constexpr Size kSizes[] = {{1}, {17000 + 5}, {2051, Place::odd}, {0}};

class CudaElementwise : public DeviceTest {};

template <class Real>
Values define_gelu(const Values& x, const Values* dy) {
  std::vector<Real> result(x.size());
  if (dy == nullptr) {
    reference::gelu_forward<Real>(as<Real>(x), result);
  } else {
    reference::gelu_backward<Real>(as<Real>(x), as<Real>(*dy), result);
  }
  return as_doubles(result);
}

TEST_F(CudaElementwise, GeluAndItsGradientAreTheirDefinitions) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} {}", name(dtype), s.count));
      const Values x = random_numbers(dtype, s.count, 1, 2.0), dy = random_numbers(dtype, s.count, 2);
      const DeviceTensor gx(kernels(), dtype, {s.count}, x, s.place), y(kernels(), dtype, {s.count}, s.place),
          gdy(kernels(), dtype, {s.count}, dy), dx(kernels(), dtype, {s.count}),
          in_place(kernels(), dtype, {s.count}, dy, s.place);
      kernels().gelu_forward(gx.view(), y.view());
      kernels().gelu_backward(gdy.view(), gx.view(), dx.view());
      kernels().gelu_backward(in_place.view(), gx.view(), in_place.view());
      const auto same = [&](const Values* gradient) { return dtype == DType::f64 ? Values{} : define_gelu<float>(x, gradient); };
      expect_close("gelu", y.values(), define_gelu<double>(x, nullptr), dtype, same(nullptr), 8);
      expect_close("dx", dx.values(), define_gelu<double>(x, &dy), dtype, same(&dy), 16);
      expect_close("dx in place", in_place.values(), define_gelu<double>(x, &dy), dtype, same(&dy), 16);
    }
  }
}

TEST_F(CudaElementwise, GeluFarFromZeroIsTheLineOrZero) {
  for (const DType dtype : kDTypes) {
    const Values x = {0.0, 9.0, 60.0, 1e4, 3e4, -9.0, -60.0, -1e4, -3e4};
    const auto count = static_cast<std::int64_t>(x.size());
    const DeviceTensor gx(kernels(), dtype, {count}, x), y(kernels(), dtype, {count}),
        one(kernels(), dtype, {count}, Values(x.size(), 1.0)), dx(kernels(), dtype, {count});
    kernels().gelu_forward(gx.view(), y.view());
    kernels().gelu_backward(one.view(), gx.view(), dx.view());
    const Values forward = y.values(), slope = dx.values();
    for (std::size_t i = 1; i < x.size(); ++i) {
      EXPECT_NEAR(forward[i], x[i] > 0 ? rounded_to(x[i], dtype) : 0.0, 1e-12) << name(dtype) << " " << x[i];
      EXPECT_NEAR(slope[i], x[i] > 0 ? 1.0 : 0.0, 1e-12) << name(dtype) << " " << x[i];
    }
    EXPECT_EQ(forward[0], 0.0);
    EXPECT_EQ(slope[0], 0.5);
  }
}

TEST_F(CudaElementwise, GeluWithTheErrorFunctionIsAnotherFunction) {
  constexpr Pitfall kPitfalls[] = {Pitfall::gelu_with_erf};
  const auto mistaken = try_kernels({.pitfalls = PitfallSet(kPitfalls)});
  for (const DType dtype : kDTypes) {
    const Values x = random_numbers(dtype, 301, 1, 2.0), dy = random_numbers(dtype, 301, 2);
    Values forward, backward;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double below = 0.5 * (1 + std::erf(x[i] / std::numbers::sqrt2));
      forward.push_back(x[i] * below);
      backward.push_back(dy[i] * (below + x[i] * std::exp(-0.5 * x[i] * x[i]) / std::sqrt(2 * std::numbers::pi)));
    }
    const DeviceTensor gx(*mistaken, dtype, {301}, x), y(*mistaken, dtype, {301}), dx(*mistaken, dtype, {301}, dy);
    mistaken->gelu_forward(gx.view(), y.view());
    mistaken->gelu_backward(dx.view(), gx.view(), dx.view());
    expect_close("gelu", y.values(), forward, dtype, {}, 2);
    expect_close("dx", dx.values(), backward, dtype, {}, 2);
  }
}

/// Numbers whose rounding can go wrong: ties, all but ties, subnormal ones, overflow, and what is no number.
Values hard_numbers() {
  Values values = {0.0,  -0.0, 1.0,    65504.0, 65520.0, 65519.99,  1e39,       -1e39,       3e38,
                   1e-7, 6e-8, 2.9e-8, 1e-40,   1e-46,   kInfinity, -kInfinity, std::nan("")};
  for (const double step : {0x1p-8, 0x1p-9, 0x1p-11, 0x1p-12, 0x1p-24}) {
    for (const double beside : {0.0, 0x1p-30, -0x1p-30, 0x1p-45, -0x1p-45}) {
      values.push_back(1.0 + step + beside);
      values.push_back(-(1.0 + 3 * step + beside));
    }
  }
  for (const double value : random_numbers(DType::f64, 2100, 5, 4.0)) values.push_back(value * (1 + 0x1p-40));
  return values;
}
/// value rounded once to 16 bits, by way of the neighbours in that dtype.
double round_directly(double value, DType dtype) {
  if (!is_16bit(dtype)) return rounded_to(value, dtype);
  const double first = rounded_to(value, dtype);
  if (!std::isfinite(value) || !std::isfinite(first)) return first;
  const auto bits_of = [&](double x) {
    return dtype == DType::bf16 ? to_bf16_bits(static_cast<float>(x)) : to_f16_bits(static_cast<float>(x));
  };
  double best = first;
  for (const int step : {-1, 1}) {
    const auto bits = static_cast<std::uint16_t>(bits_of(first) + step);
    const double other = static_cast<double>(dtype == DType::bf16 ? from_bf16_bits(bits) : from_f16_bits(bits));
    if (std::fabs(other - value) < std::fabs(best - value)) best = other;
  }
  return best;
}
void expect_same_numbers(const Values& got, const Values& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool same = std::isnan(expected[i]) ? std::isnan(got[i]) : got[i] == expected[i];
    ASSERT_TRUE(same) << "element " << i << " is " << got[i] << ", expected " << expected[i];
  }
}

TEST_F(CudaElementwise, ConversionsRoundOnce) {
  const Values all = hard_numbers();
  const auto count = static_cast<std::int64_t>(all.size());
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const Place place : {Place::aligned, Place::odd}) {
        SCOPED_TRACE(fmt::format("{} to {}", name(from), name(to)));
        const DeviceTensor source(kernels(), from, {count}, all, place), target(kernels(), to, {count});
        kernels().convert(source.view(), target.view());
        Values expected = source.values();
        for (double& value : expected) value = round_directly(value, to);
        expect_same_numbers(target.values(), expected);
      }
    }
  }
}

TEST_F(CudaElementwise, FillScaleAndAddDoThatAndRoundOnce) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} {}", name(dtype), s.count));
      const Values x = random_numbers(dtype, s.count, 1), y = random_numbers(dtype, s.count, 2);
      const DeviceTensor filled(kernels(), dtype, {s.count}, s.place), scaled(kernels(), dtype, {s.count}, x, s.place),
          gx(kernels(), dtype, {s.count}, x), sum(kernels(), dtype, {s.count}, y, s.place),
          wide_sum(kernels(), wide(dtype), {s.count}, y);
      const double value = 1 + 0x1p-9 + 0x1p-40;
      kernels().fill(filled.view(), value);
      kernels().scale(scaled.view(), 0.75);
      kernels().add(gx.view(), sum.view());
      kernels().add(gx.view(), wide_sum.view());
      Values scaled_x, sums, wide_sums;
      for (std::size_t i = 0; i < x.size(); ++i) {
        scaled_x.push_back(rounded_to(0.75 * x[i], dtype));
        sums.push_back(rounded_to(x[i] + y[i], dtype));
        wide_sums.push_back(rounded_to(x[i] + y[i], wide(dtype)));
      }
      expect_same_numbers(filled.values(), Values(x.size(), round_directly(value, dtype)));
      expect_same_numbers(scaled.values(), scaled_x);
      expect_same_numbers(sum.values(), sums);
      expect_same_numbers(wide_sum.values(), wide_sums);
    }
  }
}

TEST_F(CudaElementwise, BiasIsAddedToEveryRow) {
  struct Rows {
    std::int64_t tokens, width;
    Place place = Place::aligned;
  };
  for (const DType dtype : kDTypes) {
    for (const Rows& s : {Rows{1, 1}, {7, 24}, {9, 37}, {6, 2056}, {3, 16, Place::odd}, {0, 4}}) {
      const Values bias = random_numbers(dtype, s.width, 1), x = random_numbers(dtype, s.tokens * s.width, 2);
      const DeviceTensor gbias(kernels(), dtype, {s.width}, bias), gx(kernels(), dtype, {s.tokens, s.width}, x, s.place);
      kernels().add_bias(gbias.view(), gx.view());
      Values expected = x;
      for (std::size_t i = 0; i < x.size(); ++i) {
        expected[i] = rounded_to(x[i] + bias[i % static_cast<std::size_t>(s.width)], dtype);
      }
      expect_same_numbers(gx.values(), expected);
    }
  }
}

TEST_F(CudaElementwise, Fp8NumbersAndTheLargestAreTheDefinitions) {
  Values values = {0.0, -0.0, 448.0, 464.0, 1e9, -1e9, kInfinity, std::nan(""), 0x1p-9, 0x1p-10, 3 * 0x1p-10, 0x1p-17, 0x1p-16};
  for (const double value : random_numbers(DType::f32, 4200, 3, 0.3)) values.push_back(value);
  const auto count = static_cast<std::int64_t>(values.size());
  for (const DType from : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType to : {DType::f32, DType::bf16}) {
      for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
        for (const double scale : {1.0, 64.0, 0x1p-3}) {
          SCOPED_TRACE(fmt::format("{} to {}, scale {}", name(from), name(to), scale));
          const Place place = scale == 64.0 ? Place::odd : Place::aligned;
          const DeviceTensor source(kernels(), from, {count}, values, place), target(kernels(), to, {count}, place);
          EXPECT_EQ(kernels().quantize_fp8(source.view(), format, scale, target.view()), kInfinity);
          Values expected = source.values();
          for (double& value : expected) {
            value = static_cast<double>(round_to_fp8(static_cast<float>(value * scale), format)) / scale;
          }
          expect_same_numbers(target.values(), expected);
        }
      }
    }
  }
  const DeviceTensor tail(kernels(), DType::f32, {4099}, Values(4099, -2.5)), none(kernels(), DType::f32, {0});
  EXPECT_EQ(kernels().quantize_fp8(tail.view(), Fp8Format::e4m3, 1.0, tail.view()), 2.5);
  EXPECT_EQ(kernels().quantize_fp8(none.view(), Fp8Format::e4m3, 1.0, none.view()), 0.0);
  for (std::int64_t place = 0; place < 4099; place += place == 4064 ? 34 : 127) {  // every warp, both blocks, the tail
    Values values_with_one(4099, 0.0);
    values_with_one[static_cast<std::size_t>(place)] = -3;
    const DeviceTensor x(kernels(), DType::f32, {4099}, values_with_one);
    EXPECT_EQ(kernels().quantize_fp8(x.view(), Fp8Format::e5m2, 1.0, x.view()), 3.0) << place;
  }
}

TEST_F(CudaElementwise, RefusesOtherCountsAndDtypes) {
  const DeviceTensor three(kernels(), DType::f32, {3}), four(kernels(), DType::f32, {4}), narrow(kernels(), DType::bf16, {3}),
      half(kernels(), DType::f16, {3});
  EXPECT_THROW(kernels().gelu_forward(three.view(), four.view()), ContractError);
  EXPECT_THROW(kernels().gelu_backward(three.view(), three.view(), narrow.view()), ContractError);
  EXPECT_THROW(kernels().convert(three.view(), four.view()), ContractError);
  EXPECT_THROW(kernels().add(three.view(), narrow.view()), ContractError);
  EXPECT_THROW(kernels().add(half.view(), narrow.view()), ContractError);
  EXPECT_THROW(static_cast<void>(kernels().quantize_fp8(three.view(), Fp8Format::e4m3, 3.0, three.view())), ContractError);
  EXPECT_THROW(static_cast<void>(kernels().quantize_fp8(three.view(), Fp8Format::e4m3, 1.0, half.view())), ContractError);
}

}  // namespace
}  // namespace tandem::device_test
