// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/cpu/test_support.h"

namespace tandem::cpu {
namespace {

class Rows : public testing::TestWithParam<const char*> {};

struct Sizes {
  std::int64_t tokens, table, width;
};
const std::vector<Sizes> kSizes = {{0, 3, 5}, {1, 1, 1}, {9, 4, 7}, {131, 17, 301}, {70, 200, 768}, {5, 0, 6}};

/// Every third index negative; repeated ones among the others.
std::vector<std::int32_t> make_ids(const Sizes& s) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    ids.push_back(t % 3 == 1 || s.table == 0 ? -1 - static_cast<std::int32_t>(t) : static_cast<std::int32_t>(t * t % s.table));
  }
  return ids;
}

template <class Real>
void check_gather(const char* set, const Sizes& s) {
  SCOPED_TRACE(fmt::format("{} of {} x {}", s.tokens, s.table, s.width));
  const std::vector<std::int32_t> ids = make_ids(s);
  const auto table = random_values<Real>(s.table * s.width, 1), x = random_values<Real>(s.tokens * s.width, 2);
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> from({s.table, s.width}, table), gathered({s.tokens, s.width}), added({s.tokens, s.width}, x);
    Guarded<Real> gx({s.tokens, s.width}, x), to({s.table, s.width}, table);
    kernels.gather_rows(ids, from.view(), gathered.view());
    kernels.add_gathered_rows(ids, from.view(), added.view());
    kernels.scatter_add_rows(ids, gx.view(), to.view());
    return {gathered.values(), added.values(), to.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  std::vector<Real> gathered(x.size(), Real(0)), added = x, to = table;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const std::int64_t id = ids[static_cast<std::size_t>(t)];
    for (std::int64_t c = 0; c < s.width && id >= 0; ++c) {
      const auto here = static_cast<std::size_t>(t * s.width + c), there = static_cast<std::size_t>(id * s.width + c);
      gathered[here] = table[there];
      added[here] += table[there];
      to[there] += x[here];
    }
  }
  EXPECT_TRUE(same_bits<Real>(got, {gathered, added, to}));
}
TEST_P(Rows, GatherAndScatterAreTheirLoops) {
  for (const Sizes& s : kSizes) {
    check_gather<float>(GetParam(), s);
    check_gather<double>(GetParam(), s);
  }
}

/// Choices of 1 or 2 slots of `slots`, each used once at most; some dropped, some tokens with none at all.
std::vector<std::int32_t> make_slots(std::int64_t tokens, std::int64_t choices) {
  std::vector<std::int32_t> slots;
  for (std::int64_t i = 0; i < tokens * choices; ++i) {
    const bool dropped = i % 5 == 2 || i / choices % 7 == 3;
    slots.push_back(dropped ? -1 : static_cast<std::int32_t>(tokens * choices - i));  // slot 0 stays empty
  }
  return slots;
}

template <class Real>
Outputs<double> plain_combine(const std::vector<std::int32_t>& slots, std::int64_t choices, std::int64_t width,
                              const std::vector<Real>& gates, const std::vector<Real>& y, const std::vector<Real>& dout,
                              const std::vector<Real>& dy_before) {
  std::vector<double> out(dout.size(), 0.0), dgates(gates.size(), 0.0), dy(dy_before.begin(), dy_before.end());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    const auto token = i / static_cast<std::size_t>(choices);
    for (std::size_t c = 0; c < static_cast<std::size_t>(width); ++c) {
      const std::size_t here = token * static_cast<std::size_t>(width) + c;
      const std::size_t there = static_cast<std::size_t>(slots[i] * width) + c;
      out[here] += static_cast<double>(gates[i]) * static_cast<double>(y[there]);
      dgates[i] += static_cast<double>(dout[here]) * static_cast<double>(y[there]);
      dy[there] = static_cast<double>(gates[i]) * static_cast<double>(dout[here]);
    }
  }
  return {out, dgates, dy};
}

