// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <vector>

#include "kernels/cuda/device_test_support.h"
#include "reference/ops.h"

namespace tandem::device_test {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

using Values = std::vector<double>;
using Ids = std::vector<std::int32_t>;

// One element; odd rows; rows of several tiles of a warp; a table of one row, to which all tokens go; odd places; no tokens.
struct Size {
  std::int64_t tokens, width, rows;
  Place place = Place::aligned;
};
constexpr Size kSizes[] = {{1, 1, 1}, {67, 37, 5}, {20, 1040, 7}, {45, 16, 1}, {9, 8, 30, Place::odd}, {0, 8, 3}};

Ids make_ids(std::int64_t tokens, std::int64_t rows, int skipped) {
  Ids ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const bool skip = skipped > 0 && t % skipped == 1;
    ids.push_back(skip ? -1 : static_cast<std::int32_t>((t * t + 3 * t) % rows));
  }
  return ids;
}

class CudaRows : public DeviceTest {};

/// table[ids[t]] += x[t] in order of t, in the wide type, each row rounded once to `sums`.
Values scatter(const Ids& ids, const Values& x, std::int64_t width, const Values& table, DType data, DType sums) {
  Values result = table;
  for (std::size_t t = 0; t < ids.size(); ++t) {
    for (std::int64_t c = 0; c < width && ids[t] >= 0; ++c) {
      double& to = result[static_cast<std::size_t>(ids[t] * width + c)];
      to = rounded_to(to + x[t * static_cast<std::size_t>(width) + static_cast<std::size_t>(c)], wide(data));
    }
  }
  for (double& value : result) value = rounded_to(value, sums);
  return result;
}

TEST_F(CudaRows, EmbeddingsAreSumsOfTwoRows) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} {} x {} of {}", name(dtype), s.tokens, s.width, s.rows));
      const Ids ids = make_ids(s.tokens, s.rows, 0), positions = make_ids(s.tokens, 4, 0);
      const Values wte = random_numbers(dtype, s.rows * s.width, 1), wpe = random_numbers(dtype, 4 * s.width, 2);
      const DeviceTensor gwte(kernels(), dtype, {s.rows, s.width}, wte, s.place), gwpe(kernels(), dtype, {4, s.width}, wpe),
          out(kernels(), dtype, {s.tokens, s.width});
      kernels().embedding_forward(ids, positions, gwte.view(), gwpe.view(), out.view());
      Values expected;
      for (std::int64_t i = 0; i < s.tokens * s.width; ++i) {
        const auto t = static_cast<std::size_t>(i / s.width), c = static_cast<std::size_t>(i % s.width);
        const auto width = static_cast<std::size_t>(s.width);
        expected.push_back(rounded_to(
            wte[static_cast<std::size_t>(ids[t]) * width + c] + wpe[static_cast<std::size_t>(positions[t]) * width + c], dtype));
      }
      EXPECT_EQ(out.values(), expected);
    }
  }
}

void check_embedding_backward(Kernels& kernels, DType dtype, DType sums, const Size& s) {
  SCOPED_TRACE(fmt::format("{} into {}, {} x {} of {}", name(dtype), name(sums), s.tokens, s.width, s.rows));
  const Ids ids = make_ids(s.tokens, s.rows, 0), positions = make_ids(s.tokens, 4, 0);
  const Values dout = random_numbers(dtype, s.tokens * s.width, 1), dwte = random_numbers(sums, s.rows * s.width, 2),
               dwpe = random_numbers(sums, 4 * s.width, 3);
  const DeviceTensor gdout(kernels, dtype, {s.tokens, s.width}, dout, s.place), gdwte(kernels, sums, {s.rows, s.width}, dwte),
      gdwpe(kernels, sums, {4, s.width}, dwpe, s.place);
  kernels.embedding_backward(ids, positions, gdout.view(), gdwte.view(), gdwpe.view());
  EXPECT_EQ(gdwte.values(), scatter(ids, dout, s.width, dwte, dtype, sums));
  EXPECT_EQ(gdwpe.values(), scatter(positions, dout, s.width, dwpe, dtype, sums));
}
TEST_F(CudaRows, EmbeddingGradientsAreAddedInOrderOfTokens) {
  for (const Size& s : kSizes) {
    for (const DType dtype : kDTypes) check_embedding_backward(kernels(), dtype, dtype, s);
    check_embedding_backward(kernels(), DType::bf16, DType::f32, s);
  }
}

