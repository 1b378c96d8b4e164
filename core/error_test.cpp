// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"

#include <string>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Check, NamesFileLineAndCondition) {
  const int rows = 3;
  const int line = __LINE__ + 2;
  try {
    TANDEM_CHECK(rows == 4);
    FAIL() << "no error";
  } catch (const ContractError& error) {
    EXPECT_EQ(error.what(), "error_test.cpp:" + std::to_string(line) + ": rows == 4 does not hold");
  }
}

TEST(Check, PutsTheTextFirst) {
  try {
    TANDEM_CHECK(1 > 2, std::string("rows are 3"));
    FAIL() << "no error";
  } catch (const ContractError& error) {
    EXPECT_NE(std::string(error.what()).find(": rows are 3 (1 > 2 does not hold)"), std::string::npos) << error.what();
  }
}

TEST(Check, DoesNotMakeTheTextWhileTheConditionHolds) {
  int made = 0;
  const auto text = [&] {
    ++made;
    return std::string("text");
  };
  TANDEM_CHECK(made == 0, text());
  EXPECT_EQ(made, 0);
  EXPECT_THROW(TANDEM_CHECK(made == 1, text()), ContractError);
  EXPECT_EQ(made, 1);
}

TEST(Check, IsOneStatement) {
  bool reached = false;
  if (reached)
    TANDEM_CHECK(false);
  else
    reached = true;
  EXPECT_TRUE(reached);
}

TEST(PeerError, NamesTheRankAndIsAnError) {
  try {
    throw PeerError(3, "rank 3 aborted");
  } catch (const Error& error) {
    const auto* peer = dynamic_cast<const PeerError*>(&error);
    ASSERT_NE(peer, nullptr);
    EXPECT_EQ(peer->rank(), 3);
    EXPECT_STREQ(peer->what(), "rank 3 aborted");
  }
}

}  // namespace
}  // namespace tandem
