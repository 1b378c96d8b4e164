// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/timeline.h"
#include "kernels/cuda/device_test_support.h"

namespace tandem::device_test {
namespace {

class DeviceMemory : public DeviceTest {
 protected:
  [[nodiscard]] Memory& memory() { return kernels().memory(); }
};

/// Bytes reserved in a memory.
class Block {
 public:
  Block(Memory& memory, std::int64_t size_bytes)
      : memory_(memory), size_bytes_(size_bytes), data_(static_cast<std::byte*>(memory.reserve(size_bytes))) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { memory_.give_back(data_, size_bytes_); }
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::vector<std::uint8_t> read(Memory& lane) const {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size_bytes_));
    lane.read(data_, bytes.data(), size_bytes_);
    return bytes;
  }

 private:
  Memory& memory_;
  std::int64_t size_bytes_;
  std::byte* data_;
};

std::vector<std::uint8_t> counted(std::int64_t size_bytes, int first) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size_bytes));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>((first + i * 7 + i / 251) % 256);
  return bytes;
}

TEST_F(DeviceMemory, KnowsItsOwnAddresses) {
  const Block block(memory(), 1000);
  EXPECT_FALSE(memory().on_host());
  EXPECT_TRUE(memory().holds(block.data()));
  EXPECT_TRUE(memory().holds(block.data() + 999));
  EXPECT_TRUE(memory().new_lane()->holds(block.data()));
  EXPECT_FALSE(memory().holds(&block));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 256, 0U);
}

TEST_F(DeviceMemory, WhatWasWrittenMayChangeAtOnce) {
  // More than the staging ring holds, so that it goes round.
  constexpr std::int64_t kPiece = (5 << 20) + 13;
  constexpr int kPieces = 18;
  const Block block(memory(), kPieces * kPiece);
  for (int i = 0; i < kPieces; ++i) {
    std::vector<std::uint8_t> bytes(kPiece, static_cast<std::uint8_t>(i + 1));
    memory().write(bytes.data(), block.data() + i * kPiece, kPiece);
    std::ranges::fill(bytes, std::uint8_t{0xFF});
  }

  const std::vector<std::uint8_t> got = block.read(memory());
  for (int i = 0; i < kPieces; ++i) {
    const auto begin = got.begin() + i * kPiece;
    EXPECT_EQ(std::count(begin, begin + kPiece, static_cast<std::uint8_t>(i + 1)), kPiece) << "piece " << i;
  }
}

TEST_F(DeviceMemory, ReadsInPiecesAndSmall) {
  constexpr std::int64_t kSize = (9 << 20) + 5;
  const std::vector<std::uint8_t> bytes = counted(kSize, 3);
  const Block block(memory(), kSize);
  memory().write(bytes.data(), block.data(), kSize);
  std::uint8_t one = 0;
  memory().read(block.data() + 77, &one, 1);
  EXPECT_EQ(one, bytes[77]);
  EXPECT_TRUE(block.read(memory()) == bytes);
  memory().read(block.data() + kSize - 1, &one, 1);
  EXPECT_EQ(one, bytes.back());
  memory().read(block.data(), &one, 0);
}

TEST_F(DeviceMemory, CopiesRowsAndSetsBytes) {
  const std::vector<std::uint8_t> bytes = counted(300, 9);
  const Block from(memory(), 300), to(memory(), 300);
  memory().write(bytes.data(), from.data(), 300);
  memory().set_bytes(to.data(), 0xEE, 300);
  memory().copy_rows(from.data() + 1, 30, to.data() + 2, 50, 17, 5);
  memory().copy_rows(from.data(), 10, to.data() + 280, 10, 10, 2);
  memory().copy_rows(from.data(), 10, to.data(), 10, 0, 4);

  std::vector<std::uint8_t> expected(300, 0xEE);
  for (int row = 0; row < 5; ++row) std::copy_n(bytes.begin() + 1 + row * 30, 17, expected.begin() + 2 + row * 50);
  std::copy_n(bytes.begin(), 20, expected.begin() + 280);
  EXPECT_EQ(to.read(memory()), expected);
}

TEST_F(DeviceMemory, ALaneBeginsAfterTheMarkOfAnother) {
  const Block block(memory(), 64), copy(memory(), 64);
  const auto lane = memory().new_lane();
  memory().set_bytes(block.data(), 1, 64);
  const auto written = memory().mark();
  lane->begin_after(*written);
  lane->copy(block.data(), copy.data(), 64);
  const auto copied = lane->mark();
  memory().begin_after(*copied);
  memory().set_bytes(block.data(), 2, 64);

  EXPECT_EQ(copy.read(*lane), std::vector<std::uint8_t>(64, 1));
  EXPECT_EQ(block.read(memory()), std::vector<std::uint8_t>(64, 2));
  copied->wait();
  EXPECT_TRUE(copied->reached());
}

