// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>
#include <vector>

#include "core/text_data.h"

namespace tandem {

/// Calls `visit` with each document of `text` (DocumentRule, core/text_data.h) in order. The pieces point into `text`; nothing is
/// copied, so that a mapped file of any size can be walked.
void for_each_document(std::string_view text, DocumentRule rule, const std::function<void(std::string_view)>& visit);

/// The same over text files, which are mapped one after the other. Throws InputError, naming the file, where one does not exist,
/// is a directory, is empty, is not UTF-8 or has NUL bytes (with the offset of the first bad byte), or has no document.
void for_each_document(const std::vector<std::filesystem::path>& files, DocumentRule rule,
                       const std::function<void(std::string_view)>& visit);

}  // namespace tandem