template <class Real>
void check_combine(const char* set, std::int64_t tokens, std::int64_t choices, std::int64_t width) {
  SCOPED_TRACE(fmt::format("{} x {}, {} choices", tokens, width, choices));
  const std::vector<std::int32_t> slots = make_slots(tokens, choices);
  const std::int64_t table = tokens * choices + 1;
  const auto gates = random_values<Real>(tokens * choices, 1), y = random_values<Real>(table * width, 2),
             dout = random_values<Real>(tokens * width, 3), dy = random_values<Real>(table * width, 4);
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> g({tokens, choices}, gates), gy({table, width}, y), gout({tokens, width}, dout), out({tokens, width});
    Guarded<Real> dgates({tokens, choices}), gdy({table, width}, dy);
    kernels.combine_rows(slots, g.view(), gy.view(), out.view());
    kernels.combine_rows_backward(slots, g.view(), gout.view(), gy.view(), dgates.view(), gdy.view());
    return {out.values(), dgates.values(), gdy.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  const auto expected = plain_combine<Real>(slots, choices, width, gates, y, dout, dy);
  expect_close<Real>({got[0], got[2]}, {expected[0], expected[2]}, {}, 3);
  expect_close<Real>({got[1]}, {expected[1]}, {}, static_cast<double>(width));
  for (std::size_t i = 0; i < slots.size(); ++i) EXPECT_TRUE(slots[i] >= 0 || got[1][i] == Real(0)) << i;
  EXPECT_TRUE(std::equal(dy.begin(), dy.begin() + width, got[2].begin())) << "a slot of no token was written";
}
TEST_P(Rows, CombineAndItsGradientAreTheirEquations) {
  for (const auto& [tokens, width] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {1, 1}, {9, 5}, {77, 131}, {40, 768}}) {
    for (const std::int64_t choices : {1, 2}) {
      check_combine<float>(GetParam(), tokens, choices, width);
      check_combine<double>(GetParam(), tokens, choices, width);
    }
  }
}

template <class Real>
void check_bias(const char* set, std::int64_t tokens, std::int64_t width) {
  SCOPED_TRACE(fmt::format("{} x {}", tokens, width));
  const auto bias = random_values<Real>(width, 1), x = random_values<Real>(tokens * width, 2);
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gbias({width}, bias), added({tokens, width}, x), gx({tokens, width}, x), dbias({width}, bias);
    kernels.add_bias(gbias.view(), added.view());
    kernels.bias_backward(gx.view(), dbias.view());
    return {added.values(), dbias.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  std::vector<Real> added = x;
  std::vector<double> dbias(bias.begin(), bias.end());
  for (std::int64_t i = 0; i < tokens * width; ++i) {
    added[static_cast<std::size_t>(i)] += bias[static_cast<std::size_t>(i % width)];
    dbias[static_cast<std::size_t>(i % width)] += static_cast<double>(x[static_cast<std::size_t>(i)]);
  }
  EXPECT_TRUE(same_bits<Real>({got[0]}, {added}));
  expect_close<Real>({got[1]}, {dbias}, {}, static_cast<double>(tokens));
}
TEST_P(Rows, BiasIsAddedToEveryRowAndItsGradientIsTheirSum) {
  for (const auto& [tokens, width] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {1, 1}, {67, 131}, {300, 768}}) {
    check_bias<float>(GetParam(), tokens, width);
    check_bias<double>(GetParam(), tokens, width);
  }
}

TEST_P(Rows, RefusesIndicesBeyondTheTable) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  std::vector<float> table(6), out(4), gates(2);
  const std::vector<std::int32_t> ids = {0, 3};
  EXPECT_THROW(kernels->gather_rows(ids, view_of(table, {3, 2}), view_of(out, {2, 2})), ContractError);
  EXPECT_THROW(kernels->scatter_add_rows(ids, view_of(out, {2, 2}), view_of(table, {3, 2})), ContractError);
  EXPECT_THROW(kernels->combine_rows(ids, view_of(gates, {2, 1}), view_of(table, {3, 2}), view_of(out, {2, 2})), ContractError);
}

INSTANTIATE_TEST_SUITE_P(Sets, Rows, testing::ValuesIn(kInstructionSets),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tandem::cpu
