// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// A message of the protocol buffers wire format, field by field: base-128 varints, and what has a length before it.
class WireMessage {
 public:
  void varint(int field, std::uint64_t value);
  void text(int field, std::string_view value);
  void message(int field, const WireMessage& value) { text(field, value.bytes_); }
  /// repeated of a varint type, packed; nothing where it is empty.
  void packed(int field, std::span<const std::uint64_t> values);

  /// The message with its length before it, as files of several messages have it.
  [[nodiscard]] std::string delimited() const;

 private:
  std::string bytes_;
};

}  // namespace tandem