TEST_F(CudaRows, GatherAndScatterAreTheirLoops) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) {
      SCOPED_TRACE(fmt::format("{} {} x {} of {}", name(dtype), s.tokens, s.width, s.rows));
      const Ids ids = make_ids(s.tokens, s.rows, 3);
      const Values table = random_numbers(dtype, s.rows * s.width, 1), x = random_numbers(dtype, s.tokens * s.width, 2);
      const DeviceTensor gtable(kernels(), dtype, {s.rows, s.width}, table, s.place),
          gathered(kernels(), dtype, {s.tokens, s.width}), added(kernels(), dtype, {s.tokens, s.width}, x, s.place),
          gx(kernels(), dtype, {s.tokens, s.width}, x), to(kernels(), dtype, {s.rows, s.width}, table);
      kernels().gather_rows(ids, gtable.view(), gathered.view());
      kernels().add_gathered_rows(ids, gtable.view(), added.view());
      kernels().scatter_add_rows(ids, gx.view(), to.view());
      Values rows(x.size(), 0.0), sums = x;
      for (std::int64_t i = 0; i < s.tokens * s.width; ++i) {
        const std::int32_t id = ids[static_cast<std::size_t>(i / s.width)];
        if (id < 0) continue;
        const auto here = static_cast<std::size_t>(i);
        rows[here] = table[static_cast<std::size_t>(id * s.width + i % s.width)];
        sums[here] = rounded_to(sums[here] + rows[here], dtype);
      }
      EXPECT_EQ(gathered.values(), rows);
      EXPECT_EQ(added.values(), sums);
      EXPECT_EQ(to.values(), scatter(ids, x, s.width, table, dtype, dtype));
    }
  }
}

/// Each slot is used once at most; some choices are dropped, some tokens have none; slot 0 belongs to nobody.
Ids make_slots(std::int64_t tokens, std::int64_t choices) {
  Ids slots;
  for (std::int64_t i = 0; i < tokens * choices; ++i) {
    const bool dropped = i % 5 == 2 || i / choices % 7 == 3;
    slots.push_back(dropped ? -1 : static_cast<std::int32_t>(tokens * choices - i));
  }
  return slots;
}
struct Combined {
  Values out, dgates, dy;
};
template <class Real>
Combined define_combine(const Ids& slots, std::int64_t choices, std::int64_t width, const Values& gates, const Values& y,
                        const Values& dout, const Values& dy_before) {
  std::vector<Real> out(dout.size(), Real(0)), dgates(gates.size(), Real(0)), dy = as<Real>(dy_before);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    for (std::int64_t c = 0; c < width && slots[i] >= 0; ++c) {
      const auto here = static_cast<std::size_t>(static_cast<std::int64_t>(i) / choices * width + c);
      const auto there = static_cast<std::size_t>(slots[i] * width + c);
      const auto gate = static_cast<Real>(gates[i]), gradient = static_cast<Real>(dout[here]), row = static_cast<Real>(y[there]);
      out[here] += gate * row;
      dgates[i] += gradient * row;
      dy[there] = gate * gradient;
    }
  }
  return {as_doubles(out), as_doubles(dgates), as_doubles(dy)};
}

