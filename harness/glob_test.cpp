// SPDX-License-Identifier: Apache-2.0
#include "harness/glob.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(HasForm, TakesStarsForAnythingAndTheRestLiterally) {
  EXPECT_TRUE(has_form("h.1.attn.c_proj.bias", "h.1.attn.c_proj.bias"));
  EXPECT_TRUE(has_form("h.1.attn.c_proj.bias", "h.*.c_proj.bias"));
  EXPECT_TRUE(has_form("h.1.attn.c_proj.bias", "*"));
  EXPECT_TRUE(has_form("h.1.attn.c_proj.bias", "h.*.c_*.b*s"));
  EXPECT_TRUE(has_form("abab", "*ab"));
  EXPECT_TRUE(has_form("ab", "a**b"));
  EXPECT_TRUE(has_form("", ""));
  EXPECT_TRUE(has_form("", "*"));

  EXPECT_FALSE(has_form("h.1.attn.c_proj.bias", "h.1.attn"));
  EXPECT_FALSE(has_form("h.1.attn.c_proj.bias", "*weight"));
  EXPECT_FALSE(has_form("hx1", "h.1")) << "a dot is no wildcard";
  EXPECT_FALSE(has_form("aba", "ab*ba")) << "parts do not overlap";
  EXPECT_FALSE(has_form("ab", "*ab*b"));
  EXPECT_FALSE(has_form("ab", "*a*b*c"));
  EXPECT_FALSE(has_form("a", ""));
}

}  // namespace
}  // namespace tandem
