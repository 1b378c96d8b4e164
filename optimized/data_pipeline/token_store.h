// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/io/hash.h"
#include "core/io/indexed_dataset.h"
#include "core/text_data.h"

namespace tandem {

/// All tokens of a data set in one row, and where its documents begin. Safe to read from several threads.
class TokenStore {
 public:
  virtual ~TokenStore() = default;
  [[nodiscard]] virtual std::int64_t num_tokens() const noexcept = 0;
  [[nodiscard]] virtual std::int64_t num_documents() const noexcept = 0;
  /// First token of document `index`; num_tokens() for index = num_documents().
  [[nodiscard]] virtual std::int64_t document_begin(std::int64_t index) const = 0;
  /// Copies tokens [first, first + out.size()).
  virtual void read(std::int64_t first, std::span<std::int32_t> out) const = 0;
  [[nodiscard]] virtual std::int64_t vocabulary() const noexcept = 0;
  /// Name of files and tokenizer, for messages.
  [[nodiscard]] virtual std::string describe() const = 0;
  /// Says the same for the same tokens, wherever they are kept, and another thing for others as far as it can be told without
  /// reading them all: kept in checkpoints.
  [[nodiscard]] virtual std::string identity() const;
};

/// Largest token of a data set, -1 when it has none; reads all. Throws InputError on a negative token.
[[nodiscard]] std::int32_t largest_token(const IndexedDataset& dataset);

/// Prepared data (PREFIX.bin, PREFIX.idx, and PREFIX.json where prepare_data wrote it), mapped: memory does not grow with the
/// data. Without PREFIX.json (data of another program) the vocabulary is the largest token plus one, found by reading all tokens
/// once.
class PreparedTokens final : public TokenStore {
 public:
  /// Throws InputError where a file is missing, damaged, or not of the same preparation as the others.
  explicit PreparedTokens(const std::filesystem::path& prefix);

  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return dataset_.num_tokens(); }
  [[nodiscard]] std::int64_t num_documents() const noexcept override { return dataset_.num_documents(); }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override { return dataset_.document_begin(index); }
  void read(std::int64_t first, std::span<std::int32_t> out) const override { dataset_.read(first, out); }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return vocabulary_; }
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string identity() const override;

 private:
  std::filesystem::path prefix_;
  IndexedDataset dataset_;
  std::string tokenizer_;
  std::int64_t vocabulary_ = 0;
  std::optional<Hash128> bin_hash_;  ///< by PREFIX.json
};

/// `path` without .idx or .bin: the prefix of prepared data, if it names some.
[[nodiscard]] std::filesystem::path prepared_prefix(const std::filesystem::path& path);

/// The tokens that `path` names: prepared data where PREFIX.idx exists, PREFIX being prepared_prefix(path); a token file of
/// llm.c (llmc_file.h). Nothing for other files: text. Throws InputError where a part of prepared data is missing.
[[nodiscard]] std::shared_ptr<const TokenStore> open_stored_tokens(const std::filesystem::path& path);

/// Text files tokenized into memory by the bytes tokenizer: one byte a token and 8 bytes a document. For texts that are trained
/// on as they are.
class TextTokens final : public TokenStore {
 public:
  /// Throws InputError as prepare_data().
  TextTokens(const std::vector<std::filesystem::path>& files, DocumentRule rule);

  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return static_cast<std::int64_t>(tokens_.size()); }
  [[nodiscard]] std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(document_begins_.size()) - 1;
  }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override {
    return document_begins_.at(static_cast<std::size_t>(index));
  }
  void read(std::int64_t first, std::span<std::int32_t> out) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return find_tokenizer("bytes").vocabulary; }
  [[nodiscard]] std::string describe() const override;
  /// That of the same text prepared by this tokenizer.
  [[nodiscard]] std::string identity() const override;

 private:
  std::vector<std::filesystem::path> files_;
  std::vector<std::uint8_t> tokens_;
  std::vector<std::int64_t> document_begins_;
};

}  // namespace tandem
