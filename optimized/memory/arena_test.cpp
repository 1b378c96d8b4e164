// SPDX-License-Identifier: Apache-2.0
#include "optimized/memory/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {
namespace {

constexpr auto kActivations = MemoryCategory::activations;
constexpr auto kGradients = MemoryCategory::gradients;

std::int64_t current_of(const Arena& arena, MemoryCategory category) {
  return arena.ledger().current()[static_cast<std::size_t>(category)];
}

// Host memory that says it is none: what an arena does with it goes through it.
class ElsewhereMemory final : public Memory {
 public:
  [[nodiscard]] bool on_host() const noexcept override { return false; }
  [[nodiscard]] std::string_view description() const noexcept override { return "elsewhere"; }
  [[nodiscard]] bool holds(const void*) const noexcept override { return true; }
  [[nodiscard]] void* reserve(std::int64_t size_bytes) override {
    reserved += size_bytes;
    return host_memory().reserve(size_bytes);
  }
  void give_back(void* address, std::int64_t size_bytes) noexcept override {
    reserved -= size_bytes;
    host_memory().give_back(address, size_bytes);
  }
  void copy(const void*, void*, std::int64_t) override {}
  void copy_rows(const void*, std::int64_t, void*, std::int64_t, std::int64_t, std::int64_t) override {}
  void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) override {
    filled.emplace_back(to, size_bytes);
    host_memory().set_bytes(to, value, size_bytes);
  }
  void write(const void*, void*, std::int64_t) override {}
  void read(const void*, void*, std::int64_t) override {}
  void sum_in_order(DType, std::span<const std::byte* const>, std::span<std::byte* const>, std::int64_t) override {}
  void synchronize() override {}
  [[nodiscard]] std::shared_ptr<Mark> mark(Timed timed) override { return host_memory().mark(timed); }
  void begin_after(Mark&) override {}
  [[nodiscard]] std::unique_ptr<Memory> new_lane() override { return std::make_unique<ElsewhereMemory>(); }

  std::int64_t reserved = 0;
  std::vector<std::pair<void*, std::int64_t>> filled;
};

TEST(Arena, CutsAndPoisonsWhatAnotherMemoryReservesAndGivesItBack) {
  ElsewhereMemory elsewhere;
  {
    Arena arena({.poison = true, .memory = &elsewhere});
    EXPECT_EQ(&arena.memory(), &elsewhere);
    auto first = arena.allocate(65, kActivations);
    const auto second = arena.allocate(1, kActivations);

    EXPECT_EQ(elsewhere.reserved, arena.reserved_bytes());
    EXPECT_EQ(current_of(arena, kActivations), 128 + 64);
    EXPECT_EQ(static_cast<std::byte*>(second.data()) - static_cast<std::byte*>(first.data()), 256);
    EXPECT_EQ(elsewhere.filled.back(), std::pair(second.data(), std::int64_t{256}));
    void* const released = first.data();
    first.release();
    EXPECT_EQ(elsewhere.filled.back(), std::pair(released, std::int64_t{256}));
  }
  EXPECT_EQ(elsewhere.reserved, 0);
}

TEST(Arena, TellsItsWatcherOfEachReservationAndBeforeEachIsGivenBack) {
  ElsewhereMemory elsewhere;
  std::map<void*, std::int64_t> first, second;
  std::int64_t reserved_at_the_end = 0;
  {
    Arena arena({.memory = &elsewhere});
    arena.reserve(100);
    arena.watch({[&](void* address, std::int64_t size_bytes) { first[address] = size_bytes; },
                 [&](void* address) { EXPECT_EQ(first.erase(address), 1U); }});
    ASSERT_EQ(first.size(), 1U);
    EXPECT_EQ(first.begin()->second, arena.reserved_bytes());

    arena.reserve(arena.reserved_bytes() + 1);
    std::int64_t seen = 0;
    for (const auto& [address, size_bytes] : first) seen += size_bytes;
    EXPECT_EQ(first.size(), 2U);
    EXPECT_EQ(seen, arena.reserved_bytes());

    arena.watch({[&](void* address, std::int64_t size_bytes) { second[address] = size_bytes; },
                 [&](void* address) {
                   EXPECT_EQ(second.erase(address), 1U);
                   reserved_at_the_end = elsewhere.reserved;
                 }});
    EXPECT_TRUE(first.empty());
    EXPECT_EQ(second.size(), 2U);
  }
  EXPECT_TRUE(second.empty());
  EXPECT_GT(reserved_at_the_end, 0);
  EXPECT_EQ(elsewhere.reserved, 0);
}

TEST(Arena, IsOfTheHostWhereNothingElseIsSaid) { EXPECT_EQ(&Arena().memory(), &host_memory()); }

TEST(Arena, HandsOutAlignedBlocksThatDoNotOverlap) {
  Arena arena;
  std::vector<Arena::Buffer> buffers;
  for (const std::int64_t size : {1, 64, 65, 4096, 3'000'001, 7}) {
    buffers.push_back(arena.allocate(size, kActivations));
    std::memset(buffers.back().data(), static_cast<int>(buffers.size()), static_cast<std::size_t>(size));
  }

  for (std::size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffers[i].data()) % 64, 0U);
    const auto* bytes = static_cast<const unsigned char*>(buffers[i].data());
    for (std::int64_t j = 0; j < buffers[i].size_bytes(); ++j) ASSERT_EQ(bytes[j], i + 1) << "buffer " << i << " byte " << j;
  }
}

