// SPDX-License-Identifier: Apache-2.0
// The closed forms are held against schedules written out and played through, operation by operation.
#include "reference/pipeline_schedules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

struct Work {
  char kind;  // F forward, I input part of backward, W its weight part
  int chunk;
  int micro_batch;
};
using Order = std::vector<Work>;

/// Backward passes whose weight part follows its input part at once.
void add_backward(Order& order, int chunk, int micro_batch) {
  order.push_back({'I', chunk, micro_batch});
  order.push_back({'W', chunk, micro_batch});
}

Order gpipe(PipelineSize size) {
  Order order;
  for (int i = 0; i < size.micro_batches; ++i) order.push_back({'F', 0, i});
  for (int i = 0; i < size.micro_batches; ++i) add_backward(order, 0, i);
  return order;
}

/// Warm-up forwards, then a forward and a backward in turn, then the remaining backwards. Micro-batches go through the chunks in
/// rounds of p: 0..p-1 through chunk 0, then through chunk 1, ...; 1f1b is the case of one chunk.
Order one_forward_one_backward(PipelineSize size, int rank) {
  const int p = size.ranks;
  const int v = size.chunks;
  const int all = v * size.micro_batches;
  const int warm_up = v == 1 ? std::min(all, p - rank - 1) : std::min(all, 2 * (p - rank - 1) + (v - 1) * p);
  const int round = v == 1 ? 1 : p;
  const auto micro_batch = [&](int k) { return k / (round * v) * round + k % round; };
  const auto chunk = [&](int k) { return k / round % v; };
  Order order;
  int backward = 0;
  for (int k = 0; k < all + warm_up; ++k) {
    if (k < all) order.push_back({'F', chunk(k), micro_batch(k)});
    if (k < warm_up) continue;
    add_backward(order, v - 1 - chunk(backward), micro_batch(backward));
    ++backward;
  }
  return order;
}

/// As 1f1b, the weight parts of rank r lagging r micro-batches behind.
Order zero_bubble_h1(PipelineSize size, int rank) {
  Order order;
  int forward = 0;
  int weight = 0;
  for (; forward < std::min(size.micro_batches, size.ranks - rank); ++forward) order.push_back({'F', 0, forward});
  for (int i = 0; i < size.micro_batches; ++i) {
    order.push_back({'I', 0, i});
    if (i >= rank) order.push_back({'W', 0, weight++});
    if (forward < size.micro_batches) order.push_back({'F', 0, forward++});
  }
  while (weight < size.micro_batches) order.push_back({'W', 0, weight++});
  return order;
}

Order order_of(const std::string& schedule, PipelineSize size, int rank) {
  if (schedule == "gpipe") return gpipe(size);
  if (schedule == "zb-h1") return zero_bubble_h1(size, rank);
  return one_forward_one_backward(size, rank);
}

/// Plays all ranks' orders, every operation starting as soon as its rank is free and what it needs is done.
class Playback {
 public:
  Playback(const std::string& schedule, PipelineSize size, PipelineTimes times)
      : size_(size), times_(times), splits_backward_(schedule == "zb-h1") {
    for (int r = 0; r < size.ranks; ++r) orders_.push_back(order_of(schedule, size, r));
    std::vector<std::size_t> next(orders_.size(), 0);
    std::vector<double> free(orders_.size(), 0.0);
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < orders_.size(); ++r) {
        while (next[r] < orders_[r].size() && ready(static_cast<int>(r), orders_[r][next[r]], free[r])) {
          ++next[r];
          moved = true;
        }
      }
    }
    for (std::size_t r = 0; r < orders_.size(); ++r) complete_ = complete_ && next[r] == orders_[r].size();
    end_ = *std::max_element(free.begin(), free.end());
  }

  [[nodiscard]] bool complete() const { return complete_; }
  [[nodiscard]] double idle_time() const { return end_ - size_.micro_batches * times_.work(); }
  [[nodiscard]] std::int64_t peak_in_flight(int rank) const {
    std::int64_t now = 0;
    std::int64_t peak = 0;
    for (const Work& work : orders_[static_cast<std::size_t>(rank)]) {
      now += work.kind == 'F' ? 1 : work.kind == 'W' ? -1 : 0;
      peak = std::max(peak, now);
    }
    return peak;
  }

 private:
  using Done = std::tuple<char, int, int>;  // kind, stage, micro-batch

  bool ready(int rank, const Work& work, double& free) {
    const int stage = work.chunk * size_.ranks + rank;
    const int last = size_.ranks * size_.chunks - 1;
    std::vector<Done> needs;
    if (work.kind == 'F' && stage > 0) needs.emplace_back('F', stage - 1, work.micro_batch);
    if (work.kind == 'I') needs.emplace_back('F', stage, work.micro_batch);
    if (work.kind == 'I' && stage < last) needs.emplace_back(input_done(), stage + 1, work.micro_batch);
    if (work.kind == 'W') needs.emplace_back('I', stage, work.micro_batch);
    double start = free;
    for (const Done& need : needs) {
      const auto found = done_.find(need);
      if (found == done_.end()) return false;
      start = std::max(start, found->second);
    }
    const double duration = work.kind == 'F' ? times_.forward : work.kind == 'I' ? times_.input_backward : times_.weight_backward;
    free = start + duration / size_.chunks;
    done_[{work.kind, stage, work.micro_batch}] = free;
    return true;
  }
  /// Where backward is not split, its input gradient leaves when all of it is done.
  [[nodiscard]] char input_done() const { return splits_backward_ ? 'I' : 'W'; }

  PipelineSize size_;
  PipelineTimes times_;
  bool splits_backward_;
  std::vector<Order> orders_;
  std::map<Done, double> done_;
  double end_ = 0.0;
  bool complete_ = true;
};

