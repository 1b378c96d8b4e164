// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/batch_source.h"
#include "core/pitfall.h"
#include "core/text_data.h"
#include "optimized/data_pipeline/bucketing.h"
#include "optimized/data_pipeline/packing.h"
#include "optimized/data_pipeline/piece_index.h"
#include "optimized/data_pipeline/token_part.h"

namespace tandem {

/// Batches of a token store by the definition in core/text_data.h. Any row is found from its number alone: no list of samples and
/// no shuffled order is kept, so that resuming and jumping cost the same for one million tokens and for a trillion. Opening does
/// too for the stream; pieces are counted at opening, document by document.
class TextSource final : public BatchSource {
 public:
  /// Throws InputError where an option is out of range or the training part has not one sample.
  TextSource(std::shared_ptr<const TokenStore> store, const TextDataOptions& options, const PitfallSet& pitfalls = {});
  TextSource(const TextSource&) = delete;  // what is counted borrows the parts
  TextSource& operator=(const TextSource&) = delete;

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override;
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return store_->vocabulary(); }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return options_.sequence; }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return training_.tokens.num_tokens(); }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return num_samples(training_); }
  [[nodiscard]] std::string describe() const override;
  [[nodiscard]] std::string identity() const override;

 private:
  /// One side of the split, and what is counted of it for batchings other than stream.
  struct Part {
    Part(const std::shared_ptr<const TokenStore>& store, const TextDataOptions& options, SplitPart part);
    TokenPart tokens;
    std::optional<PieceIndex> pieces;
    std::optional<PackedRows> packed;
  };
  using SampleAt = std::function<std::int64_t(std::int64_t row)>;

  [[nodiscard]] std::int64_t num_samples(const Part& part) const noexcept;
  [[nodiscard]] bool pads_to_longest() const noexcept;
  /// Rows [rows) of the batch, row r being sample sample_at(r) of the part; for stream and packed.
  [[nodiscard]] Batch whole_rows(const Part& part, Interval rows, const SampleAt& sample_at) const;
  /// Rows [rows) of the batch that has one of `pieces` in each row; for padded and bucketed.
  [[nodiscard]] Batch padded_rows(std::span<const Piece> pieces, Interval rows) const;
  [[nodiscard]] std::vector<Piece> pieces_of_step(std::int64_t step, std::int64_t rows) const;
  void fill_stream(Batch& batch, std::int64_t row, const TokenPart& part, std::int64_t sample) const;
  void fill_pieces(Batch& batch, std::int64_t row, std::span<const Piece> pieces) const;
  void plant(Batch& batch) const;

  TextDataOptions options_;
  PitfallSet pitfalls_;
  std::shared_ptr<const TokenStore> store_;
  Part training_;
  Part validation_;
  Buckets buckets_;
};

/// What `--data` names. One path of prepared data or of a token file of llm.c (open_stored_tokens()): mapped. Otherwise text
/// files, tokenized into memory. Throws InputError as PreparedTokens, TextTokens and TextSource.
[[nodiscard]] std::unique_ptr<BatchSource> open_text(const std::vector<std::filesystem::path>& paths,
                                                     const TextDataOptions& options, const PitfallSet& pitfalls = {});

}  // namespace tandem
