// SPDX-License-Identifier: Apache-2.0
#include "harness/report/plain_text.h"

#include "core/text.h"

namespace tandem {
namespace {

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// The byte offset of character `index`, or the end.
std::size_t offset_of(std::string_view text, std::size_t index) {
  std::size_t at = 0;
  for (; at < text.size(); ++at) {
    if (!continues(text[at]) && index-- == 0) break;
  }
  return at;
}

std::size_t num_characters(std::string_view text) {
  std::size_t count = 0;
  for (const char c : text) count += continues(c) ? 0 : 1;
  return count;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out(text);
  for (std::size_t begin = 0; begin < out.size();) {
    const auto invalid = first_invalid_utf8(std::string_view(out).substr(begin));
    if (!invalid) break;
    begin += *invalid;
    out[begin] = '?';
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto byte = static_cast<unsigned char>(out[i]);
    if (byte < 0x20 || byte == 0x7F) out[i] = ' ';
    // U+FFFE and U+FFFF are UTF-8, but no characters of XML.
    if (byte == 0xEF && (out.compare(i, 3, "\xEF\xBF\xBE") == 0 || out.compare(i, 3, "\xEF\xBF\xBF") == 0))
      out.replace(i, 3, "?");
  }
  return out;
}

std::string shortened(std::string_view text, std::size_t most) {
  const std::string whole = printable(text);
  const std::size_t count = num_characters(whole);
  if (count <= most || most < 3) return whole;
  const std::size_t tail = most / 2, head = most - 1 - tail;
  return whole.substr(0, offset_of(whole, head)) + "…" + whole.substr(offset_of(whole, count - tail));
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : printable(text)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

}  // namespace tandem
