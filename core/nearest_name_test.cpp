// SPDX-License-Identifier: Apache-2.0
#include "core/nearest_name.h"

#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsAndSubstitutions) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("abc", ""), 3U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("flaw", "lawn"), 2U);
}

TEST(NearestName, FindsTheWordThatWasMeant) {
  const std::vector<std::string> words = {"layers", "hidden", "heads"};

  EXPECT_EQ(nearest_name("hiden", words), "hidden");
  EXPECT_EQ(nearest_name("layer", words), "layers");
  EXPECT_EQ(nearest_name("heads", words), "heads");
}

TEST(NearestName, SaysNothingWhereNoWordIsNear) {
  const std::vector<std::string> words = {"layers", "hidden"};

  EXPECT_FALSE(nearest_name("optimizer", words).has_value());
  EXPECT_FALSE(nearest_name("x", words).has_value());
  EXPECT_FALSE(nearest_name("layers", {}).has_value());
}

TEST(NearestName, TakesTheFirstOfEquallyNearWords) {
  const std::vector<std::string> words = {"beta1", "beta2"};

  EXPECT_EQ(nearest_name("beta", words), "beta1");
}

}  // namespace
}  // namespace tandem
