// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/io/mapped_file.h"
#include "optimized/data_pipeline/token_store.h"

namespace tandem {

/// A file of GPT-2 tokens as llm.c's scripts write it (docs/formats.md): a header of 256 int32, magic 20240520, version 1, the
/// number of tokens; then the tokens as uint16. Token 50256 (<|endoftext|>) stands before each document: a document begins at
/// each, and with the first token.
///
/// Opening reads all tokens once, to find the documents: 8 bytes of memory for each. Prepared data (prepare_data()) opens at
/// once.
class LlmcTokens final : public TokenStore {
 public:
  static constexpr std::int64_t kVocabulary = 50257;
  static constexpr std::int32_t kEndOfText = 50256;
  static constexpr const char* kTokenizer = "gpt2";

  /// Throws InputError where it is no such file, or is cut, has another version, or a token outside of the vocabulary.
  explicit LlmcTokens(const std::filesystem::path& file);

  /// True where the file begins with the magic number; false where it cannot be read.
  [[nodiscard]] static bool is_one(const std::filesystem::path& file);

  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return num_tokens_; }
  [[nodiscard]] std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(document_begins_.size()) - 1;
  }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override;
  void read(std::int64_t first, std::span<std::int32_t> out) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return kVocabulary; }
  [[nodiscard]] std::string describe() const override;
  /// That of the same tokens prepared.
  [[nodiscard]] std::string identity() const override;
  /// All tokens, two bytes each.
  [[nodiscard]] std::span<const std::byte> stored() const noexcept;

 private:
  void find_documents();

  MappedFile file_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::int64_t> document_begins_;  ///< [documents + 1]
};

}  // namespace tandem
