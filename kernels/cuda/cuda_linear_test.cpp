// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/cuda/device_test_support.h"
#include "reference/ops.h"

namespace tandem::device_test {
namespace {

struct Size {
  std::int64_t tokens, in, out;
};
// One, odd, aligned to sixteen bytes, and long sums.
const std::vector<Size> kSizes = {{1, 1, 1}, {7, 13, 17}, {37, 64, 48}, {130, 67, 131}, {523, 24, 40}};
constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

using Numbers = std::vector<double>;

Numbers transposed(const Numbers& values, std::int64_t rows, std::int64_t columns) {
  Numbers result(values.size());
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    result[static_cast<std::size_t>(i % columns * rows + i / columns)] = values[static_cast<std::size_t>(i)];
  }
  return result;
}

/// Of numbers that the tensors hold: y, dx, and what dw and db become that were w and b.
struct Outputs {
  Numbers y, gelu, dx, dw, db;
};
template <class Real>
Outputs reference_linear(const Size& s, const Numbers& x_in, const Numbers& w_in, const Numbers& b_in, const Numbers& dy_in) {
  const auto x = as<Real>(x_in), w = as<Real>(w_in), b = as<Real>(b_in), dy = as<Real>(dy_in);
  const reference::LinearSize size{s.tokens, s.in, s.out};
  std::vector<Real> y(dy.size()), gelu(dy.size()), dx(x.size()), dw = w, db = b;
  reference::linear_forward<Real>(size, x, w, b, y);
  reference::gelu_forward<Real>(y, gelu);
  reference::linear_backward<Real>(size, x, w, dy, dx, dw, db);
  return {as_doubles(y), as_doubles(gelu), as_doubles(dx), as_doubles(dw), as_doubles(db)};
}

/// y is gelu of x W + b, of the number as it was rounded or as it was before; with 16 bits by a tanh that is good to 2^-11.
void expect_gelu(const Numbers& got, const Outputs& truth, DType dtype, const Numbers& same_precision, double chain) {
  if (!is_16bit(dtype)) return expect_close("gelu", got, truth.gelu, dtype, same_precision, chain);
  const auto gelu = [](double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); };
  const double u = unit_roundoff(dtype);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double x = truth.y[i], reach = u * std::fabs(x) * 1.01 + 1e-5;
    const double moved = std::max(std::fabs(gelu(x + reach) - gelu(x)), std::fabs(gelu(x - reach) - gelu(x)));
    ASSERT_TRUE(std::fabs(got[i] - truth.gelu[i]) <= 1.01 * u * std::fabs(truth.gelu[i]) + moved + 0x1p-12 * std::fabs(x))
        << "element " << i << " is " << got[i] << ", expected " << truth.gelu[i];
  }
}

class CudaLinear : public DeviceTest {
 protected:
  void check(const Size& s, DType dtype, DType accumulator, Place place);
};

void CudaLinear::check(const Size& s, DType dtype, DType accumulator, Place place) {
  SCOPED_TRACE(fmt::format("{} x {} x {} of {} to {}", s.tokens, s.in, s.out, name(dtype), name(accumulator)));
  const auto x = random_numbers(dtype, s.tokens * s.in, 1), w = random_numbers(dtype, s.in * s.out, 2, 0.2);
  const auto b = random_numbers(dtype, s.out, 3), dy = random_numbers(dtype, s.tokens * s.out, 4);
  const DeviceTensor gx(kernels(), dtype, {s.tokens, s.in}, x, place), gw(kernels(), dtype, {s.in, s.out}, w, place);
  const DeviceTensor gb(kernels(), dtype, {s.out}, b, place), gdy(kernels(), dtype, {s.tokens, s.out}, dy, place);
  const DeviceTensor y(kernels(), dtype, {s.tokens, s.out}, place), pre(kernels(), dtype, {s.tokens, s.out}, place);
  const DeviceTensor gelu(kernels(), dtype, {s.tokens, s.out}, place), dx(kernels(), dtype, {s.tokens, s.in}, place);
  const DeviceTensor dw(kernels(), accumulator, {s.in, s.out}, w, place), db(kernels(), accumulator, {s.out}, b, place);

  kernels().linear_forward(gx.view(), gw.view(), gb.view(), y.view());
  kernels().linear_gelu_forward(gx.view(), gw.view(), gb.view(), pre.view(), gelu.view());
  kernels().linear_backward_input(gdy.view(), gw.view(), dx.view());
  kernels().linear_backward_weight(gx.view(), gdy.view(), dw.view(), db.view());

  const Outputs truth = reference_linear<double>(s, x, w, b, dy);
  const Outputs single = dtype == DType::f64 ? Outputs() : reference_linear<float>(s, x, w, b, dy);
  const auto chain = static_cast<double>(std::max({s.tokens, s.in, s.out}));
  expect_close("y", y.values(), truth.y, dtype, single.y, chain);
  expect_close("y before gelu", pre.values(), truth.y, dtype, single.y, chain);
  expect_gelu(gelu.values(), truth, dtype, single.gelu, chain);
  expect_close("dx", dx.values(), truth.dx, dtype, single.dx, chain);
  expect_close("dweight", dw.values(), truth.dw, accumulator, single.dw, chain);
  expect_close("dbias", db.values(), truth.db, accumulator, single.db, chain);
}

