// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/config.h"

namespace tandem {

/// What a configuration field holds; uint64 for seeds alone, every other integer is int64.
using FieldValue = std::variant<bool, std::int64_t, std::uint64_t, double, std::string>;

enum class FieldType : std::uint8_t { flag, integer, unsigned_integer, real, choice, text };

/// Legal values of a number. An infinite end is no limit.
struct FieldRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool includes_low = true;
  bool includes_high = true;

  [[nodiscard]] bool contains(double value) const noexcept {
    return (includes_low ? value >= low : value > low) && (includes_high ? value <= high : value < high);
  }
};

/// One key of a configuration. Parsing, --set, the JSON output, the help and the error texts derive from this alone.
struct ConfigField {
  std::string section;
  std::string key;
  FieldType type = FieldType::integer;
  FieldRange range;                  ///< integer and real
  std::vector<std::string> choices;  ///< choice
  std::string meaning;
  bool shorthand = false;  ///< sets several fields at once: accepted, never written, and overruled by those fields
  std::function<FieldValue(const RunConfig&)> get;
  std::function<void(RunConfig&, const FieldValue&)> set;  ///< the value has the type above and lies in the range

  [[nodiscard]] std::string full_name() const { return section + "." + key; }
};

/// Every field, in the order in which it is written. Keys are unique across sections.
[[nodiscard]] const std::vector<ConfigField>& config_fields();

/// What a field accepts, as the end of a sentence: "at least 1", "in [0, 1)", "one of: fp32, fp64", "true or false".
[[nodiscard]] std::string accepted_values(const ConfigField& field);

/// The same for a table: "integer >= 1", "number in [0, 1)", "fp32|fp64", "true|false".
[[nodiscard]] std::string type_column(const ConfigField& field);

}  // namespace tandem
