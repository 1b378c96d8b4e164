// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/test_support.h"
#include "reference/ops.h"

namespace tandem::cpu {
namespace {

struct Size {
  std::int64_t tokens, in, out;
};
// Primes, one, less than a register, several blocks in both directions, and long sums.
const std::vector<Size> kSizes = {{0, 5, 3},      {1, 1, 1},      {7, 13, 17},    {5, 3, 257},     {37, 64, 48},
                                  {301, 67, 331}, {67, 331, 307}, {16, 1031, 16}, {523, 131, 263}, {67, 257, 811}};

using Variant = std::tuple<std::string, std::string>;  // instruction set, matrix library

class Linear : public testing::TestWithParam<Variant> {
 protected:
  [[nodiscard]] std::string set() const { return std::get<0>(GetParam()); }
  [[nodiscard]] std::string library() const { return std::get<1>(GetParam()); }

  template <class Real>
  void check_linear();
  template <class Real>
  void check_head();
};

template <class Real>
Outputs<Real> reference_linear(const Size& s, const std::vector<Real>& x, const std::vector<Real>& w, const std::vector<Real>& b,
                               const std::vector<Real>& dy) {
  const reference::LinearSize size{s.tokens, s.in, s.out};
  std::vector<Real> y(dy.size()), gelu(dy.size()), dx(x.size()), dw = w, db = b;
  reference::linear_forward<Real>(size, x, w, b, y);
  reference::gelu_forward<Real>(y, gelu);
  reference::linear_backward<Real>(size, x, w, dy, dx, dw, db);
  return {y, gelu, dx, dw, db};
}

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values) {
  return {values.begin(), values.end()};
}

template <class Real>
void Linear::check_linear() {
  for (const Size& s : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", s.tokens, s.in, s.out));
    const auto x = random_values<Real>(s.tokens * s.in, 1), w = random_values<Real>(s.in * s.out, 2, 0.2);
    const auto b = random_values<Real>(s.out, 3), dy = random_values<Real>(s.tokens * s.out, 4);
    const auto got = with_any_threads<Real>(set(), library(), [&](Kernels& kernels) -> Outputs<Real> {
      Guarded<Real> gx({s.tokens, s.in}, x), gw({s.in, s.out}, w), gb({s.out}, b), gdy({s.tokens, s.out}, dy);
      Guarded<Real> y({s.tokens, s.out}), plain({s.tokens, s.out}), gelu({s.tokens, s.out}), dx({s.tokens, s.in});
      Guarded<Real> dw({s.in, s.out}, w), db({s.out}, b);  // they accumulate: start from something
      kernels.linear_forward(gx.view(), gw.view(), gb.view(), y.view());
      kernels.linear_gelu_forward(gx.view(), gw.view(), gb.view(), plain.view(), gelu.view());
      kernels.linear_backward_input(gdy.view(), gw.view(), dx.view());
      kernels.linear_backward_weight(gx.view(), gdy.view(), dw.view(), db.view());
      EXPECT_TRUE(same_bits<Real>({y.values()}, {plain.values()}));
      return {y.values(), gelu.values(), dx.values(), dw.values(), db.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const auto truth =
        reference_linear<double>(s, converted<double>(x), converted<double>(w), converted<double>(b), converted<double>(dy));
    expect_close<Real>(got, truth, reference_linear<Real>(s, x, w, b, dy),
                       static_cast<double>(std::max({s.tokens, s.in, s.out})));
  }
}

template <class Real>
Outputs<Real> reference_head(const Size& s, const std::vector<Real>& x, const std::vector<Real>& table,
                             const std::vector<Real>& dlogits) {
  const reference::LinearSize size{s.tokens, s.in, s.out};
  std::vector<Real> logits(dlogits.size()), dx(x.size()), dtable = table;
  reference::head_forward<Real>(size, x, table, logits);
  reference::head_backward<Real>(size, x, table, dlogits, dx, dtable);
  return {logits, dx, dtable};
}

template <class Real>
void Linear::check_head() {
  for (const Size& s : kSizes) {
    SCOPED_TRACE(fmt::format("{} x {} x {}", s.tokens, s.in, s.out));
    const auto x = random_values<Real>(s.tokens * s.in, 5), table = random_values<Real>(s.in * s.out, 6, 0.2);
    const auto dlogits = random_values<Real>(s.tokens * s.out, 7);
    const auto got = with_any_threads<Real>(set(), library(), [&](Kernels& kernels) -> Outputs<Real> {
      Guarded<Real> gx({s.tokens, s.in}, x), gt({s.out, s.in}, table), gdl({s.tokens, s.out}, dlogits);
      Guarded<Real> logits({s.tokens, s.out}), dx({s.tokens, s.in}), dtable({s.out, s.in}, table);
      kernels.head_forward(gx.view(), gt.view(), logits.view());
      kernels.head_backward_input(gdl.view(), gt.view(), dx.view());
      kernels.head_backward_weight(gx.view(), gdl.view(), dtable.view());
      return {logits.values(), dx.values(), dtable.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";

    const auto truth = reference_head<double>(s, converted<double>(x), converted<double>(table), converted<double>(dlogits));
    expect_close<Real>(got, truth, reference_head<Real>(s, x, table, dlogits),
                       static_cast<double>(std::max({s.tokens, s.in, s.out})));
  }
}

TEST_P(Linear, MatchesTheDefinitionInSingle) { check_linear<float>(); }
TEST_P(Linear, MatchesTheDefinitionInDouble) { check_linear<double>(); }
TEST_P(Linear, HeadMatchesTheDefinitionInSingle) { check_head<float>(); }
TEST_P(Linear, HeadMatchesTheDefinitionInDouble) { check_head<double>(); }

TEST_P(Linear, WithoutBiasIsThePlainProduct) {
  const auto kernels = try_kernels(2, set(), library());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  Guarded<float> x({2, 2}, {1, 2, 3, 4}), w({2, 1}, {5, 7}), y({2, 1}), dw({2, 1}, {100, 200});

  kernels->linear_forward(x.view(), w.view(), {}, y.view());
  kernels->linear_backward_weight(x.view(), y.view(), dw.view(), {});

  EXPECT_EQ(y.values(), (std::vector<float>{19, 43}));
  EXPECT_EQ(dw.values(), (std::vector<float>{100 + 19 + 129, 200 + 38 + 172}));
}

TEST_P(Linear, NanReachesEveryOutputThatDependsOnIt) {
  const auto kernels = try_kernels(2, set(), library());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  constexpr std::int64_t kTokens = 19, kIn = 23, kOut = 29;
  auto values = random_values<float>(kTokens * kIn, 1);
  values[5 * kIn + 3] = std::numeric_limits<float>::quiet_NaN();
  Guarded<float> x({kTokens, kIn}, values), w({kIn, kOut}, random_values<float>(kIn * kOut, 2)),
      b({kOut}, random_values<float>(kOut, 3));
  Guarded<float> before({kTokens, kOut}), after({kTokens, kOut});

  kernels->linear_gelu_forward(x.view(), w.view(), b.view(), before.view(), after.view());

  const auto got = after.values();
  for (std::int64_t i = 0; i < kTokens * kOut; ++i) {
    EXPECT_EQ(std::isnan(got[static_cast<std::size_t>(i)]), i / kOut == 5) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, Linear,
                         testing::Values(Variant{"avx512", "onednn"}, Variant{"avx2", "openblas"}, Variant{"avx512", "own"},
                                         Variant{"avx2", "own"}, Variant{"baseline", "own"}),
                         [](const auto& test) { return std::get<0>(test.param) + "_" + std::get<1>(test.param); });

TEST(BlockGrid, CoversEveryElementOnce) {
  for (const auto& [m, n, k] :
       {std::array<std::int64_t, 3>{1, 1, 1}, {523, 131, 4000}, {1024, 3072, 768}, {256, 50257, 768}, {777, 1, 9999}}) {
    const BlockGrid grid = block_grid(m, n, k);
    std::vector<int> covered(static_cast<std::size_t>(m * n));
    for (std::int64_t i = 0; i < grid.down * grid.across; ++i) {
      const Block block = block_at(grid, m, n, i);
      for (std::int64_t r = block.row; r < block.row + block.rows; ++r) {
        for (std::int64_t c = block.column; c < block.column + block.columns; ++c) ++covered[static_cast<std::size_t>(r * n + c)];
      }
    }
    EXPECT_TRUE(std::all_of(covered.begin(), covered.end(), [](int times) { return times == 1; })) << m << " x " << n;
  }
}

}  // namespace
}  // namespace tandem::cpu
