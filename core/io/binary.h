// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sstream>
#include <string>

#include <cereal/archives/binary.hpp>
#include <cereal/types/array.hpp>
#include <cereal/types/map.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/vector.hpp>

#include "core/error.h"

namespace tandem {

/// A value as bytes for another process of the same program, and back: plain data, containers, and whatever has a function
/// `serialize(archive, value)` beside it. Every bit of a number arrives, NaN included. No format to keep: it has no version and
/// this machine's byte order.
template <class Value>
[[nodiscard]] std::string to_bytes(const Value& value) {
  std::ostringstream stream(std::ios::binary);
  cereal::BinaryOutputArchive archive(stream);
  archive(value);
  return std::move(stream).str();
}

/// Throws ContractError where the bytes end before the value does.
template <class Value>
[[nodiscard]] Value from_bytes(const std::string& bytes) {
  std::istringstream stream(bytes, std::ios::binary);
  cereal::BinaryInputArchive archive(stream);
  Value value;
  try {
    archive(value);
  } catch (const cereal::Exception& error) {
    throw ContractError(error.what());
  }
  return value;
}

}  // namespace tandem
