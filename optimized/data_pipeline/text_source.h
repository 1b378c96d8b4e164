// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/batch_source.h"
#include "core/text_data.h"
#include "optimized/data_pipeline/token_part.h"

namespace tandem {

/// Batches of a token store by the definition in core/text_data.h. Any row is found from its number alone: no list of samples and
/// no shuffled order is kept, so that opening, resuming and jumping cost the same for one million tokens and for a trillion.
class TextSource final : public BatchSource {
 public:
  /// Throws InputError where an option is out of range or the training part is shorter than one sample.
  TextSource(std::shared_ptr<const TokenStore> store, const TextDataOptions& options);

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override;
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t index, std::int64_t rows) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return store_->vocabulary(); }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return options_.sequence; }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return training_.num_tokens(); }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return num_samples(training_); }
  [[nodiscard]] std::string describe() const override;

 private:
  [[nodiscard]] std::int64_t num_samples(const TokenPart& part) const noexcept;
  void fill_row(Batch& batch, std::int64_t row, const TokenPart& part, std::int64_t sample) const;

  TextDataOptions options_;
  std::shared_ptr<const TokenStore> store_;
  TokenPart training_;
  TokenPart validation_;
};

/// What `--data` names. One path P where P.idx exists, or that is itself the .idx or .bin of a pair: prepared data, mapped.
/// Otherwise text files, tokenized into memory. Throws InputError as PreparedTokens, TextTokens and TextSource.
[[nodiscard]] std::unique_ptr<BatchSource> open_text(const std::vector<std::filesystem::path>& paths,
                                                     const TextDataOptions& options);

}  // namespace tandem
