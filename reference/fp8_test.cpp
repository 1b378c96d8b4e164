// SPDX-License-Identifier: Apache-2.0
#include "reference/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "reference/mixed_precision.h"
#include "reference/test_support.h"
#include "reference/training.h"

namespace tandem::reference {
namespace {

using Values = std::vector<double>;

const Fp8Tensor kInput{"h.0.mlp.c_fc", LinearOperand::input};
const Fp8Tensor kGradient{"h.0.mlp.c_fc", LinearOperand::output_gradient};

Values quantize(Fp8Scaling& scaling, const Fp8Tensor& tensor, const Values& x) { return scaling.quantize<double>(tensor, x); }

void look_at(Fp8Scaling& scaling, const Fp8Tensor& tensor, double amax) {
  static_cast<void>(quantize(scaling, tensor, {0.0, -amax}));
  scaling.finish_step();
}

TEST(Fp8Rounding, AgreesWithEveryNumberOfTheFormats) {
  // All of e4m3 and e5m2 are made of their definition here: mantissas from 1 or 0 (subnormal) times powers of two.
  for (const auto& [format, bits, least, most] :
       {std::tuple{Fp8Format::e4m3, 3, -6, 8}, std::tuple{Fp8Format::e5m2, 2, -14, 15}}) {
    for (int exponent = least; exponent <= most; ++exponent) {
      for (int mantissa = 0; mantissa < 1 << bits; ++mantissa) {
        const double step = std::ldexp(1.0, exponent - bits);
        const double value = std::ldexp(1.0, exponent) + mantissa * step;
        if (value > largest(format)) continue;
        EXPECT_EQ(fp8_rounded(value, format), value);
        EXPECT_EQ(fp8_rounded(-value, format), -value);
        if (value + step > largest(format)) continue;
        EXPECT_EQ(fp8_rounded(value + 0.49 * step, format), value);
        EXPECT_EQ(fp8_rounded(value + 0.51 * step, format), value + step);
        EXPECT_EQ(fp8_rounded(value + 0.5 * step, format), mantissa % 2 == 0 ? value : value + step) << "a tie goes to even";
      }
    }
    const double smallest = std::ldexp(1.0, least - bits);
    EXPECT_EQ(fp8_rounded(smallest, format), smallest);
    EXPECT_EQ(fp8_rounded(0.5 * smallest, format), 0.0);
  }
}

TEST(Fp8Rounding, IsThatOfCore) {
  for (const float value : random_values<float>(2000, 3, 100.0)) {
    for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
      ASSERT_EQ(fp8_rounded(value, format), round_to_fp8(value, format)) << value;
      ASSERT_EQ(fp8_rounded(value * 1e-5F, format), round_to_fp8(value * 1e-5F, format)) << value;
    }
  }
}

TEST(Fp8Rounding, SaturatesAndKeepsNan) {
  EXPECT_EQ(fp8_rounded(1e9, Fp8Format::e4m3), 448.0);
  EXPECT_EQ(fp8_rounded(-std::numeric_limits<double>::infinity(), Fp8Format::e5m2), -57344.0);
  EXPECT_TRUE(std::isnan(fp8_rounded(std::nan(""), Fp8Format::e4m3)));
}

TEST(Fp8Scale, PutsTheLargestValueIntoTheTopmostBinade) {
  EXPECT_EQ(fp8_scale(448.0, Fp8Format::e4m3, 0), 1.0);
  EXPECT_EQ(fp8_scale(449.0, Fp8Format::e4m3, 0), 0.5);
  EXPECT_EQ(fp8_scale(1.0, Fp8Format::e4m3, 0), 256.0);
  EXPECT_EQ(fp8_scale(0.001, Fp8Format::e5m2, 0), 0x1p25);
  EXPECT_EQ(fp8_scale(1.0, Fp8Format::e4m3, 3), 32.0) << "a margin of three powers of two";
  EXPECT_EQ(fp8_scale(0.0, Fp8Format::e4m3, 5), 1.0);
}

TEST(Fp8Scaling, ScalesByTheLargestOfItsHistory) {
  Fp8Scaling scaling({.history = 3, .margin = 0});
  EXPECT_EQ(scaling.scale(kInput), 1.0) << "nothing has been seen";

  look_at(scaling, kInput, 1.0);
  EXPECT_EQ(scaling.scale(kInput), 256.0);
  EXPECT_EQ(scaling.scale(kGradient), 1.0) << "another tensor";
  look_at(scaling, kInput, 100.0);
  EXPECT_EQ(scaling.scale(kInput), 4.0);
  look_at(scaling, kInput, 1.0);
  look_at(scaling, kInput, 1.0);
  EXPECT_EQ(scaling.scale(kInput), 4.0) << "100 was three steps ago";
  look_at(scaling, kInput, 1.0);
  EXPECT_EQ(scaling.scale(kInput), 256.0) << "100 has left the history";
}

TEST(Fp8Scaling, UsesOneScaleForAllMicroBatchesOfAStep) {
  Fp8Scaling scaling({.history = 2, .margin = 0});
  look_at(scaling, kInput, 1.0);

  static_cast<void>(quantize(scaling, kInput, {7.0}));
  EXPECT_EQ(scaling.scale(kInput), 256.0);
  static_cast<void>(quantize(scaling, kInput, {3.0}));
  scaling.finish_step();

  EXPECT_EQ(scaling.state().at(kInput).amax, (std::deque<double>{1.0, 7.0})) << "the largest of both";
  EXPECT_EQ(scaling.scale(kInput), 64.0);
}

TEST(Fp8Scaling, SaturatesWhereATensorGrowsFasterThanItsHistory) {
  Fp8Scaling scaling({.history = 4, .margin = 0});
  look_at(scaling, kInput, 1.0);

  EXPECT_EQ(quantize(scaling, kInput, {1.0, 10.0, -10.0}), (Values{1.0, 1.75, -1.75})) << "448 / 256 is the most there is";
  scaling.finish_step();
  EXPECT_EQ(quantize(scaling, kInput, {10.0}), Values{10.0}) << "a step later the scale has followed";
}

TEST(Fp8Scaling, AMarginLeavesRoomToGrow) {
  Fp8Scaling scaling({.history = 4, .margin = 4});
  look_at(scaling, kInput, 1.0);

  EXPECT_EQ(quantize(scaling, kInput, {10.0}), Values{10.0});
}

TEST(Fp8Scaling, IgnoresWhatIsNotFinite) {
  Fp8Scaling scaling({.history = 4, .margin = 0});
  static_cast<void>(quantize(scaling, kInput, {2.0, std::numeric_limits<double>::infinity(), std::nan("")}));
  scaling.finish_step();

  EXPECT_EQ(scaling.scale(kInput), 128.0);
}

TEST(Fp8Scaling, GoesOnFromARestoredState) {
  Fp8Scaling first({.history = 3, .margin = 1});
  look_at(first, kInput, 5.0);
  look_at(first, kGradient, 0.1);
  Fp8Scaling second({.history = 3, .margin = 1});
  second.restore(first.state());

  for (Fp8Scaling* scaling : {&first, &second}) look_at(*scaling, kInput, 6.0);

  EXPECT_EQ(first.state(), second.state());
  EXPECT_EQ(second.scale(kInput), fp8_scale(6.0, Fp8Format::e4m3, 1));
}

TEST(Fp8Linear, MultipliesQuantisedOperandsAndNothingElse) {
  const LinearSize size{5, 7, 3};
  const Values x = random_values(35, 1), weight = random_values(21, 2, 0.1), bias = random_values(3, 3);
  const Values dy = random_values(15, 4, 1e-4);
  Fp8Scaling scaling({.history = 2, .margin = 0});
  const Rounding rounding{.fp8 = &scaling};
  Values y(15), dx(35), dweight(21), dbias(3);
  for (int step = 0; step < 2; ++step) {
    dweight.assign(21, 0.0);
    dbias.assign(3, 0.0);
    rounded_linear_forward<double>(rounding, "c_fc", size, x, weight, bias, y);
    rounded_linear_backward<double>(rounding, "c_fc", size, x, weight, dy, dx, dweight, dbias);
    scaling.finish_step();
  }

  const auto largest_of = [](const Values& values) {
    double most = 0.0;
    for (const double value : values) most = std::max(most, std::abs(value));
    return most;
  };
  const Values xq = fp8_quantized<double>(x, Fp8Format::e4m3, fp8_scale(largest_of(x), Fp8Format::e4m3, 0));
  const Values wq = fp8_quantized<double>(weight, Fp8Format::e4m3, fp8_scale(largest_of(weight), Fp8Format::e4m3, 0));
  const Values dyq = fp8_quantized<double>(dy, Fp8Format::e5m2, fp8_scale(largest_of(dy), Fp8Format::e5m2, 0));
  Values expected_y(15), expected_dx(35), expected_dweight(21), expected_dbias(3), unused(3);
  linear_forward<double>(size, xq, wq, bias, expected_y);
  linear_backward<double>(size, xq, wq, dyq, expected_dx, expected_dweight, unused);
  bias_backward<double>(dy, expected_dbias);
  EXPECT_EQ(y, expected_y);
  EXPECT_EQ(dx, expected_dx);
  EXPECT_EQ(dweight, expected_dweight);
  EXPECT_EQ(dbias, expected_dbias) << "biases are not quantised";
  // Half a unit in the last of 3 (2) bits after the leading one, for each operand.
  EXPECT_LT(relative_l2(xq, x), 0x1p-4);
  EXPECT_LT(relative_l2(dyq, dy), 0x1p-3);
  EXPECT_GT(relative_l2(xq, x), 0x1p-7);
}

TEST(Fp8Training, KeepsTheHistoryOfEveryBlockLinear) {
  TrainingRun run;
  run.model = {.vocabulary = 11, .sequence = 6, .layers = 2, .hidden = 8, .heads = 2, .mlp_hidden = 12};
  run.steps = 4;
  run.initialization = Initialization::scattered;
  run.numerics = numerics_from_precision("fp8");
  run.fp8 = {.history = 3, .margin = 1};
  run.layout = {2, 2};
  run.batch = [model = run.model](std::int64_t step) {
    return ragged_batch(model, 6, {6, 1, 4, 2, 3}, static_cast<std::uint64_t>(step));
  };

  const TrainingRecord<float> fp8 = train<float>(run);
  run.numerics = numerics_from_precision("bf16");
  const TrainingRecord<float> bf16 = train<float>(run);

  EXPECT_TRUE(bf16.fp8.empty());
  ASSERT_EQ(fp8.fp8.size(), 2U * 4U * 3U) << "layers, linear layers of a block, operands";
  for (const auto& [tensor, history] : fp8.fp8) {
    EXPECT_EQ(history.amax.size(), 3U) << tensor.layer;
    for (const double amax : history.amax) EXPECT_GT(amax, 0.0) << tensor.layer;
  }
  EXPECT_NE(fp8.gradients_step0, bf16.gradients_step0);
  EXPECT_NEAR(fp8.losses.back(), bf16.losses.back(), 0.1 * bf16.losses.back());
}

}  // namespace
}  // namespace tandem::reference
