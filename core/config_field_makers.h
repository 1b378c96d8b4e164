// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/config_fields.h"
#include "core/error.h"

/// How a configuration field is made from a member: private to core/config_fields*.cpp.
namespace tandem::config_field {

inline constexpr double kLargestInt = std::numeric_limits<int>::max();
inline constexpr double kLargestCount = 0x1p53;  // integers up to here are exact in a JSON reader that only knows double
inline constexpr FieldRange kAnyCount{.low = 0, .high = kLargestCount};
inline constexpr FieldRange kPositiveCount{.low = 1, .high = kLargestCount};
inline constexpr FieldRange kPositiveInt{.low = 1, .high = kLargestInt};
inline constexpr FieldRange kProbability{.low = 0, .high = 1, .includes_high = false};
inline constexpr FieldRange kNonNegative{.low = 0};
inline constexpr FieldRange kPositive{.low = 0, .includes_low = false};

// `access` takes a const or a mutable RunConfig and returns a reference to the member.
template <class Access>
ConfigField number(std::string section, std::string key, FieldRange range, std::string meaning, Access access) {
  using Member = std::decay_t<decltype(access(std::declval<RunConfig&>()))>;
  using Held = std::conditional_t<std::is_same_v<Member, int>, std::int64_t, Member>;
  ConfigField field;
  field.section = std::move(section);
  field.key = std::move(key);
  field.range = range;
  field.meaning = std::move(meaning);
  field.type = std::is_same_v<Held, double>          ? FieldType::real
               : std::is_same_v<Held, std::uint64_t> ? FieldType::unsigned_integer
               : std::is_same_v<Held, bool>          ? FieldType::flag
                                                     : FieldType::integer;
  field.get = [access](const RunConfig& config) { return FieldValue(static_cast<Held>(access(config))); };
  field.set = [access](RunConfig& config, const FieldValue& value) {
    access(config) = static_cast<Member>(std::get<Held>(value));
  };
  return field;
}

template <class Access>
ConfigField flag(std::string section, std::string key, std::string meaning, Access access) {
  return number(std::move(section), std::move(key), {}, std::move(meaning), access);
}

// One of a few words, each standing for a value of the member.
template <class Value, class Access>
ConfigField choice(std::string section, std::string key, std::vector<std::pair<std::string, Value>> words, std::string meaning,
                   Access access) {
  ConfigField field;
  field.section = std::move(section);
  field.key = std::move(key);
  field.type = FieldType::choice;
  field.meaning = std::move(meaning);
  for (const auto& [word, value] : words) field.choices.push_back(word);
  field.get = [access, words](const RunConfig& config) -> FieldValue {
    for (const auto& [word, value] : words) {
      if (value == access(config)) return word;
    }
    throw ContractError("a configuration holds a value that has no name");
  };
  field.set = [access, words](RunConfig& config, const FieldValue& chosen) {
    for (const auto& [word, value] : words) {
      if (word == std::get<std::string>(chosen)) access(config) = value;
    }
  };
  return field;
}

// Any text; what it may say is for conflicts() to judge.
template <class Access>
ConfigField text(std::string section, std::string key, std::string meaning, Access access) {
  ConfigField field;
  field.section = std::move(section);
  field.key = std::move(key);
  field.type = FieldType::text;
  field.meaning = std::move(meaning);
  field.get = [access](const RunConfig& config) { return FieldValue(access(config)); };
  field.set = [access](RunConfig& config, const FieldValue& value) { access(config) = std::get<std::string>(value); };
  return field;
}

// Accessors: the member of one section, of a const or a mutable configuration.
inline constexpr auto in_model = [](auto member) {
  return [member](auto& config) -> auto& { return config.model.*member; };
};
inline constexpr auto in_plan = [](auto member) {
  return [member](auto& config) -> auto& { return config.plan.*member; };
};
inline constexpr auto degree = [](auto member) {
  return [member](auto& config) -> auto& { return config.plan.parallel.*member; };
};
inline constexpr auto in_batch = [](auto member) {
  return [member](auto& config) -> auto& { return config.plan.batch.*member; };
};
inline constexpr auto in_optimizer = [](auto member) {
  return [member](auto& config) -> auto& { return config.optimizer.*member; };
};
inline constexpr auto in_schedule = [](auto member) {
  return [member](auto& config) -> auto& { return config.schedule.*member; };
};
inline constexpr auto in_run = [](auto member) {
  return [member](auto& config) -> auto& { return config.*member; };
};

}  // namespace tandem::config_field

namespace tandem {

/// Of the section "run" (the data included) and "anomaly": config_fields_run.cpp.
void add_run_fields(std::vector<ConfigField>& fields);

}  // namespace tandem
