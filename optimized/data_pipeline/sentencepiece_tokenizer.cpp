// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "core/error.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/tokenizer.h"

namespace tandem {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581, which stands for a space in a piece
constexpr std::size_t kPieceBytes = 2048;            // the cost of a text grows faster than its length
constexpr std::size_t kLineBytes = 4096;             // the trainer passes over longer lines

std::string piece_text(const std::string& piece) {
  std::string text;
  for (std::size_t at = 0; at < piece.size();) {
    const bool space = piece.compare(at, kSpace.size(), kSpace) == 0;
    text += space ? ' ' : piece[at];
    at += space ? kSpace.size() : 1;
  }
  return text;
}

class SentencePieceTokenizer final : public TextTokenizer {
 public:
  SentencePieceTokenizer(std::string name, std::string model, std::string_view source)
      : name_(std::move(name)), model_(std::move(model)) {
    if (model_.empty() || !processor_.LoadFromSerializedProto(model_).ok() || processor_.GetPieceSize() < 1) {
      throw InputError(fmt::format("{} is not a SentencePiece model, or it is damaged", source));
    }
    if (processor_.eos_id() < 0) {
      throw InputError(fmt::format("{} has no piece for the end of a text (</s>), which ends documents here", source));
    }
    for (int id = 0; id < processor_.GetPieceSize(); ++id) pieces_.push_back(bytes_of_piece(id));
    // Of the models that others have trained it is not known what else they do between words.
    words_apart_ = name_.starts_with("bpe:") && keeps_words_apart();
  }

  [[nodiscard]] std::string name() const override { return name_; }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return static_cast<std::int64_t>(pieces_.size()); }
  [[nodiscard]] std::int32_t end_of_document() const noexcept override { return processor_.eos_id(); }
  [[nodiscard]] std::string_view model() const noexcept override { return model_; }
  [[nodiscard]] std::string_view bytes_of(std::int32_t token) const override {
    if (token < 0 || token >= vocabulary()) {
      throw InputError(fmt::format("token {} is not one of the {} pieces of the tokenizer {}", token, vocabulary(), name_));
    }
    return pieces_[static_cast<std::size_t>(token)];
  }

  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    std::unique_ptr<WordCache> words = words_apart_ ? borrow_words() : nullptr;
    while (!text.empty()) {
      // The character that stands for a space would come back as one: it is taken byte by byte.
      const std::string_view near = text.substr(0, kPieceBytes + kSpace.size());
      const std::size_t special = bytes_.empty() ? std::string_view::npos : near.find(kSpace);
      if (special == 0) {
        for (const char c : kSpace) tokens.push_back(bytes_[static_cast<unsigned char>(c)]);
        text.remove_prefix(kSpace.size());
        continue;
      }
      const std::string_view piece = text.substr(0, piece_bytes(text.substr(0, special), kPieceBytes));
      if (words) {
        encode_words(piece, *words, tokens);
      } else {
        const std::vector<std::int32_t> ids = encode_piece(piece);
        tokens.insert(tokens.end(), ids.begin(), ids.end());
      }
      text.remove_prefix(piece.size());
    }
    if (words) give_back(std::move(words));
  }

 private:
  /// Tokens of words that were seen before. A pure function, so that it does not matter which words are in it.
  struct WordCache {
    static constexpr std::size_t kWords = 1 << 16;
    static constexpr std::size_t kWordBytes = 32;
    std::unordered_map<std::string, std::vector<std::int32_t>> tokens;
    std::string word;
  };

  [[nodiscard]] std::vector<std::int32_t> encode_piece(std::string_view text) const {
    std::vector<int> ids;
    if (!processor_.Encode({text.data(), text.size()}, &ids).ok()) {
      throw ContractError(fmt::format("SentencePiece cannot encode {} bytes", text.size()));
    }
    return ids;
  }

  void encode_words(std::string_view text, WordCache& cache, std::vector<std::int32_t>& tokens) const {
    while (!text.empty()) {
      std::size_t end = 1;
      while (end < text.size() && text[end] != ' ' && text[end - 1] != '\n') ++end;
      cache.word.assign(text.substr(0, end));
      text.remove_prefix(end);
      auto found = cache.tokens.find(cache.word);
      if (found == cache.tokens.end()) {
        std::vector<std::int32_t> ids = encode_piece(cache.word);
        if (end > WordCache::kWordBytes || cache.tokens.size() >= WordCache::kWords) {
          tokens.insert(tokens.end(), ids.begin(), ids.end());
          continue;
        }
        found = cache.tokens.emplace(cache.word, std::move(ids)).first;
      }
      tokens.insert(tokens.end(), found->second.begin(), found->second.end());
    }
  }

  /// A cache for each call under way; never more of them than threads.
  [[nodiscard]] std::unique_ptr<WordCache> borrow_words() const {
    const std::lock_guard lock(words_mutex_);
    if (words_.empty()) return std::make_unique<WordCache>();
    std::unique_ptr<WordCache> words = std::move(words_.back());
    words_.pop_back();
    return words;
  }
  void give_back(std::unique_ptr<WordCache> words) const {
    const std::lock_guard lock(words_mutex_);
    words_.push_back(std::move(words));
  }

  /// No piece reaches over the beginning of a word or the end of a line, so that BPE, which joins neighbours as long as they make
  /// a piece, gives for a text the tokens of its words.
  [[nodiscard]] bool keeps_words_apart() const {
    for (int id = 0; id < processor_.GetPieceSize(); ++id) {
      const std::string& piece = processor_.IdToPiece(id);
      if (piece.find(kSpace, 1) != std::string::npos || piece.find('\n') != std::string::npos) return false;
    }
    return true;
  }

  [[nodiscard]] std::string bytes_of_piece(int id) {
    const std::string& piece = processor_.IdToPiece(id);
    if (processor_.IsControl(id)) return {};
    if (processor_.IsUnknown(id)) return "\xEF\xBF\xBD";
    if (!processor_.IsByte(id)) return piece_text(piece);
    unsigned value = 0;  // "<0x1F>"
    (void)std::from_chars(piece.data() + 3, piece.data() + 5, value, 16);
    bytes_.resize(256);
    bytes_[value & 0xFFU] = id;
    return {static_cast<char>(value)};
  }

  std::string name_;
  std::string model_;
  sentencepiece::SentencePieceProcessor processor_;
  std::vector<std::string> pieces_;
  std::vector<std::int32_t> bytes_;  ///< [256] the token of each byte; empty where the model has none
  bool words_apart_ = false;
  mutable std::mutex words_mutex_;  // guards words_
  mutable std::vector<std::unique_ptr<WordCache>> words_;
};

