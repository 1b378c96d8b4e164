// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"

#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

bool eight_ascii(const char* from) noexcept {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof(word));
  return (word & 0x8080808080808080ULL) == 0;
}

/// Length of the character that starts at `at`, 0 when it is not one. Table 3-7 of the Unicode standard: the first byte fixes the
/// length and the range of the second byte (which excludes overlong forms, surrogates and what lies above U+10FFFF).
std::size_t character_bytes(std::string_view text, std::size_t at) noexcept {
  const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (at + length > text.size()) return 0;
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(at + 1) < low || byte(at + 1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (byte(at + i) < 0x80 || byte(at + i) > 0xBF) return 0;
  }
  return length;
}

}  // namespace

std::optional<std::size_t> first_invalid_utf8(std::string_view text) noexcept {
  std::size_t at = 0;
  while (at < text.size()) {
    if (at + 8 <= text.size() && eight_ascii(text.data() + at)) {
      at += 8;
      continue;
    }
    const std::size_t length = character_bytes(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

void require_text(std::string_view text, std::string_view source, std::size_t offset) {
  const std::optional<std::size_t> invalid = first_invalid_utf8(text);
  const std::size_t nul = text.find('\0');
  if (nul != std::string_view::npos && (!invalid || nul < *invalid)) {
    throw InputError(fmt::format("{} is not text: byte 0x00 at offset {}; is it a binary file?", source, offset + nul));
  }
  if (invalid) {
    throw InputError(fmt::format("{} is not UTF-8: byte 0x{:02x} at offset {}; convert it (iconv -t UTF-8) or name another file",
                                 source, static_cast<unsigned char>(text[*invalid]), offset + *invalid));
  }
}

}  // namespace tandem
