// SPDX-License-Identifier: Apache-2.0
#include "optimized/zero/host_offload.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "kernels/kernels.h"
#include "kernels/lent_memory_test_support.h"
#include "optimized/zero/host_offload_test_support.h"

namespace tandem {
namespace {

using namespace tandem::offload_test;

struct Layout {
  std::string name;
  std::int64_t elements;
  std::vector<Interval> segments;
};

std::vector<Interval> many_segments(std::int64_t elements) {
  std::vector<Interval> segments;
  for (std::int64_t begin = 0, size = 1; begin < elements; begin += size, size = size * 7 % 61 + 1) {
    segments.push_back({begin, std::min(elements, begin + size)});
  }
  return segments;
}

class HostOffloadEquality : public testing::TestWithParam<Layout> {};

TEST_P(HostOffloadEquality, UpdatesToTheSameBitsAsInPlace) {
  const Layout& layout = GetParam();
  const std::vector<Values> expected = in_place(layout.elements, layout.segments, 3);
  for (const std::int64_t chunk : {1, 3, 16, 61, 64, 1000, 100'000}) {
    if (layout.elements / chunk > 2000) continue;
    EXPECT_TRUE(same_bits(offloaded(options_of(layout.elements, chunk), layout.segments, 3), expected)) << "chunks of " << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(Of, HostOffloadEquality,
                         testing::Values(Layout{"Nothing", 0, {}}, Layout{"AnEmptySegment", 0, {{0, 0}}},
                                         Layout{"NoSegments", 100, {}}, Layout{"OneElement", 1, {{0, 1}}},
                                         Layout{"OneSegment", 997, {{0, 997}}},
                                         Layout{"MultiplesOfTheChunk", 192, {{0, 64}, {64, 192}}},
                                         Layout{"EmptySegmentsBetween", 67, {{0, 0}, {0, 13}, {13, 13}, {13, 67}, {67, 67}}},
                                         Layout{"GapsBetween", 211, {{3, 17}, {19, 100}, {150, 210}}},
                                         Layout{"ManySegments", 5003, many_segments(5003)},
                                         Layout{"ALargeState", 150'001, {{0, 77}, {77, 150'001}}}),
                         [](const auto& layout) { return layout.param.name; });

// Where staging buffers are not the host's, each copy is a write to the device or a read from it.
TEST(HostOffload, UpdatesToTheSameBitsOnADevice) {
  const std::vector<Interval> segments = {{3, 17}, {19, 100}, {150, 210}};
  LentMemory memory;
  EXPECT_TRUE(same_bits(offloaded(options_of(211, 16), segments, 3, memory), in_place(211, segments, 3)));
}

// AdamW by the kernels, which take vectors of elements at a time and the rest of a tensor one by one: where a chunk ends must not
// show. Parameters are kept in bf16 beside the state.
std::vector<Values> updated_by_kernels(std::int64_t elements, std::int64_t chunk, std::vector<std::uint16_t>& parameters) {
  const auto kernels = make_cpu_kernels({});
  const std::vector<Interval> segments = {{0, elements / 3}, {elements / 3, elements}};
  Values gradients(static_cast<std::size_t>(elements));
  for (std::int64_t i = 0; i < elements; ++i) gradients[static_cast<std::size_t>(i)] = gradient(i, 1);
  const TensorView all_gradients = view_of(gradients, {elements});
  const TensorView stored(parameters.data(), DType::bf16, {elements});
  Arena device({.poison = true});
  Arena host;
  HostOffload offload(device, host, options_of(elements, chunk));
  fill(offload, 3, elements);
  for (int step = 1; step <= 2; ++step) {
    offload.for_each_chunk(
        segments,
        [&](const OffloadedPart& part) {
          const AdamWStep adamw = {1e-3, 0.9, 0.95, 1e-8, part.segment == 0 ? 0.1 : 0.0, step, 0.75};
          const auto [begin, size] = std::pair(part.elements.begin, part.elements.size());
          kernels->adamw(adamw, all_gradients.flat(begin, size), part.tensors[0], part.tensors[1], part.tensors[2],
                         stored.flat(begin, size));
        },
        nullptr);
  }
  std::vector<Values> state;
  for (int tensor = 0; tensor < 3; ++tensor) {
    const auto values = offload.host(tensor).as<float>();
    state.emplace_back(values.begin(), values.end());
  }
  return state;
}

TEST(HostOffload, GivesTheKernelsUpdateBitForBitWhereverChunksEnd) {
  constexpr std::int64_t kElements = 30'011;
  std::vector<std::uint16_t> expected_parameters(kElements);
  const std::vector<Values> expected = updated_by_kernels(kElements, kElements, expected_parameters);
  EXPECT_NE(expected[0][0], initial(0, 0));
  for (const std::int64_t chunk : {61, 1000, 4096, 20'000}) {
    std::vector<std::uint16_t> parameters(kElements);
    EXPECT_TRUE(same_bits(updated_by_kernels(kElements, chunk, parameters), expected)) << "chunks of " << chunk;
    EXPECT_EQ(parameters, expected_parameters) << "chunks of " << chunk;
  }
}

TEST(HostOffload, CutsAtSegmentsAndAtTheChunkSize) {
  Arena device;
  Arena host;
  HostOffload offload(device, host, options_of(30, 8, 2));
  const std::vector<Interval> segments = {{0, 5}, {5, 21}, {22, 22}, {23, 30}};
  std::vector<std::pair<std::size_t, Interval>> seen;
  offload.for_each_chunk(
      segments,
      [&](const OffloadedPart& part) {
        ASSERT_EQ(part.tensors.size(), 2U);
        for (const TensorView& tensor : part.tensors) EXPECT_EQ(tensor.shape(), Shape{part.elements.size()});
        seen.emplace_back(part.segment, part.elements);
      },
      nullptr);
  // Chunks of eight elements: 5 + 3, 8, 5 + 3, 4.
  const std::vector<std::pair<std::size_t, Interval>> expected = {{0, {0, 5}},   {1, {5, 8}},   {1, {8, 16}},
                                                                  {1, {16, 21}}, {3, {23, 26}}, {3, {26, 30}}};
  EXPECT_EQ(seen, expected);
}

TEST(HostOffload, TheDeviceHoldsTheStagingBuffersAlone) {
  constexpr std::int64_t kElements = 100'000;
  constexpr std::int64_t kChunk = 1000;
  const std::vector<Interval> segments = {{0, 700}, {700, kElements}};
  Arena device;
  Arena host;
  HostOffload offload(device, host, options_of(kElements, kChunk));
  fill(offload, 3, kElements);
  EXPECT_EQ(device.ledger().peak_total(), 0);
  EXPECT_EQ(current_of(host, MemoryCategory::optimizer), 3 * kElements * 4);

  std::int64_t during = 0;
  offload.for_each_chunk(
      segments, [&](const OffloadedPart&) { during = std::max(during, current_of(device, MemoryCategory::workspace)); }, nullptr);

  // 4000 bytes are 63 units of 64.
  EXPECT_EQ(during, 2 * 3 * 4032);
  EXPECT_EQ(offload.staging_bytes(segments), during);
  EXPECT_EQ(peak_of(device, MemoryCategory::workspace), during);
  EXPECT_EQ(device.ledger().peak_total(), during);
  EXPECT_EQ(current_of(device, MemoryCategory::workspace), 0);
  EXPECT_EQ(host.ledger().peak_total(), 3 * kElements * 4);
}

TEST(HostOffload, ShortStatesTakeNoMoreThanTheyNeed) {
  Arena device;
  Arena host;
  HostOffload offload(device, host, options_of(160, 1 << 20));
  const std::vector<Interval> one = {{0, 160}};
  const std::vector<Interval> two = {{0, 16}, {16, 160}};
  const std::vector<Interval> none;
  EXPECT_EQ(offload.staging_bytes(one), 3 * 640);
  EXPECT_EQ(offload.staging_bytes(two), 3 * 640);
  EXPECT_EQ(offload.staging_bytes(none), 0);
  for (const auto& segments : {one, two, none}) {
    device.ledger().reset_peaks();
    offload.for_each_chunk(
        segments, [](const OffloadedPart&) {}, nullptr);
    EXPECT_EQ(device.ledger().peak_total(), offload.staging_bytes(segments));
  }
}

TEST(HostOffload, ReadingTooEarlyShowsInEveryChunk) {
  constexpr std::int64_t kElements = 1000;
  const std::vector<Interval> segments = {{0, 300}, {300, kElements}};
  HostOffloadOptions options = options_of(kElements, 100);
  options.pitfalls = PitfallSet(std::vector<Pitfall>{Pitfall::offload_read_too_early});

  Arena device({.poison = true});
  Arena host({.poison = true});
  HostOffload offload(device, host, options);
  fill(offload, 3, kElements);
  std::vector<bool> right;
  offload.for_each_chunk(
      segments,
      [&](const OffloadedPart& part) {
        const auto master = part.tensors[0].as<float>();
        const auto first = master[0];
        right.push_back(first == initial(0, part.elements.begin));
        if (right.size() <= 2) {
          EXPECT_TRUE(std::isnan(first)) << "poison shows in the first chunks";
        }
        update_part(part, 0);
      },
      nullptr);
  EXPECT_EQ(right, std::vector<bool>(10, false));

  const std::vector<Values> expected = in_place(kElements, segments, 1);
  const std::vector<Values> wrong = offloaded(options, segments, 1);
  for (std::size_t i = 0; i < expected[0].size(); ++i) EXPECT_NE(wrong[0][i], expected[0][i]) << i;
  options.pitfalls = {};
  EXPECT_TRUE(same_bits(offloaded(options, segments, 1), expected));
}

TEST(HostOffload, RefusesSegmentsThatOverlapOrLeaveTheState) {
  Arena device;
  Arena host;
  HostOffload offload(device, host, options_of(10, 4));
  const std::vector<std::vector<Interval>> wrong = {{{0, 11}}, {{-1, 3}}, {{5, 4}}, {{0, 5}, {4, 10}}, {{5, 10}, {0, 5}}};
  for (const auto& segments : wrong) {
    int calls = 0;
    EXPECT_THROW(offload.for_each_chunk(
                     segments, [&](const OffloadedPart&) { ++calls; }, nullptr),
                 ContractError);
    EXPECT_EQ(calls, 0);
  }
  EXPECT_THROW((void)offload.host(3), ContractError);
  EXPECT_THROW(HostOffload(device, host, options_of(10, 0)), ContractError);
  EXPECT_THROW(HostOffload(device, host, options_of(-1, 4)), ContractError);
}

}  // namespace
}  // namespace tandem