/// Lines for the trainer: of `lines` the share `taken` of `total`, evenly spread.
class TrainingLines final : public sentencepiece::SentenceIterator {
 public:
  TrainingLines(const std::vector<std::filesystem::path>& inputs, std::int64_t training_bytes) {
    std::int64_t total = 0;
    for_each_line(inputs, [&](std::string_view line) { total += static_cast<std::int64_t>(line.size()); });
    const double share =
        std::min(1.0, static_cast<double>(training_bytes) / static_cast<double>(std::max<std::int64_t>(total, 1)));
    double due = 0;
    for_each_line(inputs, [&](std::string_view line) {
      due += share;
      if (due < 1) return;
      due -= 1;
      lines_.emplace_back(line);
    });
  }

  [[nodiscard]] bool done() const override { return next_ >= lines_.size(); }
  void Next() override { ++next_; }
  [[nodiscard]] const std::string& value() const override { return lines_[next_]; }
  [[nodiscard]] sentencepiece::util::Status status() const override { return {}; }

 private:
  template <class Visit>
  static void for_each_line(const std::vector<std::filesystem::path>& inputs, const Visit& visit) {
    for_each_document(inputs, DocumentRule::line, [&](std::string_view line) {
      while (!line.empty()) {
        const std::size_t size = piece_bytes(line, kLineBytes);
        visit(line.substr(0, size));
        line.remove_prefix(size);
      }
    });
  }

  std::vector<std::string> lines_;
  std::size_t next_ = 0;
};

/// The number behind `word` in a message of the trainer.
std::string number_after(const std::string& message, std::string_view word) {
  const std::size_t at = message.rfind(word);
  if (at == std::string::npos) return "another number";
  const std::size_t begin = at + word.size();
  return message.substr(begin, message.find_first_not_of("0123456789", begin) - begin);
}

[[noreturn]] void refuse_training(std::int64_t vocabulary, const std::string& message) {
  if (message.find("smaller than required_chars") != std::string::npos) {
    throw InputError(
        fmt::format("bpe:{}: the bytes and the characters of this text alone need a vocabulary of {}; take a larger one",
                    vocabulary, number_after(message, " vs ")));
  }
  if (message.find("too high") != std::string::npos) {
    throw InputError(fmt::format("bpe:{}: this text gives no more than {} pieces; take a smaller vocabulary", vocabulary,
                                 number_after(message, "<= ")));
  }
  throw InputError(fmt::format("bpe:{}: SentencePiece cannot train on this text: {}", vocabulary, message));
}

}  // namespace

std::shared_ptr<const TextTokenizer> sentencepiece_tokenizer(std::string name, std::string model, std::string_view source) {
  return std::make_shared<SentencePieceTokenizer>(std::move(name), std::move(model), source);
}

std::string train_bpe(std::int64_t vocabulary, const std::vector<std::filesystem::path>& inputs, std::int64_t training_bytes) {
  TrainingLines lines(inputs, training_bytes);
  // The model names the number of threads that made it: always one, so that it does not depend on the machine. The end of a
  // document is token 0, as with bytes.
  const std::unordered_map<std::string, std::string> settings = {{"model_type", "bpe"},
                                                                 {"vocab_size", fmt::to_string(vocabulary)},
                                                                 {"byte_fallback", "true"},
                                                                 {"normalization_rule_name", "identity"},
                                                                 {"add_dummy_prefix", "false"},
                                                                 {"remove_extra_whitespaces", "false"},
                                                                 {"eos_id", "0"},
                                                                 {"unk_id", "1"},
                                                                 {"bos_id", "-1"},
                                                                 {"pad_id", "-1"},
                                                                 {"num_threads", "1"},
                                                                 {"minloglevel", "3"}};
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model);
  if (!status.ok()) refuse_training(vocabulary, status.ToString());
  return model;
}

}  // namespace tandem
