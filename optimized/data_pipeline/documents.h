// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "core/io/mapped_file.h"
#include "core/text_data.h"

namespace tandem {

/// Calls `visit` with each document of `text` (DocumentRule, core/text_data.h) in order. The pieces point into `text`; nothing is
/// copied, so that a mapped file of any size can be walked.
void for_each_document(std::string_view text, DocumentRule rule, const std::function<void(std::string_view)>& visit);

/// The same over text files, which are mapped one after the other. Throws InputError, naming the file, where one does not exist,
/// is a directory, is empty, is not UTF-8 or has NUL bytes (with the offset of the first bad byte), or has no document.
void for_each_document(const std::vector<std::filesystem::path>& files, DocumentRule rule,
                       const std::function<void(std::string_view)>& visit);

/// A document, or a part of a long one.
struct TextPiece {
  std::string_view text;
  bool ends_document = true;
};

/// Pieces of one file, which lives as long as they do.
struct TextChunk {
  std::shared_ptr<const MappedFile> file;
  std::vector<TextPiece> pieces;
  std::size_t bytes = 0;
};

/// The documents of text files in chunks of about `chunk_bytes`, in order; a document that is longer is cut with piece_bytes().
/// Whether the pieces are text is not checked; else throws as for_each_document().
void for_each_chunk(const std::vector<std::filesystem::path>& files, DocumentRule rule, std::size_t chunk_bytes,
                    const std::function<void(TextChunk)>& visit);

/// Length of the longest beginning of `text` that has at most `limit` bytes and ends before a space or behind a line, where
/// there is one, else with a character.
[[nodiscard]] std::size_t piece_bytes(std::string_view text, std::size_t limit) noexcept;

}  // namespace tandem
