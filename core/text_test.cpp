// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "core/io/test_folder.h"

namespace tandem {
namespace {

using namespace std::string_literals;

std::string encode(std::uint32_t code_point) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80U | (code_point >> shift & 0x3FU)); };
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  if (code_point < 0x800) return {static_cast<char>(0xC0U | code_point >> 6), tail(0)};
  if (code_point < 0x10000) return {static_cast<char>(0xE0U | code_point >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0U | code_point >> 18), tail(12), tail(6), tail(0)};
}

TEST(Utf8, AcceptsEveryCodePointButSurrogates) {
  for (std::uint32_t code_point = 0; code_point <= 0x10FFFF; ++code_point) {
    const bool surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
    ASSERT_EQ(first_invalid_utf8(encode(code_point)).has_value(), surrogate) << std::hex << code_point;
  }
}

TEST(Utf8, FindsTheFirstBadByteBehindLongText) {
  for (std::size_t before : {0U, 1U, 7U, 8U, 9U, 1000U}) {
    EXPECT_EQ(first_invalid_utf8(std::string(before, 'a') + "\xFF" + "tail of text"), before);
    EXPECT_EQ(first_invalid_utf8(std::string(before, 'a') + "\xC3\xA9" + "\x80"), before + 2);
  }
}

TEST(Utf8, RefusesOverlongForms) {
  EXPECT_EQ(first_invalid_utf8("\xC0\x80"), 0U);
  EXPECT_EQ(first_invalid_utf8("\xC1\xBF"), 0U);
  EXPECT_EQ(first_invalid_utf8("\xE0\x9F\xBF"), 0U);
  EXPECT_EQ(first_invalid_utf8("\xF0\x8F\xBF\xBF"), 0U);
}

TEST(Utf8, RefusesWhatLiesAboveTheLastCodePoint) {
  EXPECT_EQ(first_invalid_utf8("\xF4\x90\x80\x80"), 0U);
  EXPECT_EQ(first_invalid_utf8("\xF5\x80\x80\x80"), 0U);
}

TEST(Utf8, RefusesACharacterCutAtTheEnd) {
  EXPECT_EQ(first_invalid_utf8("ab\xC3"), 2U);
  EXPECT_EQ(first_invalid_utf8("ab\xE2\x82"), 2U);
  EXPECT_EQ(first_invalid_utf8("ab\xF0\x9F\x98"), 2U);
}

TEST(Utf8, RefusesACharacterWithAWrongByteInside) {
  EXPECT_EQ(first_invalid_utf8("\xE2\x82x"), 0U);
  EXPECT_EQ(first_invalid_utf8("\xF0\x9F\x98x"), 0U);
}

TEST(RequireText, NamesSourceByteAndOffset) {
  EXPECT_EQ(message_of<InputError>([] { require_text("abc\xFFz", "a.txt"); }),
            "a.txt is not UTF-8: byte 0xff at offset 3; convert it (iconv -t UTF-8) or name another file");
}

TEST(RequireText, TakesANulByteForABinaryFile) {
  EXPECT_EQ(message_of<InputError>([] { require_text("ELF\0\xFF"s, "a.out"); }),
            "a.out is not text: byte 0x00 at offset 3; is it a binary file?");
}

TEST(RequireText, AcceptsText) { EXPECT_NO_THROW(require_text("Zürich, 東京\n", "a.txt")); }

}  // namespace
}  // namespace tandem
