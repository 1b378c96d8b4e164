// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/tokenizer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/hash.h"
#include "core/text_data.h"
#include "optimized/data_pipeline/manifest.h"

namespace tandem {
namespace {

constexpr std::string_view kBpe = "bpe:";
constexpr std::string_view kModel = ".model";
constexpr std::int64_t kLargestVocabulary = 1'000'000;

class BytesTokenizer final : public TextTokenizer {
 public:
  BytesTokenizer() {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i);
  }

  [[nodiscard]] std::string name() const override { return tokenizer_.name; }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return tokenizer_.vocabulary; }
  [[nodiscard]] std::int32_t end_of_document() const noexcept override { return tokenizer_.end_of_document; }
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    tokens.reserve(tokens.size() + text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  }
  [[nodiscard]] std::string_view bytes_of(std::int32_t token) const override {
    if (token < 0 || token >= tokenizer_.vocabulary) throw InputError(fmt::format("token {} is not a byte", token));
    if (token == tokenizer_.end_of_document) return {};
    return {&bytes_[static_cast<std::size_t>(token)], 1};
  }
  [[nodiscard]] std::string_view model() const noexcept override { return {}; }

 private:
  Tokenizer tokenizer_ = find_tokenizer("bytes");
  std::array<char, 256> bytes_{};
};

std::int64_t parse_vocabulary(std::string_view which) {
  const std::string_view digits = which.substr(kBpe.size());
  std::int64_t vocabulary = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), vocabulary);
  if (error != std::errc{} || end != digits.data() + digits.size()) {
    throw InputError(fmt::format("tokenizer '{}': a number must follow bpe:, the vocabulary, as in bpe:8192", which));
  }
  if (vocabulary < 260 || vocabulary > kLargestVocabulary) {
    throw InputError(fmt::format("tokenizer '{}': the vocabulary must be between 260 (the bytes and a few characters) and {}",
                                 which, kLargestVocabulary));
  }
  return vocabulary;
}

}  // namespace

std::string TextTokenizer::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) text += bytes_of(token);
  return text;
}

std::filesystem::path model_path(const std::filesystem::path& prefix) {
  std::filesystem::path path = prefix;
  return path += kModel;
}

DType token_dtype(std::int64_t vocabulary) {
  TANDEM_CHECK(vocabulary >= 1 && vocabulary <= std::int64_t{1} << 31, fmt::format("a vocabulary of {}", vocabulary));
  if (vocabulary <= 256) return DType::u8;
  return vocabulary <= 65536 ? DType::u16 : DType::i32;
}

std::shared_ptr<const TextTokenizer> bytes_tokenizer() { return std::make_shared<BytesTokenizer>(); }

std::shared_ptr<const TextTokenizer> make_tokenizer(std::string_view which, const std::vector<std::filesystem::path>& inputs) {
  if (which == "bytes") return bytes_tokenizer();
  if (which.starts_with(kBpe)) {
    return sentencepiece_tokenizer(std::string(which), train_bpe(parse_vocabulary(which), inputs), which);
  }
  if (which.ends_with(kModel)) {
    const std::filesystem::path file(which);
    return sentencepiece_tokenizer(file.filename().string(), read_text_file(file), file.string());
  }
  throw InputError(fmt::format(
      "tokenizer '{}' does not exist; there is: bytes, bpe:N (N pieces, trained on the input), FILE.model (SentencePiece)",
      which));
}

std::shared_ptr<const TextTokenizer> tokenizer_of(const std::filesystem::path& prefix) {
  const std::optional<DataManifest> manifest = read_manifest(prefix);
  if (!manifest) {
    throw InputError(
        fmt::format("{} does not exist, so that the tokenizer of this data is not known", manifest_path(prefix).string()));
  }
  const std::filesystem::path file = model_path(prefix);
  return tokenizer_by(*manifest, manifest_path(prefix).string(), file.string(), [&] { return read_text_file(file); });
}

std::shared_ptr<const TextTokenizer> tokenizer_by(const DataManifest& manifest, const std::string& described,
                                                  const std::string& kept, const std::function<std::string()>& read_model) {
  if (manifest.tokenizer == "bytes") return bytes_tokenizer();
  if (!manifest.model_hash) {
    throw InputError(
        fmt::format("{} names the tokenizer '{}', of which this program has no model", described, manifest.tokenizer));
  }
  std::string model = read_model();
  if (hash128(std::as_bytes(std::span(model))) != *manifest.model_hash) {
    throw InputError(fmt::format("{} was altered or is of other data: its hash is not the one in {}", kept, described));
  }
  return sentencepiece_tokenizer(manifest.tokenizer, std::move(model), kept);
}

}  // namespace tandem
