// SPDX-License-Identifier: Apache-2.0
// What goes on at the same time: copies beside updates, failures of either, and the record of both.
#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/zero/host_offload_test_support.h"

namespace tandem {
namespace {

using namespace tandem::offload_test;

// Events that threads wait for; a wait that nobody fulfils ends the test instead of the patience of who runs it.
class Events {
 public:
  void happen(const std::string& event) {
    const std::scoped_lock lock(mutex_);
    happened_.insert(event);
    order_.push_back(event);
    changed_.notify_all();
  }
  bool await(const std::string& event) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return happened_.contains(event); });
  }
  [[nodiscard]] std::vector<std::string> order() const {
    const std::scoped_lock lock(mutex_);
    return order_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::string> happened_;
  std::vector<std::string> order_;
};

// Says which chunk of `chunk_elements` a copy moves, and where to: "in 3", "back 2".
class CopyNames {
 public:
  explicit CopyNames(std::int64_t chunk_elements) : chunk_elements_(chunk_elements) {}
  void set_host(TensorView host) { host_ = host; }

  [[nodiscard]] std::string name_of(const TensorView& from, const TensorView& to) const {
    return lies_in_host(from) ? "in " + chunk_of(from) : "back " + chunk_of(to);
  }

 private:
  [[nodiscard]] bool lies_in_host(const TensorView& view) const {
    return offset_of(view) >= 0 && offset_of(view) < host_.size_bytes();
  }
  [[nodiscard]] std::int64_t offset_of(const TensorView& view) const {
    // Blocks of two arenas: compared as addresses, because they belong to different objects.
    return static_cast<std::int64_t>(std::bit_cast<std::uintptr_t>(view.data()) - std::bit_cast<std::uintptr_t>(host_.data()));
  }
  [[nodiscard]] std::string chunk_of(const TensorView& view) const {
    return std::to_string(offset_of(view) / 4 / chunk_elements_);
  }

  std::int64_t chunk_elements_;
  TensorView host_;
};

struct Watched {
  explicit Watched(std::int64_t elements, std::int64_t chunk_elements) : names(chunk_elements), segments{{0, elements}} {
    options = options_of(elements, chunk_elements, 1);
  }
  Events events;
  CopyNames names;
  std::vector<Interval> segments;
  HostOffloadOptions options;
  Arena device, host;
};

constexpr std::int64_t kWatchedChunk = 16;
constexpr int kWatchedChunks = 5;

// Each update lasts until the copies that should go on beside it have ended: without overlap, it would last for ever.
TEST(HostOffloadOverlap, CopiesTheNextAndThePreviousChunkDuringAnUpdate) {
  Watched watched(kWatchedChunk * kWatchedChunks, kWatchedChunk);
  watched.options.copy = [&](TensorView from, TensorView to) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.size_bytes()));
    watched.events.happen(watched.names.name_of(from, to));
  };
  HostOffload offload(watched.device, watched.host, watched.options);
  watched.names.set_host(offload.host(0));

  offload.for_each_chunk(
      watched.segments,
      [&](const OffloadedPart& part) {
        const auto index = part.elements.begin / kWatchedChunk;
        if (index > 0) {
          ASSERT_TRUE(watched.events.await("back " + std::to_string(index - 1)));
        }
        if (index + 1 < kWatchedChunks) {
          ASSERT_TRUE(watched.events.await("in " + std::to_string(index + 1)));
        }
        watched.events.happen("updated " + std::to_string(index));
      },
      nullptr);

  const std::vector<std::string> expected = {"in 0",      "in 1",      "updated 0", "back 0",    "in 2",
                                             "updated 1", "back 1",    "in 3",      "updated 2", "back 2",
                                             "in 4",      "updated 3", "back 3",    "updated 4", "back 4"};
  EXPECT_EQ(watched.events.order(), expected);
}

// Each copy of a later chunk lasts until the update before it has ended: the update does not wait for more than its own chunk.
TEST(HostOffloadOverlap, AnUpdateDoesNotWaitForSlowCopiesOfOtherChunks) {
  Watched watched(kWatchedChunk * kWatchedChunks, kWatchedChunk);
  watched.options.copy = [&](TensorView from, TensorView to) {
    const std::string copy = watched.names.name_of(from, to);
    for (int i = 1; i < kWatchedChunks; ++i) {
      if (copy == "in " + std::to_string(i) && !watched.events.await("updated " + std::to_string(i - 1))) {
        throw std::runtime_error(copy + " waited in vain");
      }
    }
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.size_bytes()));
    watched.events.happen(copy);
  };
  HostOffload offload(watched.device, watched.host, watched.options);
  watched.names.set_host(offload.host(0));

  offload.for_each_chunk(
      watched.segments,
      [&](const OffloadedPart& part) { watched.events.happen("updated " + std::to_string(part.elements.begin / kWatchedChunk)); },
      nullptr);

  const std::vector<std::string> order = watched.events.order();
  const auto place = [&](const std::string& event) { return std::ranges::find(order, event) - order.begin(); };
  ASSERT_EQ(order.size(), 3U * kWatchedChunks);
  for (int i = 0; i < kWatchedChunks; ++i) {
    const std::string n = std::to_string(i);
    EXPECT_LT(place("in " + n), place("updated " + n));
    EXPECT_LT(place("updated " + n), place("back " + n));
    if (i >= 2) {
      EXPECT_LT(place("back " + std::to_string(i - 2)), place("in " + n)) << "they share a buffer";
    }
  }
}

