// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace tandem {

/// Why `key` can be no key of an object; empty where it can. Folders and S3 must take it alike: parts separated by '/', none of
/// them empty, "." or "..", UTF-8 without control characters, at most 900 bytes (S3 has 1024, of which a prefix takes some).
[[nodiscard]] std::string_view fault_of_key(std::string_view key) noexcept;

/// Throws ContractError unless `key` is one.
void check_key(std::string_view key);

/// The same for what list() takes: the beginning of a key, perhaps empty.
void check_key_prefix(std::string_view prefix);

}  // namespace tandem
