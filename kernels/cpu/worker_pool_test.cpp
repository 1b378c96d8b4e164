// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/worker_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace tandem::cpu {
namespace {

class WorkerPoolOf : public testing::TestWithParam<int> {};

TEST_P(WorkerPoolOf, DoesEveryItemOnceCallAfterCall) {
  WorkerPool pool(GetParam());
  for (std::int64_t call = 0; call < 2000; ++call) {
    const std::int64_t count = call % 17;
    std::vector<int> done(static_cast<std::size_t>(count));  // not atomic: the pool alone must order the writes before the return
    pool.run(count, [&](std::int64_t item, int thread) {
      EXPECT_TRUE(thread >= 0 && thread < GetParam());
      ++done[static_cast<std::size_t>(item)];
    });
    ASSERT_TRUE(std::all_of(done.begin(), done.end(), [](int times) { return times == 1; })) << "call " << call;
  }
}

TEST_P(WorkerPoolOf, PiecesCoverTheRange) {
  WorkerPool pool(GetParam());
  std::vector<int> covered(1001);
  pool.run_pieces(1001, 64, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) ++covered[static_cast<std::size_t>(i)];
  });
  EXPECT_EQ(std::accumulate(covered.begin(), covered.end(), 0), 1001);
  EXPECT_EQ(*std::max_element(covered.begin(), covered.end()), 1);
}

TEST_P(WorkerPoolOf, ThrowsWhatABodyThrewAndGoesOn) {
  WorkerPool pool(GetParam());
  const auto run = [&](std::int64_t thrower) {
    pool.run(50, [&](std::int64_t item, int) {
      if (item == thrower) throw std::runtime_error("item " + std::to_string(item));
    });
  };
  for (std::int64_t thrower = 0; thrower < 50; ++thrower) EXPECT_THROW(run(thrower), std::runtime_error);
  EXPECT_NO_THROW(run(-1));
}

INSTANTIATE_TEST_SUITE_P(Threads, WorkerPoolOf, testing::Values(1, 2, 3, 5));

TEST(WorkerPool, ItemsRunAtTheSameTime) {
  WorkerPool pool(3);
  std::latch all_here(3);  // passed only if three threads are inside an item at once
  std::vector<int> threads(3, -1);
  pool.run(3, [&](std::int64_t item, int thread) {
    all_here.arrive_and_wait();
    threads[static_cast<std::size_t>(item)] = thread;
  });
  std::sort(threads.begin(), threads.end());
  EXPECT_EQ(threads, (std::vector<int>{0, 1, 2}));
}

TEST(WorkerPool, UnusedPoolsEnd) {
  for (int i = 0; i < 20; ++i) WorkerPool pool(4);
}

}  // namespace
}  // namespace tandem::cpu
