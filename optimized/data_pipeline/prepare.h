// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/io/hash.h"
#include "core/text_data.h"

namespace tandem {

/// What a prepared data set holds.
struct DataSummary {
  std::filesystem::path prefix;
  std::string tokenizer;      ///< "unknown" for data that another program wrote
  std::string document_rule;  ///< likewise
  std::int64_t vocabulary = 0;
  DType dtype = DType::u8;
  std::int64_t documents = 0;
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;  ///< with the end of each document
  std::int64_t shortest_document_tokens = 0;
  std::int64_t longest_document_tokens = 0;
  std::int64_t bin_bytes = 0;
  std::int64_t idx_bytes = 0;
  Hash128 bin_hash;
};

/// Tokenizes text files and writes PREFIX.bin, PREFIX.idx and PREFIX.json (docs/formats.md), replacing older ones only when all
/// three are complete on disk. Files are mapped and written as they are read: memory grows with the number of documents alone.
///
/// Throws InputError where an input does not exist, is a directory, is empty, is not UTF-8 text (with the offset of the first bad
/// byte) or has no document, and where the tokenizer is unknown; IoError, with path, bytes and reason, where the output cannot be
/// written. Nothing is left behind then.
DataSummary prepare_data(const std::vector<std::filesystem::path>& inputs, std::string_view tokenizer,
                         const std::filesystem::path& prefix, DocumentRule rule = DocumentRule::file);

/// Reads the whole of a prepared data set and checks it: structure, every token against the vocabulary, and the hash of the .bin
/// against PREFIX.json where that exists. Throws InputError naming what does not fit.
[[nodiscard]] DataSummary inspect_data(const std::filesystem::path& prefix);

}  // namespace tandem
