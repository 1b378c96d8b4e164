// SPDX-License-Identifier: Apache-2.0
#include "core/nearest_name.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tandem {

std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);  // distances of left[0, i) to every prefix of right
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= left.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= right.size(); ++j) {
      const std::size_t substituted = diagonal + (left[i - 1] == right[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

std::optional<std::string> nearest_name(std::string_view word, std::span<const std::string> candidates) {
  const std::size_t forgiven = std::max<std::size_t>(word.size() >= 4 ? 2 : 1, word.size() / 3);
  std::optional<std::string> best;
  std::size_t best_distance = forgiven + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace tandem