TEST(HostOffloadOverlap, PassesOnWhatACopyThrowsAndWorksAgain) {
  for (int fails_at = 1; fails_at <= 2 * 3 * 4; ++fails_at) {
    int left = fails_at;  // of the transfer thread while an update runs
    HostOffloadOptions options = options_of(40, 10);
    options.copy = [&](TensorView from, TensorView to) {
      if (--left == 0) throw IoError("the bus is broken");
      std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.size_bytes()));
    };
    const std::vector<Interval> segments = {{0, 40}};
    Arena device;
    Arena host;
    HostOffload offload(device, host, options);
    fill(offload, 3, 40);
    const auto update = [](const OffloadedPart& part) { update_part(part, 0); };

    EXPECT_THROW(offload.for_each_chunk(segments, update, nullptr), IoError) << fails_at;
    EXPECT_EQ(current_of(device, MemoryCategory::workspace), 0);

    fill(offload, 3, 40);
    offload.for_each_chunk(segments, update, nullptr);
    const auto master = offload.host(0).as<float>();
    EXPECT_TRUE(same_bits({Values(master.begin(), master.end())}, {in_place(40, segments, 1)[0]})) << fails_at;
  }
}

TEST(HostOffloadOverlap, PassesOnWhatAnUpdateThrowsAndWorksAgain) {
  constexpr std::int64_t kElements = 1000;
  const std::vector<Interval> segments = {{0, kElements}};
  Arena device({.poison = true});
  Arena host;
  HostOffload offload(device, host, options_of(kElements, 100));
  fill(offload, 3, kElements);
  const auto throws_at = [&](std::int64_t begin) {
    return [begin](const OffloadedPart& part) {
      if (part.elements.begin == begin) throw std::runtime_error("update failed");
      update_part(part, 0);
    };
  };

  EXPECT_THROW(offload.for_each_chunk(segments, throws_at(500), nullptr), std::runtime_error);
  EXPECT_EQ(current_of(device, MemoryCategory::workspace), 0);
  const auto master = offload.host(0).as<float>();
  for (std::size_t i = 500; i < kElements; ++i) ASSERT_EQ(master[i], initial(0, static_cast<std::int64_t>(i)));

  fill(offload, 3, kElements);
  offload.for_each_chunk(segments, throws_at(-1), nullptr);
  EXPECT_TRUE(same_bits({Values(master.begin(), master.end())}, {in_place(kElements, segments, 1)[0]}));
}

TEST(HostOffloadOverlap, RecordsUpdatesWaitsAndTransfers) {
  Arena device;
  Arena host;
  HostOffload offload(device, host, options_of(50, 10));
  fill(offload, 3, 50);
  Timeline timeline;
  const std::vector<Interval> segments = {{0, 50}};
  offload.for_each_chunk(
      segments, [](const OffloadedPart& part) { update_part(part, 0); }, &timeline, 7);

  std::int64_t updates = 0, transfers = 0, waits = 0, waited_ns = 0, transferred_ns = 0;
  for (const Span& span : timeline.spans()) {
    EXPECT_EQ(span.step, 7);
    EXPECT_EQ(span.bytes, 0) << "nothing is on the wire";
    EXPECT_EQ(span.lane, span.activity == Activity::transfer ? Lane::communication : Lane::compute);
    updates += span.activity == Activity::optimizer ? 1 : 0;
    transfers += span.activity == Activity::transfer ? 1 : 0;
    waits += span.activity == Activity::wait ? 1 : 0;
    if (span.activity == Activity::wait) waited_ns += span.end_ns - span.begin_ns;
    if (span.activity == Activity::transfer) transferred_ns += span.end_ns - span.begin_ns;
  }
  EXPECT_EQ(updates, 5);
  EXPECT_EQ(transfers, 10);
  EXPECT_EQ(waits, 6);
  const OffloadTraffic& traffic = offload.traffic();
  EXPECT_EQ(traffic.bytes_to_device, 3 * 50 * 4);
  EXPECT_EQ(traffic.bytes_to_host, 3 * 50 * 4);
  EXPECT_EQ(traffic.transfer_ns, transferred_ns);
  EXPECT_EQ(traffic.exposed_ns, waited_ns);
  EXPECT_GT(transferred_ns, 0);
}

}  // namespace
}  // namespace tandem
