// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

/// terminal: aligned columns; plain: one line per row, cells separated by tabs, for a pipe.
enum class TableStyle : std::uint8_t { terminal, plain };

/// Rows of cells under a heading. Cells that look like numbers are set to the right.
class TextTable {
 public:
  explicit TextTable(std::vector<std::string> heading) : heading_(std::move(heading)) {}

  /// Throws ContractError where the number of cells is not that of the heading.
  void add(std::vector<std::string> row);
  /// Heading and rows, each ending in a line break.
  [[nodiscard]] std::string render(TableStyle style) const;

 private:
  std::vector<std::string> heading_;
  std::vector<std::vector<std::string>> rows_;
};

/// "1.50 GiB", "12.0 KiB", "17 B"
[[nodiscard]] std::string human_bytes(std::int64_t bytes);
/// Three significant digits with a decimal prefix: "12.3k", "1.00M"; "-" where it is not finite.
[[nodiscard]] std::string human_count(double value);
/// "12.3 ms", "1.50 s"; "-" where it is not finite.
[[nodiscard]] std::string human_seconds(double seconds);
/// "12.3 %"; "-" where it is not finite.
[[nodiscard]] std::string human_share(double share);

}  // namespace tandem
