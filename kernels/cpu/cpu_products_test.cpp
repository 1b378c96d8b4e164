// SPDX-License-Identifier: Apache-2.0
// Linear layers and the head on 16-bit tensors, and with operands rounded on their way (autocast).
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/cpu/narrow_test_support.h"

namespace tandem::cpu {
namespace {

struct Size {
  std::int64_t tokens, in, out;
};
// None, one, primes, less than a register, several blocks in both directions, and sums longer than what is converted at a time.
const std::vector<Size> kSizes = {{0, 5, 3},      {1, 1, 1},      {7, 13, 17},    {5, 3, 257},
                                  {19, 1031, 16}, {523, 67, 263}, {67, 257, 811}, {1031, 29, 37}};

struct Variant {
  std::string instruction_set, matrix_library;
  DType storage = DType::bf16;
  DType products = DType::f32;
  DType sums = DType::f32;  // what gradients of parameters are accumulated in
};

std::string variant_name(const testing::TestParamInfo<Variant>& test) {
  const Variant& v = test.param;
  const std::string precision = v.storage == DType::f32 ? fmt::format("autocast_{}", name(v.products))
                                                        : fmt::format("{}_into_{}", name(v.storage), name(v.sums));
  return fmt::format("{}_{}_{}", v.instruction_set, v.matrix_library, precision);
}

class Products : public testing::TestWithParam<Variant> {
 protected:
  [[nodiscard]] CpuKernelsOptions options() const {
    return {.products = GetParam().products,
            .instruction_set = GetParam().instruction_set,
            .matrix_library = GetParam().matrix_library};
  }
  /// Values of the storage's dtype, as the product sees them: autocast rounds them once more.
  [[nodiscard]] std::vector<double> seen(std::vector<double> values) const {
    if (GetParam().storage != DType::f32) return values;
    for (double& value : values) value = static_cast<double>(round_to(static_cast<float>(value), GetParam().products));
    return values;
  }
  [[nodiscard]] std::vector<double> random(std::int64_t count, std::uint64_t seed, double stddev = 1.0) const {
    return rounded_values(GetParam().storage, count, seed, stddev);
  }
};

/// A matrix in double: element (i, j) is values[i * row + j * column]; without values it is zero.
struct Matrix {
  const double* values = nullptr;
  std::int64_t row = 0, column = 0;
  double operator()(std::int64_t i, std::int64_t j) const { return values == nullptr ? 0.0 : values[i * row + j * column]; }
};
Matrix row_major(const std::vector<double>& values, std::int64_t columns) { return {values.data(), columns, 1}; }
Matrix transposed(const std::vector<double>& values, std::int64_t columns) { return {values.data(), 1, columns}; }
Matrix every_row(const std::vector<double>& values) { return {values.data(), 0, 1}; }

/// start + a b, in double. The error of such a sum in fp32, in any order: one roundoff for each of its additions, and for adding
/// the start, of the sum of sizes.
Expected product(std::int64_t m, std::int64_t n, std::int64_t k, const Matrix& a, const Matrix& b, const Matrix& start) {
  Expected result;
  std::vector<double> sum(static_cast<std::size_t>(n)), size(sum.size());
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      sum[static_cast<std::size_t>(j)] = start(i, j);
      size[static_cast<std::size_t>(j)] = std::fabs(start(i, j));
    }
    for (std::int64_t p = 0; p < k; ++p) {
      for (std::int64_t j = 0; j < n; ++j) {
        const double term = a(i, p) * b(p, j);
        sum[static_cast<std::size_t>(j)] += term;
        size[static_cast<std::size_t>(j)] += std::fabs(term);
      }
    }
    result.values.insert(result.values.end(), sum.begin(), sum.end());
    for (const double s : size) result.arithmetic_error.push_back(static_cast<double>(k + 1) * unit_roundoff(DType::f32) * s);
  }
  return result;
}

