// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/chakra_wire.h"

namespace tandem {
namespace {

enum WireType : std::uint8_t { kVarint = 0, kLengthDelimited = 2 };

// Seven bits a byte, lowest first; the highest bit says that more follow.
void append_varint(std::string& bytes, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>((value & 0x7f) | 0x80));
  bytes.push_back(static_cast<char>(value));
}

void append_key(std::string& bytes, int field, WireType type) {
  append_varint(bytes, static_cast<std::uint64_t>(field) << 3 | type);
}

}  // namespace

void WireMessage::varint(int field, std::uint64_t value) {
  append_key(bytes_, field, kVarint);
  append_varint(bytes_, value);
}

void WireMessage::text(int field, std::string_view value) {
  append_key(bytes_, field, kLengthDelimited);
  append_varint(bytes_, value.size());
  bytes_ += value;
}

void WireMessage::packed(int field, std::span<const std::uint64_t> values) {
  if (values.empty()) return;
  std::string list;
  for (const std::uint64_t value : values) append_varint(list, value);
  text(field, list);
}

std::string WireMessage::delimited() const {
  std::string result;
  append_varint(result, bytes_.size());
  return result + bytes_;
}

}  // namespace tandem