TEST_F(DeviceMemory, MarksOutliveTheirLaneAndTellTheHostsTime) {
  const std::int64_t before = Timeline::now_ns();
  const Block block(memory(), 1 << 20);
  auto lane = memory().new_lane();
  const auto begin = lane->mark(Memory::Timed::yes);
  lane->set_bytes(block.data(), 5, 1 << 20);
  const auto end = lane->mark(Memory::Timed::yes), untimed = lane->mark();
  lane.reset();

  const std::int64_t begin_ns = begin->time_ns(), end_ns = end->time_ns(), after = Timeline::now_ns();
  constexpr std::int64_t kClocksDiffer = 100'000;
  EXPECT_LE(before, begin_ns + kClocksDiffer);
  EXPECT_LE(begin_ns, end_ns);
  EXPECT_LE(end_ns, after + kClocksDiffer);
  EXPECT_THROW(static_cast<void>(untimed->time_ns()), ContractError);
}

class DeviceGraph : public DeviceTest {};

TEST_F(DeviceGraph, ARecordedSequenceIsIssuedEachTimeWithItsOwnArguments) {
  const std::vector<double> ones(100, 1.0);
  const DeviceTensor x(kernels(), DType::f32, {100}, ones), y(kernels(), DType::f32, {100}, ones);
  for (const double value : {2.0, 3.0, 4.0}) {
    kernels().begin_graph(7);
    kernels().fill(x.view(), value);
    kernels().add(x.view(), y.view());
    kernels().end_graph();
    EXPECT_EQ(x.values(), std::vector<double>(100, value));
  }
  EXPECT_EQ(y.values(), std::vector<double>(100, 10.0));

  kernels().begin_graph(7);  // other calls under the same key, which the graph cannot be updated to
  kernels().scale(y.view(), 0.5);
  kernels().end_graph();
  EXPECT_EQ(y.values(), std::vector<double>(100, 5.0));
}

TEST_F(DeviceGraph, HostValuesAndSumsThatArePutOffGoThroughIt) {
  constexpr std::int64_t kTokens = 6, kVocabulary = 40;
  const auto logits = random_numbers(DType::f32, kTokens * kVocabulary, 1);
  const DeviceTensor plain(kernels(), DType::f32, {kTokens, kVocabulary}, logits);
  std::vector<std::int32_t> targets = {1, 2, 3, 39, 0, 5};
  const double loss = kernels().cross_entropy_forward_backward(plain.view(), targets, 0.25);

  const DeviceTensor first(kernels(), DType::f32, {kTokens, kVocabulary}, logits);
  const DeviceTensor second(kernels(), DType::f32, {kTokens, kVocabulary}, logits);
  double sum = 100;
  kernels().begin_graph(1);  // the first is not recorded
  kernels().end_graph();
  kernels().begin_graph(1);
  for (const DeviceTensor* tensor : {&first, &second}) {
    std::vector<std::int32_t> own = targets;
    kernels().cross_entropy_deferred(tensor->view(), own, 0.25, sum);
    std::ranges::fill(own, -1);
  }
  kernels().end_graph();
  kernels().synchronize();
  EXPECT_DOUBLE_EQ(sum, 100 + 2 * loss);
  EXPECT_EQ(first.bits(), plain.bits());
  EXPECT_EQ(second.bits(), plain.bits());
  kernels().synchronize();
  EXPECT_DOUBLE_EQ(sum, 100 + 2 * loss);
}

TEST_F(DeviceGraph, NothingInItWaits) {
  const DeviceTensor x(kernels(), DType::f32, {10}, std::vector<double>(10, 1.0));
  float value = 0;
  kernels().begin_graph(3);
  kernels().end_graph();
  kernels().begin_graph(3);
  EXPECT_THROW(kernels().synchronize(), ContractError);
  EXPECT_THROW(kernels().memory().read(x.view().data(), &value, sizeof(value)), ContractError);
  EXPECT_THROW(static_cast<void>(kernels().memory().mark()), ContractError);
  EXPECT_THROW(kernels().begin_graph(4), ContractError);
  kernels().fill(x.view(), 6.0);
  kernels().end_graph();
  EXPECT_THROW(kernels().end_graph(), ContractError);
  EXPECT_EQ(x.values(), std::vector<double>(10, 6.0));
}

TEST_F(DeviceGraph, WithoutGraphsTheCallsAreIssuedAsTheyCome) {
  const auto plain = try_kernels({.graphs = false});
  const DeviceTensor x(*plain, DType::f32, {10}, std::vector<double>(10, 1.0));
  plain->begin_graph(1);
  plain->fill(x.view(), 3.0);
  EXPECT_EQ(x.values(), std::vector<double>(10, 3.0));
  plain->end_graph();
}

}  // namespace
}  // namespace tandem::device_test
