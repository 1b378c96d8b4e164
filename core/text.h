// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace tandem {

/// Offset of the first byte at which `text` stops being UTF-8 (RFC 3629: no overlong form, no surrogate, nothing above U+10FFFF,
/// no cut character at the end); empty when it is UTF-8 throughout. The offset is that of the bad character's first byte.
[[nodiscard]] std::optional<std::size_t> first_invalid_utf8(std::string_view text) noexcept;

/// Throws InputError unless `text` is UTF-8 without NUL bytes; the message has `source` (a file name), the byte and its offset,
/// `text` beginning at `offset`.
void require_text(std::string_view text, std::string_view source, std::size_t offset = 0);

}  // namespace tandem
