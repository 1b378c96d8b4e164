// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/token_store.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/llmc_file.h"
#include "optimized/data_pipeline/manifest.h"

namespace tandem {

std::int32_t largest_token(const IndexedDataset& dataset) {
  constexpr std::int64_t kBlockTokens = 1 << 16;
  std::vector<std::int32_t> block;
  std::int32_t largest = -1;
  for (std::int64_t first = 0; first < dataset.num_tokens(); first += kBlockTokens) {
    block.resize(static_cast<std::size_t>(std::min(kBlockTokens, dataset.num_tokens() - first)));
    dataset.read(first, block);
    const auto [low, high] = std::minmax_element(block.begin(), block.end());
    if (*low < 0) {
      throw InputError(
          fmt::format("{} has token {} at {}; tokens are not negative", dataset.bin(), *low, first + (low - block.begin())));
    }
    largest = std::max(largest, *high);
  }
  return largest;
}

std::string TokenStore::identity() const { return fmt::format("tokens below {}", vocabulary()); }

PreparedTokens::PreparedTokens(const std::filesystem::path& prefix) : prefix_(prefix), dataset_(prefix) {
  const std::optional<DataManifest> manifest = read_manifest(prefix);
  if (!manifest) {
    tokenizer_ = "unknown";
    vocabulary_ = std::int64_t{largest_token(dataset_)} + 1;
    return;
  }
  if (manifest->documents != num_documents() || manifest->tokens != num_tokens()) {
    throw InputError(fmt::format("{} describes {} documents and {} tokens, but {} has {} and {}; prepare the data again",
                                 manifest_path(prefix).string(), manifest->documents, manifest->tokens, idx_path(prefix).string(),
                                 num_documents(), num_tokens()));
  }
  tokenizer_ = manifest->tokenizer;
  vocabulary_ = manifest->vocabulary;
  bin_hash_ = manifest->bin_hash;
}

std::string PreparedTokens::describe() const { return fmt::format("{} (tokenizer {})", prefix_.string(), tokenizer_); }

std::string PreparedTokens::identity() const {
  return fmt::format("tokens by {}, {}", tokenizer_, bin_hash_ ? to_hex(*bin_hash_) : fmt::format("below {}", vocabulary_));
}

std::filesystem::path prepared_prefix(const std::filesystem::path& path) {
  const bool names_a_part = path.extension() == ".idx" || path.extension() == ".bin";
  return names_a_part ? path.parent_path() / path.stem() : path;
}

std::shared_ptr<const TokenStore> open_stored_tokens(const std::filesystem::path& path) {
  const std::filesystem::path prefix = prepared_prefix(path);
  if (std::filesystem::exists(idx_path(prefix))) return std::make_shared<PreparedTokens>(prefix);
  if (LlmcTokens::is_one(path)) return std::make_shared<LlmcTokens>(path);
  const bool is_file = std::filesystem::exists(path);
  if ((is_file && path.extension() == ".bin") || (!is_file && std::filesystem::exists(bin_path(prefix)))) {
    throw InputError(fmt::format("{} does not exist, which {} needs beside it (and it is no token file of llm.c)",
                                 idx_path(prefix).string(), bin_path(prefix).string()));
  }
  return nullptr;
}

TextTokens::TextTokens(const std::vector<std::filesystem::path>& files, DocumentRule rule) : files_(files) {
  for_each_document(files, rule, [&](std::string_view document) {
    document_begins_.push_back(num_tokens());
    tokens_.insert(tokens_.end(), document.begin(), document.end());
    tokens_.push_back(static_cast<std::uint8_t>(kEndOfDocument));
  });
  document_begins_.push_back(num_tokens());
}

void TextTokens::read(std::int64_t first, std::span<std::int32_t> out) const {
  TANDEM_CHECK(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= num_tokens(),
               fmt::format("tokens [{}, {}) of {}", first, first + static_cast<std::int64_t>(out.size()), num_tokens()));
  std::copy_n(tokens_.begin() + first, out.size(), out.begin());
}

std::string TextTokens::describe() const {
  std::vector<std::string> names;
  for (const std::filesystem::path& file : files_) names.push_back(file.string());
  return fmt::format("{} (tokenizer bytes)", fmt::join(names, ", "));
}

std::string TextTokens::identity() const {
  return fmt::format("tokens by bytes, {}", to_hex(hash128(std::as_bytes(std::span(tokens_)))));
}

}  // namespace tandem
