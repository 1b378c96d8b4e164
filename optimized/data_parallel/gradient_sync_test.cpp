// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/gradient_sync.h"

#include <cmath>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "core/rng.h"
#include "optimized/comm/world.h"
#include "reference/data_parallel.h"

namespace tandem {
namespace {

std::vector<float> values_of(int rank, std::size_t count, float scale) {
  CounterRng rng(static_cast<std::uint64_t>(rank) + 1, "values");
  std::vector<float> values(count);
  for (float& value : values) value = scale * static_cast<float>(rng.next_normal());
  return values;
}

class HalfMean : public testing::TestWithParam<std::tuple<int, std::size_t>> {};

TEST_P(HalfMean, IsThatOfTheReferenceToTheLastBit) {
  const auto [ranks, count] = GetParam();
  for (const float scale : {1.0F, 9000.0F, 0x1p-16F}) {
    std::vector<std::vector<float>> expected;
    std::vector<std::span<float>> spans;
    for (int rank = 0; rank < ranks; ++rank) expected.push_back(values_of(rank, count, scale));
    for (auto& values : expected) spans.emplace_back(values);
    reference::all_reduce_mean_f16<float>(spans);

    run_world({.ranks = ranks}, [&](Communicator& comm) {
      Arena arena({.poison = true, .huge_pages = false});
      const auto kernels = make_cpu_kernels({});
      std::vector<float> values = values_of(comm.rank(), count, scale);
      all_reduce_mean_f16({&comm, kernels.get(), &arena, nullptr, {}, {}}, comm,
                          view_of(values, {static_cast<std::int64_t>(count)}), {});
      EXPECT_EQ(values, expected[static_cast<std::size_t>(comm.rank())]) << "rank " << comm.rank();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(RanksAndSizes, HalfMean,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7), testing::Values(1U, 5U, 1021U)));

TEST(GradientSync, SendsHalfTheBytesWhereTheWireIsHalfPrecision) {
  constexpr std::int64_t kElements = 1200;
  for (const DType wire : {DType::f32, DType::f16}) {
    run_world({.ranks = 3}, [&](Communicator& comm) {
      Arena arena({.huge_pages = false});
      const auto kernels = make_cpu_kernels({});
      std::vector<float> values(kElements, 1.0F);
      Numerics numerics;
      numerics.reduce = wire;

      GradientSync({&comm, kernels.get(), &arena, nullptr, {}, {}}, numerics)
          .start(comm, view_of(values, {kElements}), 0, Progress::on_wait)
          .wait_host();

      EXPECT_EQ(comm.bytes_sent(Purpose::gradient), 2 * kElements * static_cast<std::int64_t>(size_bytes(wire)) * 2 / 3);
      EXPECT_EQ(values.front(), 3.0F);
    });
  }
}

}  // namespace
}  // namespace tandem
