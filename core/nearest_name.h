// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// Levenshtein distance: insertions, deletions and substitutions of one character.
[[nodiscard]] std::size_t edit_distance(std::string_view left, std::string_view right);

/// The candidate that a mistyped word most likely meant: the smallest edit distance, the first of equals. Empty when the nearest
/// differs in more than a third of the word (two characters are always forgiven in words of four and more, one in shorter ones).
[[nodiscard]] std::optional<std::string> nearest_name(std::string_view word, std::span<const std::string> candidates);

}  // namespace tandem
