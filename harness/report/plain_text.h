// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tandem {

/// `text` as XML and gnuplot can carry it: UTF-8 without control characters, which become spaces; what is no UTF-8 becomes '?'.
[[nodiscard]] std::string printable(std::string_view text);
/// printable(), of at most `most` characters: what is too long loses its middle.
[[nodiscard]] std::string shortened(std::string_view text, std::size_t most);
/// printable(), safe as text and in attributes of HTML and XML.
[[nodiscard]] std::string escaped(std::string_view text);

}  // namespace tandem
