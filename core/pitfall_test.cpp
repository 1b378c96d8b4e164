// SPDX-License-Identifier: Apache-2.0
#include "core/pitfall.h"

#include <set>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Pitfall, NamesAreDistinctAndFoundAgain) {
  std::set<std::string_view> names;
  for (const Pitfall pitfall : all_pitfalls()) {
    EXPECT_TRUE(names.insert(name(pitfall)).second) << name(pitfall);
    EXPECT_EQ(find_pitfall(name(pitfall)), pitfall);
  }
  EXPECT_EQ(names.size(), kPitfalls);
  EXPECT_FALSE(find_pitfall("no_such_pitfall").has_value());
  EXPECT_FALSE(find_pitfall("").has_value());
}

TEST(PitfallSet, HasNothingOnByDefault) {
  const PitfallSet set;
  EXPECT_FALSE(set.any());
  EXPECT_TRUE(set.list().empty());
  for (const Pitfall pitfall : all_pitfalls()) EXPECT_FALSE(set.on(pitfall));
}

TEST(PitfallSet, HoldsExactlyWhatItWasGiven) {
  const std::vector<Pitfall> chosen = {Pitfall::verdict_of_rank_zero, Pitfall::all_reduce_dropped};
  const PitfallSet set(chosen);

  EXPECT_TRUE(set.any());
  EXPECT_EQ(set.list(), (std::vector<Pitfall>{Pitfall::all_reduce_dropped, Pitfall::verdict_of_rank_zero}));
  for (const Pitfall pitfall : all_pitfalls()) {
    const bool expected = pitfall == Pitfall::all_reduce_dropped || pitfall == Pitfall::verdict_of_rank_zero;
    EXPECT_EQ(set.on(pitfall), expected) << name(pitfall);
  }
}

}  // namespace
}  // namespace tandem
