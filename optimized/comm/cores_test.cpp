// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/cores.h"

#include <mutex>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "core/usable_cores.h"
#include "optimized/comm/world.h"

namespace tandem {
namespace {

using Cores = std::vector<int>;

TEST(ShareOfCores, DealsAllCoresInContiguousParts) {
  const Cores cores = {0, 1, 2, 3, 8, 9, 10};
  EXPECT_EQ(share_of_cores(cores, 3, 0), (Cores{0, 1, 2}));
  EXPECT_EQ(share_of_cores(cores, 3, 1), (Cores{3, 8}));
  EXPECT_EQ(share_of_cores(cores, 3, 2), (Cores{9, 10}));
}

TEST(ShareOfCores, GivesEachCoreAnEqualNumberOfRanks) {
  const Cores cores = {4, 6};
  EXPECT_EQ(share_of_cores(cores, 4, 0), Cores{4});
  EXPECT_EQ(share_of_cores(cores, 4, 1), Cores{6});
  EXPECT_EQ(share_of_cores(cores, 4, 3), Cores{6});
}

TEST(ShareOfCores, LeavesUnevenCasesAndOneRankToTheSystem) {
  const Cores cores = {0, 1};
  EXPECT_EQ(share_of_cores(cores, 3, 0), Cores{});
  EXPECT_EQ(share_of_cores(cores, 1, 0), Cores{});
  EXPECT_EQ(share_of_cores({}, 2, 0), Cores{});
}

TEST(CoreBinding, HoldsDuringTheWorldAndIsUndoneAfterwards) {
  const Cores before = available_cores();
  if (before.size() < 2) GTEST_SKIP() << "needs 2 cores, found " << before.size();
  std::mutex mutex;
  std::multiset<int> used;

  run_world({.ranks = 2}, [&](Communicator&) {
    const std::scoped_lock lock(mutex);
    for (const int core : available_cores()) used.insert(core);
  });

  EXPECT_EQ(used, std::multiset<int>(before.begin(), before.end()));
  EXPECT_EQ(available_cores(), before);
}

TEST(CoreBinding, IsOffWhereTheOptionsSaySo) {
  const Cores before = available_cores();
  run_world({.ranks = 2, .bind_cores = false}, [&](Communicator&) { EXPECT_EQ(available_cores(), before); });
}

}  // namespace
}  // namespace tandem