void check_combine(Kernels& kernels, DType dtype, const Size& s, std::int64_t choices) {
  SCOPED_TRACE(fmt::format("{} {} x {}, {} choices", name(dtype), s.tokens, s.width, choices));
  const Ids slots = make_slots(s.tokens, choices);
  const std::int64_t rows = s.tokens * choices + 1;
  const Values gates = random_numbers(wide(dtype), s.tokens * choices, 1), y = random_numbers(dtype, rows * s.width, 2),
               dout = random_numbers(dtype, s.tokens * s.width, 3), dy = random_numbers(dtype, rows * s.width, 4);
  const DeviceTensor ggates(kernels, wide(dtype), {s.tokens, choices}, gates), gy(kernels, dtype, {rows, s.width}, y, s.place),
      gdout(kernels, dtype, {s.tokens, s.width}, dout), out(kernels, dtype, {s.tokens, s.width}, s.place),
      dgates(kernels, wide(dtype), {s.tokens, choices}), gdy(kernels, dtype, {rows, s.width}, dy);
  kernels.combine_rows(slots, ggates.view(), gy.view(), out.view());
  kernels.combine_rows_backward(slots, ggates.view(), gdout.view(), gy.view(), dgates.view(), gdy.view());
  const Combined truth = define_combine<double>(slots, choices, s.width, gates, y, dout, dy);
  const Combined plain = define_combine<float>(slots, choices, s.width, gates, y, dout, dy);
  const auto same = [&](const Values& values) { return dtype == DType::f64 ? Values{} : values; };
  expect_close("out", out.values(), truth.out, dtype, same(plain.out), static_cast<double>(choices));
  expect_close("dgates", dgates.values(), truth.dgates, wide(dtype), same(plain.dgates), static_cast<double>(s.width));
  const Values got = gdy.values();
  expect_close("dy", got, truth.dy, dtype, same(plain.dy), 1);
  EXPECT_TRUE(std::equal(dy.begin(), dy.begin() + s.width, got.begin())) << "a slot of no token was written";
}
TEST_F(CudaRows, CombineAndItsGradientAreTheirEquations) {
  for (const DType dtype : kDTypes) {
    for (const Size& s : kSizes) {
      for (const std::int64_t choices : {1, 2}) check_combine(kernels(), dtype, s, choices);
    }
  }
}

TEST_F(CudaRows, IdsMayChangeAsSoonAsACallHasReturned) {
  const Values table = random_numbers(DType::f32, 64 * 8, 1);
  const DeviceTensor gtable(kernels(), DType::f32, {64, 8}, table), out(kernels(), DType::f32, {1000, 8}),
      expected(kernels(), DType::f32, {1000, 8});
  const Ids wanted = make_ids(1000, 64, 0);
  Ids ids = wanted;
  kernels().gather_rows(ids, gtable.view(), out.view());
  std::fill(ids.begin(), ids.end(), 0);
  kernels().gather_rows(wanted, gtable.view(), expected.view());
  EXPECT_EQ(out.bits(), expected.bits());
}

TEST_F(CudaRows, RefusesIndicesBeyondTheTable) {
  const DeviceTensor table(kernels(), DType::f32, {3, 2}), out(kernels(), DType::f32, {2, 2}),
      gates(kernels(), DType::f32, {2, 1});
  const Ids ids = {0, 3}, negative = {0, -1}, good = {0, 2};
  EXPECT_THROW(kernels().gather_rows(ids, table.view(), out.view()), ContractError);
  EXPECT_THROW(kernels().add_gathered_rows(ids, table.view(), out.view()), ContractError);
  EXPECT_THROW(kernels().scatter_add_rows(ids, out.view(), table.view()), ContractError);
  EXPECT_THROW(kernels().combine_rows(ids, gates.view(), table.view(), out.view()), ContractError);
  EXPECT_THROW(kernels().embedding_forward(good, negative, table.view(), table.view(), out.view()), ContractError);
  EXPECT_THROW(kernels().embedding_backward(ids, good, out.view(), table.view(), table.view()), ContractError);
  EXPECT_NO_THROW(kernels().embedding_forward(good, good, table.view(), table.view(), out.view()));
  kernels().synchronize();
}

}  // namespace
}  // namespace tandem::device_test