struct Played {
  std::string schedule;
  int chunks;
};

class Schedules : public testing::TestWithParam<Played> {
 protected:
  template <class Body>
  void for_each_size(const Body& body) const {
    for (const int ranks : {1, 2, 3, 4, 6}) {
      for (const int rounds : {1, 2, 3}) {
        for (const int more : {0, 1}) {
          const PipelineSize size{ranks, GetParam().chunks, ranks * rounds + more};
          if (more == 1 && GetParam().schedule == "interleaved") continue;
          if (ranks == 1 && GetParam().schedule == "interleaved") continue;
          SCOPED_TRACE(fmt::format("{} ranks, {} micro-batches", size.ranks, size.micro_batches));
          body(size);
        }
      }
    }
  }
};

TEST_P(Schedules, IdleAsTheClosedFormSays) {
  for_each_size([&](PipelineSize size) {
    for (const PipelineTimes times : {PipelineTimes{1, 1, 1}, PipelineTimes{2, 2, 1}, PipelineTimes{1, 1.25, 0.75}}) {
      const Playback played(GetParam().schedule, size, times);
      ASSERT_TRUE(played.complete()) << "deadlock";
      EXPECT_NEAR(played.idle_time(), pipeline_idle_time(GetParam().schedule, size, times), 1e-9);
    }
  });
}

TEST_P(Schedules, KeepAsManyActivationsAsTheClosedFormSays) {
  for_each_size([&](PipelineSize size) {
    const Playback played(GetParam().schedule, size, {});
    for (int r = 0; r < size.ranks; ++r) {
      EXPECT_EQ(played.peak_in_flight(r), pipeline_peak_in_flight(GetParam().schedule, size, r)) << "rank " << r;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Closed, Schedules,
                         testing::Values(Played{"gpipe", 1}, Played{"1f1b", 1}, Played{"interleaved", 2},
                                         Played{"interleaved", 3}, Played{"zb-h1", 1}),
                         [](const auto& instance) {
                           std::string name = fmt::format("{}_{}", instance.param.schedule, instance.param.chunks);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(PipelineSchedules, HaveTheBubbleSharesOfTheFormula) {
  EXPECT_DOUBLE_EQ(pipeline_bubble_share("gpipe", {4, 1, 8}), 3.0 / 11.0);
  EXPECT_DOUBLE_EQ(pipeline_bubble_share("1f1b", {4, 1, 8}, {1, 2, 3}), 3.0 / 11.0);
  EXPECT_DOUBLE_EQ(pipeline_bubble_share("interleaved", {4, 2, 8}), 3.0 / 19.0);
  EXPECT_DOUBLE_EQ(pipeline_bubble_share("zb-h1", {4, 1, 8}), 3.0 / 27.0) << "idle 3 beside 8 micro-batches of 3";
  EXPECT_DOUBLE_EQ(pipeline_bubble_share("1f1b", {1, 1, 8}), 0.0);
}

TEST(PipelineSchedules, RefuseWhatTheClosedFormsDoNotCover) {
  EXPECT_THROW(static_cast<void>(pipeline_idle_time("round-robin", {4, 1, 8}, {})), ContractError);
  EXPECT_THROW(static_cast<void>(pipeline_idle_time("1f1b", {4, 2, 8}, {})), ContractError) << "chunks";
  EXPECT_THROW(static_cast<void>(pipeline_idle_time("interleaved", {4, 2, 6}, {})), ContractError) << "a round is not full";
  EXPECT_THROW(static_cast<void>(pipeline_idle_time("zb-h1", {4, 1, 3}, {})), ContractError) << "too few micro-batches";
  EXPECT_THROW(static_cast<void>(pipeline_idle_time("zb-h1", {4, 1, 8}, {1, 1, 2})), ContractError) << "W does not fit";
}

}  // namespace
}  // namespace tandem::reference