TEST_P(Products, LinearLayersMatchTheDefinition) {
  const DType d = GetParam().storage, sums = GetParam().sums;
  for (const Size& s : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", s.tokens, s.in, s.out));
    const auto x = random(s.tokens * s.in, 1), w = random(s.in * s.out, 2, 0.2), b = random(s.out, 3);
    const auto dy = random(s.tokens * s.out, 4);
    const auto dw = rounded_values(sums, s.in * s.out, 5, 3.0), db = rounded_values(sums, s.out, 6, 3.0);
    const auto got = same_with_any_threads(options(), [&](Kernels& kernels) -> Outputs<double> {
      StoredTensor gx(d, {s.tokens, s.in}, x), gw(d, {s.in, s.out}, w), gb(d, {s.out}, b), gdy(d, {s.tokens, s.out}, dy);
      StoredTensor y(d, {s.tokens, s.out}), before(d, {s.tokens, s.out}), after(d, {s.tokens, s.out}),
          again(d, {s.tokens, s.out});
      StoredTensor dx(d, {s.tokens, s.in}), gdw(sums, {s.in, s.out}, dw), gdb(sums, {s.out}, db);
      kernels.linear_forward(gx.view(), gw.view(), gb.view(), y.view());
      kernels.linear_gelu_forward(gx.view(), gw.view(), gb.view(), before.view(), after.view());
      kernels.gelu_forward(before.view(), again.view());
      kernels.linear_backward_input(gdy.view(), gw.view(), dx.view());
      kernels.linear_backward_weight(gx.view(), gdy.view(), gdw.view(), gdb.view());
      EXPECT_TRUE(same_bits<double>({y.values(), after.values()}, {before.values(), again.values()}));
      return {y.values(), dx.values(), gdw.values(), gdb.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const auto sx = seen(x), sw = seen(w), sdy = seen(dy);
    const double one = 1.0;
    expect_stored(got[0], product(s.tokens, s.out, s.in, row_major(sx, s.in), row_major(sw, s.out), every_row(b)), d, "y");
    expect_stored(got[1], product(s.tokens, s.in, s.out, row_major(sdy, s.out), transposed(sw, s.out), {}), d, "dx");
    expect_stored(got[2], product(s.in, s.out, s.tokens, transposed(sx, s.in), row_major(sdy, s.out), row_major(dw, s.out)), sums,
                  "dweight");
    expect_stored(got[3], product(1, s.out, s.tokens, Matrix{&one, 0, 0}, row_major(dy, s.out), row_major(db, s.out)), sums,
                  "dbias");
  }
}

TEST_P(Products, TheHeadMatchesTheDefinition) {
  const DType d = GetParam().storage, sums = GetParam().sums;
  for (const Size& s : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", s.tokens, s.in, s.out));
    const auto x = random(s.tokens * s.in, 1), table = random(s.in * s.out, 2, 0.2), dlogits = random(s.tokens * s.out, 4);
    const auto dtable = rounded_values(sums, s.in * s.out, 5, 3.0);
    const auto got = same_with_any_threads(options(), [&](Kernels& kernels) -> Outputs<double> {
      StoredTensor gx(d, {s.tokens, s.in}, x), gt(d, {s.out, s.in}, table), gdl(d, {s.tokens, s.out}, dlogits);
      StoredTensor logits(d, {s.tokens, s.out}), dx(d, {s.tokens, s.in}), gdt(sums, {s.out, s.in}, dtable);
      kernels.head_forward(gx.view(), gt.view(), logits.view());
      kernels.head_backward_input(gdl.view(), gt.view(), dx.view());
      kernels.head_backward_weight(gx.view(), gdl.view(), gdt.view());
      return {logits.values(), dx.values(), gdt.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const auto sx = seen(x), st = seen(table), sdl = seen(dlogits);
    expect_stored(got[0], product(s.tokens, s.out, s.in, row_major(sx, s.in), transposed(st, s.in), {}), d, "logits");
    expect_stored(got[1], product(s.tokens, s.in, s.out, row_major(sdl, s.out), row_major(st, s.in), {}), d, "dx");
    expect_stored(got[2], product(s.out, s.in, s.tokens, transposed(sdl, s.out), row_major(sx, s.in), row_major(dtable, s.in)),
                  sums, "dembedding");
  }
}

TEST_P(Products, WithoutBiasAndIntoFp32ItIsThePlainProduct) {
  const DType d = GetParam().storage;
  const auto got = same_with_any_threads(options(), [&](Kernels& kernels) -> Outputs<double> {
    // The results are exact in fp32, and no 16-bit numbers.
    StoredTensor x(d, {2, 2}, {1, 256, 3, 4}), w(d, {2, 1}, {5, 63.25}), y(DType::f32, {2, 1});
    kernels.linear_forward(x.view(), w.view(), {}, y.view());
    return {y.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  EXPECT_EQ(got[0], (std::vector<double>{5 + 256 * 63.25, 15 + 253}));
}

TEST_P(Products, WhatIsNotFiniteReachesTheOutputsThatDependOnIt) {
  const DType d = GetParam().storage;
  constexpr std::int64_t kTokens = 19, kIn = 23, kOut = 29;
  for (const double poison : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    auto x = random(kTokens * kIn, 1);
    x[5 * kIn + 3] = poison;
    const auto got = same_with_any_threads(options(), [&](Kernels& kernels) -> Outputs<double> {
      StoredTensor gx(d, {kTokens, kIn}, x), w(d, {kIn, kOut}, random(kIn * kOut, 2)), b(d, {kOut}, random(kOut, 3));
      StoredTensor y(d, {kTokens, kOut});
      kernels.linear_forward(gx.view(), w.view(), b.view(), y.view());
      return {y.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";
    for (std::int64_t i = 0; i < kTokens * kOut; ++i) {
      EXPECT_EQ(std::isfinite(got[0][static_cast<std::size_t>(i)]), i / kOut != 5) << "element " << i;
    }
  }
}

std::vector<Variant> variants() {
  using enum DType;
  std::vector<Variant> result;
  for (const auto& [set, library] : {std::pair<std::string, std::string>{"avx512", "onednn"}, {"avx2", "own"}}) {
    for (const DType narrow : {bf16, f16}) {
      result.push_back({set, library, narrow, f32, f32});
      result.push_back({set, library, narrow, f32, narrow});
      result.push_back({set, library, f32, narrow, f32});
    }
  }
  result.push_back({"avx2", "onednn", bf16, f32, f32});
  result.push_back({"avx512", "openblas", bf16, f32, bf16});
  result.push_back({"avx512", "openblas", f32, bf16, f32});
  result.push_back({"baseline", "own", f16, f32, f32});
  return result;
}

INSTANTIATE_TEST_SUITE_P(Variants, Products, testing::ValuesIn(variants()), variant_name);

TEST(ProductsOfBf16, AreRoundedOnceFromTheSumWithTheBias) {
  // 1 + 2^-8 is halfway between bf16 numbers: a bias of 2^-20 decides, which rounding before the bias would lose.
  for (const char* library : {"onednn", "own"}) {
    const auto kernels = try_kernels(1, "auto", library);
    if (kernels == nullptr) continue;
    StoredTensor x(DType::bf16, {1, 2}, {1, 0x1p-8}), w(DType::bf16, {2, 2}, {1, 1, 1, 1}),
        b(DType::bf16, {2}, {0x1p-20, -0x1p-20});
    StoredTensor y(DType::bf16, {1, 2});
    kernels->linear_forward(x.view(), w.view(), b.view(), y.view());
    EXPECT_EQ(y.values(), (std::vector<double>{1 + 0x1p-7, 1})) << library;
  }
}

TEST(ProductsOfBf16, SaysWhatComputesThem) {
  const auto own = try_kernels(1, "auto", "own");
  EXPECT_EQ(own->info().bf16_products, "converted to fp32");
  const auto narrow = try_kernels(1, "baseline");
  EXPECT_EQ(narrow->info().bf16_products, "converted to fp32");
  const auto best = try_kernels(1, "auto");
  EXPECT_TRUE(best->info().bf16_products == "converted to fp32" ||
              best->info().bf16_products.starts_with(best->info().matrix_library.substr(0, 6)))
      << best->info().bf16_products;
}

TEST(ProductsOfBf16, RefuseMixedOperandsAndUnknownDtypes) {
  const auto kernels = try_kernels(1, "auto");
  StoredTensor x(DType::bf16, {2, 3}), w(DType::f16, {3, 4}), y(DType::bf16, {2, 4}), dw(DType::f16, {3, 4});
  EXPECT_THROW(kernels->linear_forward(x.view(), w.view(), {}, y.view()), ContractError);
  EXPECT_THROW(kernels->linear_backward_weight(x.view(), y.view(), dw.view(), {}), ContractError);
  EXPECT_THROW((void)make_cpu_kernels({.products = DType::f64}), InputError);
}

}  // namespace
}  // namespace tandem::cpu
