// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/cuda/device_test_support.h"
#include "reference/ops.h"

namespace tandem::device_test {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr double kEpsilon = 1e-5;

struct Size {
  std::int64_t tokens, hidden;
  Place place = Place::aligned;
};
// A warp per row in one block and in two, a row that fills its warp, a block per row (of 64 threads with 16 bits), rows of odd
// length and at odd addresses, a row wider than registers hold, none.
constexpr Size kSizes[] = {{1, 8}, {11, 136}, {2, 512}, {3, 1096}, {4, 7}, {5, 64, Place::odd}, {1, 16400}, {0, 16}};

using Values = std::vector<double>;

struct Norm {
  Values y, mean, rstd, dx, dweight, dbias;
};
/// The definition in Real, on numbers that tensors of the dtype hold.
template <class Real>
Norm define(const Values& x, const Values& weight, const Values& bias, const Values& dy, const Values& dweight,
            const Values& dbias) {
  const std::size_t tokens = x.size() / weight.size();
  const auto xs = as<Real>(x), weights = as<Real>(weight), biases = as<Real>(bias), dys = as<Real>(dy);
  std::vector<Real> y(x.size()), mean(tokens), rstd(tokens), dx(x.size()), dw = as<Real>(dweight), db = as<Real>(dbias);
  reference::layer_norm_forward<Real>(xs, weights, biases, kEpsilon, y, {mean, rstd});
  reference::layer_norm_backward<Real>(xs, weights, {mean, rstd}, dys, dx, dw, db);
  return {as_doubles(y), as_doubles(mean), as_doubles(rstd), as_doubles(dx), as_doubles(dw), as_doubles(db)};
}

class CudaNorm : public DeviceTest {};

void check_norm(Kernels& kernels, DType dtype, const Size& s) {
  SCOPED_TRACE(fmt::format("{} {} x {}", name(dtype), s.tokens, s.hidden));
  const Shape matrix = {s.tokens, s.hidden};
  const std::int64_t count = s.tokens * s.hidden;
  const Values x = random_numbers(dtype, count, 1, 1.0, 2.0), weight = random_numbers(dtype, s.hidden, 2),
               bias = random_numbers(dtype, s.hidden, 3), dy = random_numbers(dtype, count, 4),
               residual = random_numbers(dtype, count, 5);
  const Norm truth = define<double>(x, weight, bias, dy, bias, bias), plain = define<float>(x, weight, bias, dy, bias, bias);
  const auto same = [&](const Values& values) { return dtype == DType::f64 ? Values{} : values; };
  const DType statistic = wide(dtype);
  const DeviceTensor gx(kernels, dtype, matrix, x, s.place), gweight(kernels, dtype, {s.hidden}, weight, s.place),
      gbias(kernels, dtype, {s.hidden}, bias), gdy(kernels, dtype, matrix, dy), gresidual(kernels, dtype, matrix, residual);
  const DeviceTensor y(kernels, dtype, matrix), mean(kernels, statistic, {s.tokens}), rstd(kernels, statistic, {s.tokens});
  kernels.layer_norm_forward(gx.view(), gweight.view(), gbias.view(), kEpsilon, y.view(), mean.view(), rstd.view());
  const auto chain = static_cast<double>(s.hidden);
  expect_close("y", y.values(), truth.y, dtype, same(plain.y), chain);
  expect_close("mean", mean.values(), truth.mean, statistic, same(plain.mean), chain);
  expect_close("rstd", rstd.values(), truth.rstd, statistic, same(plain.rstd), chain);

  const DeviceTensor dx(kernels, dtype, matrix), beside(kernels, dtype, matrix),
      in_place(kernels, dtype, matrix, residual, s.place);
  const auto backward = [&](TensorView dresidual, TensorView to) {
    kernels.layer_norm_backward_input(gdy.view(), gx.view(), gweight.view(), mean.view(), rstd.view(), dresidual, to);
  };
  backward({}, dx.view());
  backward(gresidual.view(), beside.view());
  backward(in_place.view(), in_place.view());
  Values with_residual = truth.dx, plain_with_residual = plain.dx;
  for (std::size_t i = 0; i < residual.size(); ++i) with_residual[i] += residual[i], plain_with_residual[i] += residual[i];
  expect_close("dx", dx.values(), truth.dx, dtype, same(plain.dx), chain);
  expect_close("dx with residual", beside.values(), with_residual, dtype, same(plain_with_residual), chain);
  expect_close("dx in place", in_place.values(), with_residual, dtype, same(plain_with_residual), chain);
}
TEST_F(CudaNorm, ForwardAndGradientOfTheInputAreTheirDefinitions) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) check_norm(kernels(), dtype, s);
  }
}

