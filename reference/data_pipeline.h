// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch_source.h"
#include "core/text_data.h"

namespace tandem::reference {

/// The documents of a text by DocumentRule (core/text_data.h), in order.
[[nodiscard]] std::vector<std::string> split_documents(std::string_view text, DocumentRule rule);

/// p_e of core/text_data.h written out: element i is the sample at place i of epoch `epoch`.
[[nodiscard]] std::vector<std::int64_t> epoch_permutation(std::int64_t samples, std::uint64_t seed, std::int64_t epoch);
/// The same keyed by the name of a stream of random numbers: q_w.
[[nodiscard]] std::vector<std::int64_t> permutation_of(std::int64_t samples, std::uint64_t seed, std::string_view stream);

/// The tokens of a piece: its pairs are those of neighbours.
using PieceTokens = std::vector<std::int32_t>;
/// The pieces of documents, each cut every `sequence` pairs.
[[nodiscard]] std::vector<PieceTokens> cut_pieces(const std::vector<std::vector<std::int32_t>>& documents, std::int64_t sequence);
/// Pieces put into rows of `sequence` pairs, kPackWindow pieces at a time, each into the first row that has room, longest first.
[[nodiscard]] std::vector<std::vector<PieceTokens>> pack_pieces(const std::vector<PieceTokens>& pieces, std::int64_t sequence);

/// Batches of text files by the definition in core/text_data.h, done the plain way: all text in memory, one token with its
/// document after the other, both parts of the split and all their rows as explicit lists, the order of an epoch as an explicit
/// list for each batch asked for.
///
/// Throws InputError, naming the file, where one does not exist, is a directory, is empty, is not UTF-8 text or has no document,
/// and where the training part has not one sample.
class TextSource final : public BatchSource {
 public:
  TextSource(const std::vector<std::filesystem::path>& files, const TextDataOptions& options);

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override;
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return 256; }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return options_.sequence; }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override {
    return static_cast<std::int64_t>(training_.tokens.size());
  }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return num_samples(training_); }
  [[nodiscard]] std::string describe() const override;

 private:
  struct Token {
    std::int32_t id;
    std::int64_t document;
  };
  using Tokens = std::vector<Token>;
  using Row = std::vector<PieceTokens>;
  struct Part {
    Tokens tokens;
    std::vector<Row> rows;  ///< of all batchings but stream
  };

  void split(const std::vector<std::string>& documents);
  [[nodiscard]] std::vector<Row> rows_of(const Tokens& part) const;
  [[nodiscard]] std::int64_t num_samples(const Part& part) const noexcept;
  /// The samples of places [first, first + count) of all epochs in a row.
  [[nodiscard]] std::vector<std::int64_t> samples_at(std::int64_t first, std::int64_t count) const;
  [[nodiscard]] std::vector<std::int64_t> samples_of_step(std::int64_t step, std::int64_t rows) const;
  [[nodiscard]] std::int64_t pairs_of(std::int64_t sample) const;
  [[nodiscard]] Batch batch_of(const Part& part, const std::vector<std::int64_t>& samples) const;
  void fill_from_stream(Batch& batch, std::int64_t row, const Tokens& part, std::int64_t sample) const;

  TextDataOptions options_;
  Part training_;
  Part validation_;
};

}  // namespace tandem::reference
