// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/exchange.h"

#include <gtest/gtest.h>

#include <mutex>

#include "optimized/comm/world.h"

namespace tandem {
namespace {

TEST(Exchange, EveryRankGetsTheBytesOfAllInOrder) {
  std::mutex mutex;
  std::vector<std::vector<std::string>> seen;

  run_world({.ranks = 4}, [&](Communicator& comm) {
    // Of different lengths, one of them empty, one with a zero in it.
    const std::vector<std::string> parts = {"a", "", std::string("x\0y", 3), std::string(10000, 'z')};
    auto all = all_gather_bytes(comm, parts[static_cast<std::size_t>(comm.rank())]);
    const std::scoped_lock lock(mutex);
    seen.push_back(std::move(all));
  });

  ASSERT_EQ(seen.size(), 4U);
  for (const auto& all : seen) {
    EXPECT_EQ(all, (std::vector<std::string>{"a", "", std::string("x\0y", 3), std::string(10000, 'z')}));
  }
}

TEST(Exchange, AProcessWithoutAJobIsAlone) {
  EXPECT_EQ(all_gather_bytes(WorldSettings(), "own"), std::vector<std::string>{"own"});
}

}  // namespace
}  // namespace tandem