// Fewer tokens than a block's warps; several chunks of tokens and tiles of columns, neither full; odd widths and places.
constexpr Size kSumSizes[] = {{3, 8}, {203, 264}, {70, 37}, {133, 48, Place::odd}, {0, 8}};

void check_sums(Kernels& kernels, DType dtype, DType sums, const Size& s) {
  SCOPED_TRACE(fmt::format("{} into {}, {} x {}", name(dtype), name(sums), s.tokens, s.hidden));
  const Shape matrix = {s.tokens, s.hidden};
  const std::int64_t count = s.tokens * s.hidden;
  const Values x = random_numbers(dtype, count, 1), dy = random_numbers(dtype, count, 2),
               weight = random_numbers(dtype, s.hidden, 3), bias = random_numbers(dtype, s.hidden, 4);
  const Norm truth = define<double>(x, weight, bias, dy, weight, bias), plain = define<float>(x, weight, bias, dy, weight, bias);
  const DType statistic = wide(dtype);
  const DeviceTensor gx(kernels, dtype, matrix, x, s.place), gdy(kernels, dtype, matrix, dy, s.place),
      mean(kernels, statistic, {s.tokens}, truth.mean), rstd(kernels, statistic, {s.tokens}, truth.rstd);
  const DeviceTensor dweight(kernels, sums, {s.hidden}, weight), dbias(kernels, sums, {s.hidden}, bias),
      alone(kernels, sums, {s.hidden}, bias, s.place);
  kernels.layer_norm_backward_weight(gdy.view(), gx.view(), mean.view(), rstd.view(), dweight.view(), dbias.view());
  kernels.bias_backward(gdy.view(), alone.view());
  const auto same = [&](const Values& values) { return dtype == DType::f64 ? Values{} : values; };
  const auto chain = static_cast<double>(s.tokens);
  expect_close("dweight", dweight.values(), truth.dweight, sums, same(plain.dweight), chain);
  expect_close("dbias", dbias.values(), truth.dbias, sums, same(plain.dbias), chain);
  expect_close("the bias alone", alone.values(), truth.dbias, sums, same(plain.dbias), chain);
}
TEST_F(CudaNorm, SumsOverTokensAreAddedToWhatIsThere) {
  for (const Size& s : kSumSizes) {
    for (const DType dtype : kDTypes) check_sums(kernels(), dtype, dtype, s);
    check_sums(kernels(), DType::bf16, DType::f32, s);
    check_sums(kernels(), DType::f16, DType::f32, s);
  }
}

/// A mask over rows of `row_elements`, of which the operand has the first tokens * hidden.
struct Mask {
  std::vector<std::int64_t> row_ids;
  std::int64_t tokens, hidden, row_elements;  // tokens of a row
  double probability;
  [[nodiscard]] DropoutSpec spec() const {
    const DropoutKey key{.seed = 0x123456789ABCDEF, .step = 7, .layer = 3, .site = DropoutSite::mlp_residual};
    return {key, probability, row_ids, row_elements};
  }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(row_ids.size()) * tokens * hidden; }
  [[nodiscard]] bool keeps(std::int64_t element) const {
    const std::int64_t per_row = tokens * hidden, row = element / per_row;
    const std::int64_t global = row_ids[static_cast<std::size_t>(row)] * row_elements + element % per_row;
    return probability == 0 || spec().key.word(static_cast<std::uint64_t>(global)) >= dropout_threshold(probability);
  }
};
// Whole Philox blocks; rows apart, of which only a part is here; sizes that cut blocks; far elements; no mask.
const Mask kMasks[] = {{{0, 1}, 5, 24, 120, 0.25}, {{4, 0, 9}, 3, 16, 64, 0.5},      {{3, 5}, 3, 7, 25, 0.3},
                       {{1}, 70, 40, 2801, 0.1},   {{1LL << 33}, 2, 264, 1056, 0.4}, {{2, 3}, 3, 8, 24, 0.0}};