TEST(Arena, LedgerCountsSixtyFourByteUnitsByCategory) {
  Arena arena;
  auto first = arena.allocate(65, kActivations);
  auto second = arena.allocate(DType::f64, {3, 5}, kGradients);
  EXPECT_EQ(current_of(arena, kActivations), 128);
  EXPECT_EQ(current_of(arena, kGradients), 128);
  EXPECT_EQ(first.size_bytes(), 65);
  EXPECT_EQ(second.size_bytes(), 120);

  first.release();
  EXPECT_EQ(current_of(arena, kActivations), 0);
  EXPECT_EQ(arena.ledger().peak_total(), 256);
  EXPECT_GE(arena.reserved_bytes(), 256);
}

TEST(Arena, EmptyBlocksHaveAnAddressAndAUnit) {
  Arena arena;
  const auto buffer = arena.allocate(DType::f32, {0, 7}, kActivations);
  EXPECT_NE(buffer.data(), nullptr);
  EXPECT_EQ(buffer.view(DType::f32, {0, 7}).num_elements(), 0);
  EXPECT_EQ(current_of(arena, kActivations), 64);
}

TEST(Arena, RepeatedStepsReserveNothingNew) {
  Arena arena;
  const auto step = [&] {
    std::vector<Arena::Buffer> kept;
    for (int i = 1; i < 40; ++i) {
      kept.push_back(arena.allocate(i * 10'007, kActivations));
      const auto scratch = arena.allocate(i * 70'001, MemoryCategory::workspace);
    }
    while (!kept.empty()) kept.pop_back();
  };
  step();
  const std::int64_t after_first = arena.reserved_bytes();

  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(arena.reserved_bytes(), after_first);
}

TEST(Arena, NeighboursJoinInWhateverOrderTheyAreReleased) {
  Arena arena;
  arena.reserve(std::int64_t{3} << 20);
  const std::int64_t reserved = arena.reserved_bytes();
  const std::int64_t third = reserved / 3 / 64 * 64;
  int order[] = {0, 1, 2};
  do {
    Arena::Buffer parts[3];
    for (auto& part : parts) part = arena.allocate(third, kActivations);
    for (const int i : order) parts[i].release();
    auto whole = arena.allocate(reserved, kActivations);
    EXPECT_EQ(arena.reserved_bytes(), reserved);
  } while (std::next_permutation(order, order + 3));
}

TEST(Arena, SameCallsGetTheSameBlocksInEveryRun) {
  const auto offsets = [] {
    Arena arena;
    const auto base = arena.allocate(64, kActivations);
    std::vector<std::ptrdiff_t> result;
    std::vector<Arena::Buffer> kept(7);
    for (std::uint32_t i = 0, state = 1; i < 200; ++i) {
      state = state * 1664525U + 1013904223U;
      kept[i % 7].release();
      kept[i % 7] = arena.allocate((state >> 16) % 5000, kActivations);
      result.push_back(static_cast<std::byte*>(kept[i % 7].data()) - static_cast<std::byte*>(base.data()));
    }
    return result;
  };
  EXPECT_EQ(offsets(), offsets());
}

TEST(Arena, MoveKeepsTheBlockAndReleasesTheOneOverwritten) {
  Arena arena;
  auto first = arena.allocate(64, kActivations);
  auto second = arena.allocate(640, kGradients);
  void* const data = first.data();

  second = std::move(first);

  EXPECT_EQ(second.data(), data);
  EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): moved-from buffers are documented to be empty
  EXPECT_EQ(current_of(arena, kGradients), 0);
  EXPECT_EQ(current_of(arena, kActivations), 64);
}

TEST(Arena, PoisonedBlocksAreNanWhenFreshAndWhenReused) {
  Arena arena({.poison = true});
  for (int round = 0; round < 2; ++round) {
    auto buffer = arena.allocate(DType::f64, {100}, kActivations);
    for (const double value : buffer.view(DType::f64, {100}).as<double>()) ASSERT_TRUE(std::isnan(value));
    for (float& value : buffer.view(DType::f32, {200}).as<float>()) {
      ASSERT_TRUE(std::isnan(value));
      value = 1;
    }
  }
}

TEST(Arena, RefusesAViewLargerThanItsBlock) {
  Arena arena;
  const auto buffer = arena.allocate(16, kActivations);
  EXPECT_NO_THROW((void)buffer.view(DType::f32, {4}));
  EXPECT_THROW((void)buffer.view(DType::f32, {5}), ContractError);
  EXPECT_THROW((void)Arena::Buffer().view(DType::f32, {0}), ContractError);
}

TEST(Arena, SaysWhenTheSystemHasNoMemory) {
  Arena arena;
  EXPECT_THROW((void)arena.allocate(std::int64_t{1} << 60, kActivations), IoError);
  EXPECT_EQ(current_of(arena, kActivations), 0);
  EXPECT_TRUE(arena.allocate(64, kActivations));
}

}  // namespace
}  // namespace tandem
