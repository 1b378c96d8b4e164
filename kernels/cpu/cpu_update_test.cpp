// SPDX-License-Identifier: Apache-2.0
// Optimizer steps with 16-bit gradients and stored copies, conversions, fp8, and vector operations on 16 bits.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "kernels/cpu/half_test_support.h"

namespace tandem::cpu {
namespace {

class HalfUpdate : public HalfTest {};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr AdamWStep kStep = {.learning_rate = 0.1,
                             .beta1 = 0.9,
                             .beta2 = 0.95,
                             .epsilon = 1e-3,
                             .weight_decay = 0.2,
                             .step_index = 3,
                             .gradient_scale = 0.7};

std::vector<float> squares(std::vector<float> values) {
  for (float& value : values) value *= value;
  return values;
}

std::vector<float> rounded(std::vector<float> values, DType dtype) {
  for (float& value : values) value = narrowed_to(value, dtype);
  return values;
}

TEST_P(HalfUpdate, AdamWTakesAHalfGradientAndStoresTheRoundedParameter) {
  for (const std::int64_t count : {0, 1, 2049, 40'009}) {
    // All state is fp32: only the gradient is `data`.
    const auto run = [&](bool stored) {
      return [=](Kernels& kernels, CallTensors& tensors) {
        const auto g = tensors.data({count}, floats(count, 1, 0.01)), p = tensors.statistic({count}, floats(count, 2)),
                   m = tensors.statistic({count}, floats(count, 3, 0.01)),
                   v = tensors.statistic({count}, squares(floats(count, 4, 0.01)));
        const auto copy = tensors.data({count}, floats(count, 2));
        kernels.adamw(kStep, g, p, m, v, stored && is_16bit(copy.dtype()) ? copy : TensorView());
        if (stored && !is_16bit(copy.dtype())) kernels.convert(p, copy);  // what the 16-bit run should have stored
      };
    };
    expect_rounded(run(true));
    expect_rounded(run(false));
  }
}

TEST_P(HalfUpdate, AdamWStoresBesideAnFp32GradientToo) {
  constexpr std::int64_t kCount = 5'003;
  expect_rounded([](Kernels& kernels, CallTensors& tensors) {
    const auto g = tensors.statistic({kCount}, floats(kCount, 1, 0.01)), p = tensors.statistic({kCount}, floats(kCount, 2)),
               m = tensors.statistic({kCount}, floats(kCount, 3)), v = tensors.statistic({kCount}, squares(floats(kCount, 4)));
    const auto copy = tensors.data({kCount});
    kernels.adamw(kStep, g, p, m, v, is_16bit(copy.dtype()) ? copy : TensorView());
    if (!is_16bit(copy.dtype())) kernels.convert(p, copy);
  });
}

TEST_P(HalfUpdate, SgdUpdatesAMasterWithItsCopyOrTheHalfParameterItself) {
  for (const std::int64_t count : {0, 1, 2049, 40'009}) {
    expect_rounded([count = count](Kernels& kernels, CallTensors& tensors) {
      const auto g = tensors.data({count}, floats(count, 1)), p = tensors.statistic({count}, floats(count, 2)),
                 copy = tensors.data({count});
      kernels.sgd(0.5, 0.25, 2.0, g, p, is_16bit(copy.dtype()) ? copy : TensorView());
      if (!is_16bit(copy.dtype())) kernels.convert(p, copy);
      const auto itself = tensors.data({count}, floats(count, 3)), other = tensors.data({count}, floats(count, 3)),
                 wide_gradient = tensors.statistic({count}, floats(count, 4));
      kernels.sgd(0.5, 0.25, 2.0, g, itself, {});
      kernels.sgd(0.5, 0.25, 2.0, wide_gradient, other, {});
    });
  }
}

TEST_P(HalfUpdate, VectorOperationsAreRoundedOnce) {
  for (const std::int64_t count : {0, 1, 2047, 50'021}) {
    expect_rounded([count = count](Kernels& kernels, CallTensors& tensors) {
      const auto x = tensors.data({count}, floats(count, 1)), filled = tensors.data({count}),
                 scaled = tensors.data({count}, floats(count, 3));
      const auto sum = tensors.sum({count}, floats(count, 2, 30.0));
      kernels.fill(filled, 1.0 / 3.0);
      kernels.scale(scaled, 0.3);
      kernels.add(x, sum);
      tensors.number(kernels.squared_norm(x));
    });
  }
}

TEST_P(HalfUpdate, SquaredNormIsFiniteExactlyWhereEveryElementIs) {
  constexpr std::int64_t kCount = 40'009;
  for (const float large : {narrowed_to(3e4F, dtype()), dtype() == DType::bf16 ? 0x1.FEp127F : 65504.0F}) {
    CallTensors tensors(dtype(), dtype(), dtype());
    std::vector<float> values(kCount, large);
    EXPECT_TRUE(std::isfinite(kernels().squared_norm(tensors.data({kCount}, values))));
    for (const std::int64_t at : {std::int64_t{0}, std::int64_t{16'384}, kCount - 1}) {
      for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        auto damaged = values;
        damaged[static_cast<std::size_t>(at)] = bad;
        EXPECT_FALSE(std::isfinite(kernels().squared_norm(tensors.data({kCount}, damaged)))) << at << ", " << bad;
      }
    }
  }
  std::vector<float> largest(100, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(kernels().squared_norm(view_of(largest, {100}))));
}

TEST_P(HalfUpdate, NanAndInfinityPassThroughAndFp16Overflows) {
  const bool overflows = dtype() == DType::f16;
  std::vector<float> x(100, 1.0F), ones(100, 1.0F);
  x[37] = std::numeric_limits<float>::quiet_NaN();
  x[38] = -kInfinity;
  x[39] = 60'000.0F;
  CallTensors tensors(dtype(), dtype(), dtype());
  const auto scaled = tensors.data({100}, x), added = tensors.data({100}, x), dx = tensors.data({100}, x);  // 0, 1, 2
  const auto stored = tensors.data({100}), p = tensors.statistic({100}, x), m = tensors.statistic({100}, std::vector<float>(100)),
             v = tensors.statistic({100}, std::vector<float>(100));  // 3 to 6
  kernels().scale(scaled, 4.0);
  kernels().add(added, added);
  kernels().gelu_backward(dx, tensors.data({100}, std::vector<float>(100, 1.5F)), dx);  // gelu' is 1.13 there
  kernels().adamw(kStep, tensors.data({100}, ones), p, m, v, stored);
  const auto values = tensors.values();
  for (const std::size_t tensor : {0, 1, 2, 3}) {
    EXPECT_TRUE(std::isnan(values[tensor][37])) << tensor;
    EXPECT_EQ(values[tensor][38], -kInfinity) << tensor;
    EXPECT_TRUE(std::isfinite(values[tensor][36])) << tensor;
    EXPECT_EQ(std::isinf(values[tensor][39]), overflows && tensor < 3) << tensor;
  }
}

TEST_P(HalfUpdate, LossOfALogitThatIsNoNumberIsNone) {
  std::vector<float> logits(70, 0.5F);
  logits[40] = std::numeric_limits<float>::quiet_NaN();
  CallTensors tensors(dtype(), dtype(), dtype());
  const std::vector<std::int32_t> targets = {5};
  EXPECT_TRUE(std::isnan(kernels().cross_entropy_forward_backward(tensors.data({1, 70}, logits), targets, 1.0)));
  EXPECT_TRUE(std::isnan(tensors.values()[0][3]));
}

TEST_P(HalfUpdate, ConvertsBetweenAllFloatingDtypes) {
  constexpr std::int64_t kCount = 20'011;
  const auto original = floats(kCount, 1, 30.0);
  const auto as_half = rounded(original, dtype());
  std::vector<double> from_double(original.begin(), original.end()), to_double(original.size());
  for (const bool threads : {false, true}) {
    const auto converting = try_kernels(threads ? 3 : 1, std::get<0>(GetParam()));
    CallTensors tensors(DType::f32, dtype(), dtype());
    auto wide_original = original;
    const auto half = tensors.data({kCount}), again = tensors.data({kCount}), from_wide = tensors.data({kCount});
    const auto back = tensors.statistic({kCount});
    converting->convert(view_of(wide_original, {kCount}), half);
    converting->convert(half, again);
    converting->convert(half, back);
    converting->convert(view_of(from_double, {kCount}), from_wide);
    converting->convert(half, view_of(to_double, {kCount}));
    EXPECT_EQ(first_difference(tensors.values(), {as_half, as_half, as_half, as_half}), "");
    EXPECT_EQ(std::vector<float>(to_double.begin(), to_double.end()), as_half);
  }
  std::vector<double> third = {1.0 / 3.0};
  std::vector<float> single(1);
  kernels().convert(view_of(third, {1}), view_of(single, {1}));
  EXPECT_EQ(single[0], static_cast<float>(1.0 / 3.0));
}

TEST_P(HalfUpdate, ConvertRoundsADoubleOnce) {
  // Just above a tie, by less than fp32 sees: fp32 would make a tie of it, and the tie would go down to even.
  const double spacing = 2.0 * unit_roundoff(dtype());
  std::vector<double> from = {1.0 + spacing / 2 + 0x1p-40,
                              -1.0 - spacing / 2 - 0x1p-40,
                              1.0 + spacing * 1.5 - 0x1p-40,
                              1e300,
                              -1e300,
                              1e-300,
                              std::numeric_limits<double>::infinity(),
                              0.0};
  CallTensors tensors(DType::f32, dtype(), dtype());
  const auto to = tensors.data({8});
  kernels().convert(view_of(from, {8}), to);
  const auto up = static_cast<float>(1.0 + spacing);
  EXPECT_EQ(tensors.values()[0], (std::vector<float>{up, -up, up, kInfinity, -kInfinity, 0.0F, kInfinity, 0.0F}));
}

TEST_P(HalfUpdate, QuantizesToTheFp8NumbersOfTheDefinition) {
  // Every finite number of the dtype, and what it holds of infinity and NaN.
  std::vector<float> all;
  for (std::uint32_t bits = 0; bits <= 0xFFFF; bits += dtype() == DType::bf16 ? 3 : 1) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    all.push_back(dtype() == DType::bf16 ? from_bf16_bits(pattern) : from_f16_bits(pattern));
  }
  const auto count = static_cast<std::int64_t>(all.size());
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    for (const double scale : {1.0, 0x1p-9, 0x1p13}) {
      CallTensors tensors(DType::f32, dtype(), dtype());
      const auto from = tensors.data({count}, all);
      const auto to = tensors.statistic({count});
      std::vector<float> expected;
      for (const float value : all) {
        const auto scaled = static_cast<float>(value * scale);
        expected.push_back(static_cast<float>(round_to_fp8(scaled, format) / scale));
      }
      EXPECT_EQ(kernels().quantize_fp8(from, format, scale, to), static_cast<double>(kInfinity));
      EXPECT_EQ(first_difference(tensors.values(), {all, expected}), "") << "scale " << scale;
    }
  }
}

TEST_P(HalfUpdate, QuantizesFp32AndReturnsTheLargestForAnyNumberOfThreads) {
  constexpr std::int64_t kCount = 50'021;
  auto values = floats(kCount, 1, 20.0);
  values[123] = -0x1.234p9F;
  values[7] = std::numeric_limits<float>::quiet_NaN();
  for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    std::vector<float> expected;
    for (const float value : values) expected.push_back(round_to_fp8(value * 0.25F, format) * 4.0F);
    for (const int threads : {1, 3}) {
      const auto quantizing = try_kernels(threads, std::get<0>(GetParam()));
      CallTensors tensors(DType::f32, DType::bf16, DType::bf16);
      const auto in_place = tensors.statistic({kCount}, values), half = tensors.data({kCount});
      EXPECT_EQ(quantizing->quantize_fp8(in_place, format, 0.25, half), 0x1.234p9);
      EXPECT_EQ(quantizing->quantize_fp8(in_place, format, 0.25, in_place), 0x1.234p9);
      EXPECT_EQ(first_difference(tensors.values(), {expected, expected}), "") << threads << " threads";
    }
  }
  std::vector<float> none;
  EXPECT_EQ(kernels().quantize_fp8(view_of(none, {0}), Fp8Format::e4m3, 1.0, view_of(none, {0})), 0.0);
  std::vector<float> one = {1.0F};
  for (const double scale : {0.0, -1.0, 3.0, static_cast<double>(kInfinity)}) {
    EXPECT_THROW((void)kernels().quantize_fp8(view_of(one, {1}), Fp8Format::e4m3, scale, view_of(one, {1})), ContractError);
  }
}

TEST_P(HalfUpdate, RefusesDtypesThatDoNotGoTogether) {
  std::vector<double> d(4);
  std::vector<float> s(4);
  std::vector<std::int32_t> integers(4);
  const auto wide_view = view_of(d, {4}), single = view_of(s, {4}), none = TensorView();
  const TensorView half(d.data(), dtype(), {4});
  EXPECT_THROW(kernels().adamw(kStep, half, wide_view, wide_view, wide_view, none), ContractError);
  EXPECT_THROW(kernels().adamw(kStep, single, single, single, single, single), ContractError);
  EXPECT_THROW(kernels().adamw(kStep, half, half, half, half, none), ContractError);
  EXPECT_THROW(kernels().adamw(kStep, single, single, single, single, TensorView(d.data(), dtype(), {3})), ContractError);
  EXPECT_THROW(kernels().sgd(1, 0, 1, wide_view, wide_view, half), ContractError);
  EXPECT_THROW(kernels().add(single, half), ContractError);
  EXPECT_THROW(kernels().convert(view_of(integers, {4}), single), ContractError);
  EXPECT_THROW((void)kernels().quantize_fp8(wide_view, Fp8Format::e4m3, 1.0, single), ContractError);
}

INSTANTIATE_TEST_SUITE_P(Sets, HalfUpdate, half_cases(), half_case_name);

}  // namespace
}  // namespace tandem::cpu