void check_dropout(Kernels& kernels, DType dtype, const Mask& mask, Place place) {
  SCOPED_TRACE(fmt::format("{} {} x {} x {}", name(dtype), mask.row_ids.size(), mask.tokens, mask.hidden));
  const std::int64_t rows = static_cast<std::int64_t>(mask.row_ids.size()) * mask.tokens;
  const Shape matrix = {rows, mask.hidden};
  const Values x = random_numbers(dtype, mask.count(), 1), residual = random_numbers(dtype, mask.count(), 2);
  Values dropped(x.size()), sum(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    dropped[i] = mask.keeps(static_cast<std::int64_t>(i)) ? x[i] / (1.0 - mask.probability) : 0.0;
    sum[i] = dropped[i] + residual[i];
  }
  const DeviceTensor gx(kernels, dtype, matrix, x, place), gresidual(kernels, dtype, matrix, residual, place),
      out(kernels, dtype, matrix, place), alone(kernels, dtype, matrix), over_x(kernels, dtype, matrix, x, place),
      over_residual(kernels, dtype, matrix, residual), dx(kernels, dtype, matrix, x);
  kernels.dropout_residual_forward(mask.spec(), gx.view(), gresidual.view(), out.view());
  kernels.dropout_residual_forward(mask.spec(), gx.view(), {}, alone.view());
  kernels.dropout_residual_forward(mask.spec(), over_x.view(), gresidual.view(), over_x.view());
  kernels.dropout_residual_forward(mask.spec(), gx.view(), over_residual.view(), over_residual.view());
  kernels.dropout_backward(mask.spec(), dx.view(), dx.view());
  for (const DeviceTensor* tensor : {&out, &over_x, &over_residual}) expect_close("sum", tensor->values(), sum, dtype, {}, 2);
  const Values kept = alone.values();
  expect_close("dropout", kept, dropped, dtype, {}, 2);
  for (std::size_t i = 0; i < kept.size(); ++i) ASSERT_EQ(kept[i] == 0.0, dropped[i] == 0.0) << i;
  EXPECT_EQ(dx.bits(), alone.bits());
}
TEST_F(CudaNorm, DropoutKeepsWhatTheGlobalMaskKeeps) {
  for (const DType dtype : kDTypes) {
    for (const Mask& mask : kMasks) check_dropout(kernels(), dtype, mask, Place::aligned);
    check_dropout(kernels(), dtype, kMasks[0], Place::odd);
  }
}

TEST_F(CudaNorm, OnePassOverDropoutResidualAndNormIsTheTwoCalls) {
  for (const DType dtype : kDTypes) {
    for (const Mask& mask : kMasks) {
      SCOPED_TRACE(fmt::format("{} {} x {} x {}", name(dtype), mask.row_ids.size(), mask.tokens, mask.hidden));
      const std::int64_t rows = static_cast<std::int64_t>(mask.row_ids.size()) * mask.tokens, hidden = mask.hidden;
      const Values x = random_numbers(dtype, mask.count(), 1), residual = random_numbers(dtype, mask.count(), 2),
                   weight = random_numbers(dtype, hidden, 3), bias = random_numbers(dtype, hidden, 4);
      const DeviceTensor gweight(kernels(), dtype, {hidden}, weight), gbias(kernels(), dtype, {hidden}, bias);
      const auto run = [&](bool in_one, bool with_residual) {
        const DeviceTensor gx(kernels(), dtype, {rows, hidden}, x), gresidual(kernels(), dtype, {rows, hidden}, residual),
            out(kernels(), dtype, {rows, hidden}), y(kernels(), dtype, {rows, hidden}), mean(kernels(), wide(dtype), {rows}),
            rstd(kernels(), wide(dtype), {rows});
        const TensorView added = with_residual ? gresidual.view() : TensorView{};
        if (in_one) {
          kernels().dropout_residual_norm_forward(mask.spec(), gx.view(), added, out.view(), gweight.view(), gbias.view(),
                                                  kEpsilon, y.view(), mean.view(), rstd.view());
        } else {
          kernels().dropout_residual_forward(mask.spec(), gx.view(), added, out.view());
          kernels().layer_norm_forward(out.view(), gweight.view(), gbias.view(), kEpsilon, y.view(), mean.view(), rstd.view());
        }
        return std::vector<std::vector<std::uint8_t>>{out.bits(), y.bits(), mean.bits(), rstd.bits()};
      };
      EXPECT_EQ(run(true, true), run(false, true));
      EXPECT_EQ(run(true, false), run(false, false));
    }
  }
}

