// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/io/hash.h"

namespace tandem {

/// A value of a JSON file and where it stands ("rollbacks[2].step"), so that every error names file and field. Borrows file name
/// and value. Each member throws InputError.
class JsonField {
 public:
  JsonField(const std::string& file, const nlohmann::json& value, std::string path = {})
      : file_(&file), value_(&value), path_(std::move(path)) {}

  [[noreturn]] void refuse(const std::string& what) const;
  void require(bool possible, const std::string& what) const {
    if (!possible) refuse(what);
  }
  [[nodiscard]] bool has(const char* key) const;
  [[nodiscard]] JsonField operator[](const char* key) const;
  /// Of a list.
  [[nodiscard]] std::size_t size() const;
  [[nodiscard]] JsonField at(std::size_t index) const;
  [[nodiscard]] std::vector<JsonField> elements() const;
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::int64_t count() const;  ///< a whole number from 0 on
  /// A finite number from 0 on.
  [[nodiscard]] double amount() const;
  [[nodiscard]] Hash128 hash() const;
  /// A number, or what number_to_json() makes of one that is not finite.
  [[nodiscard]] double number() const;
  [[nodiscard]] const nlohmann::json& value() const { return *value_; }
  /// That `format` and `version` of this object are these.
  void require_format(const std::string& format, std::int64_t version) const;

 private:
  const std::string* file_;
  const nlohmann::json* value_;
  std::string path_;
};

/// `text` is what `file` holds. Throws InputError where it is no JSON object.
[[nodiscard]] nlohmann::json parse_json_object(const std::string& text, const std::string& file);
/// JSON has no NaN and no infinity: "nan", "inf", "-inf" stand for them.
[[nodiscard]] nlohmann::ordered_json number_to_json(double value);

}  // namespace tandem
