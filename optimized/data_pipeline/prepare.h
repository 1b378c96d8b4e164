// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
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
  bool has_model = false;  ///< PREFIX.model
};

struct PrepareProgress {
  std::int64_t text_bytes = 0;  ///< encoded and written so far
  std::int64_t text_bytes_total = 0;
  std::int64_t tokens = 0;
};

struct PrepareOptions {
  int threads = 1;
  std::function<void(const PrepareProgress&)> progress = {};  ///< called now and then, in the calling thread
  // The format has 31 bits for the length of a sequence: a longer document becomes several sequences.
  std::int64_t sequence_tokens = std::int64_t{1} << 30;
  std::size_t chunk_bytes = std::size_t{4} << 20;  ///< that a thread encodes at a time
};

/// Tokenizes text files and writes PREFIX.bin, PREFIX.idx and PREFIX.json (docs/formats.md), replacing older ones only when all
/// three are complete on disk; and PREFIX.model where the tokenizer has a model (make_tokenizer()). Files are mapped and written
/// as they are read: memory grows with the number of sequences, and with the threads. The files are the same bytes for any number
/// of threads. Token files of llm.c (LlmcTokens) are taken as they are: `tokenizer` is "" or "gpt2" then, and the rule is not
/// used.
///
/// Throws InputError where an input does not exist, is a directory, is empty, is not UTF-8 text (with the offset of the first bad
/// byte), has no document or is itself one of the files to be written, and where the tokenizer is unknown, the first of them in
/// the order of the inputs; IoError, with path, bytes and reason, where the output cannot be written. Nothing is left behind
/// then, nor where `progress` throws, which stops the work.
DataSummary prepare_data(const std::vector<std::filesystem::path>& inputs, std::string_view tokenizer,
                         const std::filesystem::path& prefix, DocumentRule rule = DocumentRule::file,
                         const PrepareOptions& options = {});

/// Reads the whole of a prepared data set (`prefix`, or one of its two files), or of a token file of llm.c, and checks it:
/// structure, every token against the vocabulary, and the hash of the .bin against PREFIX.json where that exists. Throws
/// InputError naming what does not fit.
[[nodiscard]] DataSummary inspect_data(const std::filesystem::path& prefix);

}  // namespace tandem