TEST_F(CudaNorm, TheOrderOfThreadsChangesNoBit) {
  const auto run = [](std::uint64_t seed) {
    const auto kernels = try_kernels({.thread_order_seed = seed});
    const std::int64_t tokens = 40, hidden = 1096;
    const DeviceTensor x(*kernels, DType::f32, {tokens, hidden}, random_numbers(DType::f32, tokens * hidden, 1));
    const DeviceTensor weight(*kernels, DType::f32, {hidden}, random_numbers(DType::f32, hidden, 2)),
        y(*kernels, DType::f32, {tokens, hidden}), mean(*kernels, DType::f32, {tokens}), rstd(*kernels, DType::f32, {tokens}),
        sums(*kernels, DType::f32, {hidden}, Values(static_cast<std::size_t>(hidden), 0.0));
    kernels->layer_norm_forward(x.view(), weight.view(), weight.view(), kEpsilon, y.view(), mean.view(), rstd.view());
    kernels->bias_backward(y.view(), sums.view());
    return std::vector<std::vector<std::uint8_t>>{y.bits(), mean.bits(), rstd.bits(), sums.bits()};
  };
  const auto first = run(1);
  EXPECT_EQ(first, run(0));
  EXPECT_EQ(first, run(12345));
}

TEST_F(CudaNorm, ASmallEpsilonShowsWhereTheVarianceIsSmall) {
  constexpr Pitfall kPitfalls[] = {Pitfall::layer_norm_small_epsilon};
  const auto mistaken = try_kernels({.pitfalls = PitfallSet(kPitfalls)});
  for (Kernels* used : {&kernels(), mistaken.get()}) {
    const DeviceTensor x(*used, DType::f32, {1, 4}, {1e-3, -1e-3, 1e-3, -1e-3}), one(*used, DType::f32, {4}, {1, 1, 1, 1}),
        y(*used, DType::f32, {1, 4}), mean(*used, DType::f32, {1}), rstd(*used, DType::f32, {1});
    used->layer_norm_forward(x.view(), one.view(), one.view(), 1e-5, y.view(), mean.view(), rstd.view());
    const double epsilon = used == mistaken.get() ? 1e-6 : 1e-5;
    EXPECT_NEAR(rstd.values()[0], 1 / std::sqrt(1e-6 + epsilon), 1e-3);
  }
}

TEST_F(CudaNorm, RefusesOtherShapesBeforeAnythingIsLaunched) {
  const DeviceTensor x(kernels(), DType::f32, {3, 8}), y(kernels(), DType::f32, {3, 8}), narrow(kernels(), DType::bf16, {3, 8}),
      weight(kernels(), DType::f32, {8}), statistic(kernels(), DType::f32, {3}), two(kernels(), DType::f32, {2});
  const auto forward = [&](const DeviceTensor& from, const DeviceTensor& mean) {
    kernels().layer_norm_forward(from.view(), weight.view(), weight.view(), kEpsilon, y.view(), mean.view(), statistic.view());
  };
  EXPECT_NO_THROW(forward(x, statistic));
  EXPECT_THROW(forward(narrow, statistic), ContractError);
  EXPECT_THROW(forward(x, two), ContractError);
  EXPECT_THROW(kernels().bias_backward(x.view(), two.view()), ContractError);
  const std::vector<std::int64_t> ids = {0, 1};
  const DropoutSpec spec{{}, 0.5, ids, 12};
  EXPECT_NO_THROW(kernels().dropout_residual_forward(spec, x.view(), {}, y.view()));
  EXPECT_THROW(kernels().dropout_residual_forward(spec, x.view(), {}, narrow.view()), ContractError);
  EXPECT_THROW(kernels().dropout_residual_forward({{}, 0.5, ids, 11}, x.view(), {}, y.view()), ContractError);
  kernels().synchronize();
}

}  // namespace
}  // namespace tandem::device_test