TEST_F(CudaLinear, SmallShapesAreTheDefinition) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) check(s, dtype, dtype, Place::aligned);
    check({33, 20, 12}, dtype, dtype, Place::odd);
  }
}

TEST_F(CudaLinear, HalvesAreAccumulatedInSingle) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check({130, 67, 131}, dtype, DType::f32, Place::aligned);
    check({33, 20, 12}, dtype, DType::f32, Place::odd);
  }
}

TEST_F(CudaLinear, TheHeadIsTheDefinition) {
  const Size s = {65, 24, 101};  // tokens, hidden, vocabulary
  for (const DType dtype : kDTypes) {
    SCOPED_TRACE(name(dtype));
    const auto x = random_numbers(dtype, s.tokens * s.in, 5), table = random_numbers(dtype, s.out * s.in, 6, 0.2);
    const auto dlogits = random_numbers(dtype, s.tokens * s.out, 7);
    const Outputs truth = reference_linear<double>(s, x, transposed(table, s.out, s.in), Numbers(101, 0.0), dlogits);
    const Outputs single = reference_linear<float>(s, x, transposed(table, s.out, s.in), Numbers(101, 0.0), dlogits);
    const DeviceTensor gx(kernels(), dtype, {s.tokens, s.in}, x), gtable(kernels(), dtype, {s.out, s.in}, table);
    const DeviceTensor gdlogits(kernels(), dtype, {s.tokens, s.out}, dlogits);
    const DeviceTensor logits(kernels(), dtype, {s.tokens, s.out}), dx(kernels(), dtype, {s.tokens, s.in});
    const DeviceTensor dtable(kernels(), dtype, {s.out, s.in}, table);
    const DeviceTensor wide_table(kernels(), wide(dtype), {s.out, s.in}, table);

    kernels().head_forward(gx.view(), gtable.view(), logits.view());
    kernels().head_backward_input(gdlogits.view(), gtable.view(), dx.view());
    kernels().head_backward_weight(gx.view(), gdlogits.view(), dtable.view());
    kernels().head_backward_weight(gx.view(), gdlogits.view(), wide_table.view());

    const bool f64 = dtype == DType::f64;
    const double chain = 101;
    expect_close("logits", logits.values(), truth.y, dtype, f64 ? Numbers() : single.y, chain);
    expect_close("dx", dx.values(), truth.dx, dtype, f64 ? Numbers() : single.dx, chain);
    const Numbers dtable_truth = transposed(truth.dw, s.in, s.out), dtable_single = transposed(single.dw, s.in, s.out);
    expect_close("dembedding", dtable.values(), dtable_truth, dtype, f64 ? Numbers() : dtable_single, chain);
    expect_close("wide dembedding", wide_table.values(), dtable_truth, wide(dtype), f64 ? Numbers() : dtable_single, chain);
  }
}

TEST_F(CudaLinear, RouterLogitsOfHalvesAreSingle) {
  const Size s = {19, 40, 6};
  const auto x = random_numbers(DType::bf16, s.tokens * s.in, 1), w = random_numbers(DType::bf16, s.in * s.out, 2, 0.2);
  const auto b = random_numbers(DType::bf16, s.out, 3), dy = random_numbers(DType::f32, s.tokens * s.out, 4);
  const DeviceTensor gx(kernels(), DType::bf16, {s.tokens, s.in}, x), gw(kernels(), DType::bf16, {s.in, s.out}, w);
  const DeviceTensor gb(kernels(), DType::bf16, {s.out}, b);
  const DeviceTensor y(kernels(), DType::f32, {s.tokens, s.out}), plain(kernels(), DType::f32, {s.tokens, s.out});
  kernels().linear_forward(gx.view(), gw.view(), gb.view(), y.view());
  kernels().linear_forward(gx.view(), gw.view(), {}, plain.view());

  const auto truth = reference_linear<double>(s, x, w, b, dy).y;
  expect_close("y", y.values(), truth, DType::f32, reference_linear<float>(s, x, w, b, dy).y, 40);
  const auto without = reference_linear<double>(s, x, w, Numbers(6, 0.0), dy).y;
  expect_close("y without bias", plain.values(), without, DType::f32, {}, 40);
}

