// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <initializer_list>
#include <string>

namespace tandem {

/// Writes `text` to a file, atomically, or to standard output where the name is "-". Throws IoError.
void write_output(const std::string& file, const std::string& text);

/// Throws InputError where `file` could not be written later: its folder does not exist or cannot be written to. Asked before the
/// work begins, so that hours are not lost to a typing error. Nothing for "" and "-".
void require_writable(const std::string& file, const std::string& option);

/// The same for the files PREFIX + suffix. Throws InputError too where the prefix is a device, or lies among them.
void require_writable_prefix(const std::string& prefix, std::initializer_list<const char*> suffixes, const std::string& option);

/// Throws InputError, with `advice`, where there is no such folder, or it cannot be written to. Nothing for "".
void require_folder(const std::string& folder, const std::string& option, const std::string& advice);

/// Makes the folder and throws InputError where that fails or it cannot be written to. Nothing for "".
void require_writable_folder(const std::string& folder, const std::string& option);

/// For options that count something: at least 1.
[[nodiscard]] std::string at_least_one(const std::string& text);
/// The same for a positive number of a size that the program can count with.
[[nodiscard]] std::string positive_number(const std::string& text);
/// For seeds and places in a list: a whole number from 0 on. CLI11 would take "-1" for the largest one, and "" for 0.
[[nodiscard]] std::string whole_number(const std::string& text);
/// A check that a number is in [least, most].
[[nodiscard]] std::function<std::string(const std::string&)> number_between(double least, double most);
/// Not the empty text that a variable which was never set leaves.
[[nodiscard]] std::string not_empty(const std::string& text);

}  // namespace tandem
