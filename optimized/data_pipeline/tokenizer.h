// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace tandem {

struct DataManifest;

/// Text to tokens and back. Safe to use from several threads.
class TextTokenizer {
 public:
  TextTokenizer() = default;
  TextTokenizer(const TextTokenizer&) = delete;
  TextTokenizer& operator=(const TextTokenizer&) = delete;
  virtual ~TextTokenizer() = default;

  /// "bytes", "bpe:8192", or the name of a model's file.
  [[nodiscard]] virtual std::string name() const = 0;
  /// Every token is in [0, vocabulary()).
  [[nodiscard]] virtual std::int64_t vocabulary() const noexcept = 0;
  /// Ends each document, and is no part of any text.
  [[nodiscard]] virtual std::int32_t end_of_document() const noexcept = 0;

  /// Appends the tokens of `text`, UTF-8 without NUL bytes.
  virtual void encode(std::string_view text, std::vector<std::int32_t>& tokens) const = 0;
  /// The bytes of one token: those of a text are the bytes of its tokens, one after the other. A token may hold a part of a
  /// character. Empty for end_of_document(). Throws InputError outside of the vocabulary.
  [[nodiscard]] virtual std::string_view bytes_of(std::int32_t token) const = 0;
  /// What a file has to hold so that the tokenizer can be made again; empty for "bytes".
  [[nodiscard]] virtual std::string_view model() const noexcept = 0;

  [[nodiscard]] std::string decode(std::span<const std::int32_t> tokens) const;
};

/// PREFIX.model: where prepared data keeps the model of its tokenizer.
[[nodiscard]] std::filesystem::path model_path(const std::filesystem::path& prefix);

/// The narrowest type that the format has for tokens below `vocabulary`.
[[nodiscard]] DType token_dtype(std::int64_t vocabulary);

/// "bytes"; "bpe:N", trained on `inputs`; or the path of a SentencePiece model, which ends in ".model". Throws InputError where
/// it is none of these, where N is too small or too large for the text, where an input is not text, and where the model cannot be
/// read.
[[nodiscard]] std::shared_ptr<const TextTokenizer> make_tokenizer(std::string_view which,
                                                                  const std::vector<std::filesystem::path>& inputs);

/// The tokenizer that data prepared as PREFIX was made with, by PREFIX.json and PREFIX.model. Throws InputError where one of them
/// is missing or damaged, or where they do not belong together.
[[nodiscard]] std::shared_ptr<const TextTokenizer> tokenizer_of(const std::filesystem::path& prefix);

/// The same for a description and a model that are elsewhere: `described` and `kept` are their names, for messages.
[[nodiscard]] std::shared_ptr<const TextTokenizer> tokenizer_by(const DataManifest& manifest, const std::string& described,
                                                                const std::string& kept,
                                                                const std::function<std::string()>& read_model);

[[nodiscard]] std::shared_ptr<const TextTokenizer> bytes_tokenizer();

/// A SentencePiece model, by the bytes of its file; `source` is for messages. Throws InputError where it is damaged or has no
/// piece for the end of a document ("</s>"), and where the program was built without SentencePiece.
[[nodiscard]] std::shared_ptr<const TextTokenizer> sentencepiece_tokenizer(std::string name, std::string model,
                                                                           std::string_view source);

/// A SentencePiece BPE model of `vocabulary` pieces for the text of the files, of which evenly spread lines are used where they
/// have more than `training_bytes`. All 256 bytes are pieces and nothing is normalized, so that every text comes back from its
/// tokens. The same texts give the same bytes.
[[nodiscard]] std::string train_bpe(std::int64_t vocabulary, const std::vector<std::filesystem::path>& inputs,
                                    std::int64_t training_bytes = std::int64_t{32} << 20);

}  // namespace tandem