TEST_F(CudaLinear, AutocastRoundsOperandsAndNothingElse) {
  const auto autocast = try_kernels({.products = DType::bf16});
  const Size s = {70, 33, 50};
  const auto x = random_numbers(DType::f32, s.tokens * s.in, 1), w = random_numbers(DType::f32, s.in * s.out, 2, 0.2);
  const auto b = random_numbers(DType::f32, s.out, 3), dy = random_numbers(DType::f32, s.tokens * s.out, 4);
  const auto halved = [](Numbers values) {
    for (double& value : values) value = rounded_to(value, DType::bf16);
    return values;
  };
  const DeviceTensor gx(*autocast, DType::f32, {s.tokens, s.in}, x), gw(*autocast, DType::f32, {s.in, s.out}, w);
  const DeviceTensor gb(*autocast, DType::f32, {s.out}, b), gdy(*autocast, DType::f32, {s.tokens, s.out}, dy);
  const DeviceTensor pre(*autocast, DType::f32, {s.tokens, s.out}), gelu(*autocast, DType::f32, {s.tokens, s.out});
  const DeviceTensor dx(*autocast, DType::f32, {s.tokens, s.in}), dw(*autocast, DType::f32, {s.in, s.out}, w);
  const DeviceTensor db(*autocast, DType::f32, {s.out}, b);

  autocast->linear_gelu_forward(gx.view(), gw.view(), gb.view(), pre.view(), gelu.view());
  autocast->linear_backward_input(gdy.view(), gw.view(), dx.view());
  autocast->linear_backward_weight(gx.view(), gdy.view(), dw.view(), db.view());

  const Outputs truth = reference_linear<double>(s, halved(x), halved(w), b, halved(dy));
  expect_close("y before gelu", pre.values(), truth.y, DType::f32, {}, 70);
  expect_close("gelu", gelu.values(), truth.gelu, DType::f32, {}, 70);
  expect_close("dx", dx.values(), truth.dx, DType::f32, {}, 70);
  Numbers dw_truth = truth.dw;  // what is accumulated into is not rounded
  for (std::size_t i = 0; i < w.size(); ++i) dw_truth[i] += w[i] - rounded_to(w[i], DType::bf16);
  expect_close("dweight", dw.values(), dw_truth, DType::f32, {}, 70);
  expect_close("dbias", db.values(), reference_linear<double>(s, x, w, b, dy).db, DType::f32, {}, 70);
}

TEST_F(CudaLinear, ErfIsSeen) {
  constexpr Pitfall kPitfall[] = {Pitfall::gelu_with_erf};
  const auto erf = try_kernels({.pitfalls = PitfallSet(kPitfall)});
  const DeviceTensor x(*erf, DType::f32, {1, 1}, {1.0}), w(*erf, DType::f32, {1, 1}, {-2.0}), b(*erf, DType::f32, {1}, {0.0});
  const DeviceTensor pre(*erf, DType::f32, {1, 1}), y(*erf, DType::f32, {1, 1});
  erf->linear_gelu_forward(x.view(), w.view(), b.view(), pre.view(), y.view());
  EXPECT_NEAR(y.values()[0], -2.0 * 0.5 * (1 + std::erf(-2.0 / std::sqrt(2.0))), 1e-6);
  EXPECT_EQ(pre.values()[0], -2.0);
}

TEST_F(CudaLinear, NoTokensLeaveGradientsAndWrongShapesAreRefused) {
  const DeviceTensor w(kernels(), DType::f32, {3, 2}, Numbers(6, 1.0)), b(kernels(), DType::f32, {2}, Numbers(2, 1.0));
  const TensorView none(w.view().data(), DType::f32, {0, 3}), none_out(w.view().data(), DType::f32, {0, 2});
  kernels().linear_forward(none, w.view(), b.view(), none_out);
  kernels().linear_backward_weight(none, none_out, w.view(), b.view());
  EXPECT_EQ(w.values(), Numbers(6, 1.0));
  EXPECT_EQ(b.values(), Numbers(2, 1.0));

  const DeviceTensor x(kernels(), DType::f32, {4, 3}), y(kernels(), DType::f32, {4, 2}), wrong(kernels(), DType::f32, {4, 4});
  const DeviceTensor half(kernels(), DType::bf16, {4, 2});
  EXPECT_THROW(kernels().linear_forward(wrong.view(), w.view(), b.view(), y.view()), ContractError);
  EXPECT_THROW(kernels().linear_forward(x.view(), w.view(), b.view(), half.view()), ContractError);
  EXPECT_THROW(kernels().linear_forward(x.view(), w.view(), b.view(), wrong.view()), ContractError);
  EXPECT_THROW(kernels().linear_backward_input(y.view(), w.view(), wrong.view()), ContractError);
}

}  // namespace
}  // namespace tandem::device_test
