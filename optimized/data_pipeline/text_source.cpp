// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/text_source.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/data_pipeline/epoch_order.h"

namespace tandem {
namespace {

TextDataOptions checked(const TextDataOptions& options) {
  validate(options);
  return options;
}

std::optional<std::filesystem::path> prefix_of_prepared(const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  std::filesystem::path prefix = path;
  if (extension == ".idx" || extension == ".bin") prefix.replace_extension();
  if (std::filesystem::exists(idx_path(prefix))) return prefix;
  return std::nullopt;
}

}  // namespace

TextSource::TextSource(std::shared_ptr<const TokenStore> store, const TextDataOptions& options)
    : options_(checked(options)),
      store_(std::move(store)),
      training_(store_, options.validation_fraction, SplitPart::training),
      validation_(store_, options.validation_fraction, SplitPart::validation) {
  if (num_samples(training_) == 0) {
    throw InputError(fmt::format("{} has {} tokens, {} of them for training; a sample needs {} (sequence + 1)",
                                 store_->describe(), store_->num_tokens(), training_.num_tokens(), options_.sequence + 1));
  }
}

std::int64_t TextSource::num_samples(const TokenPart& part) const noexcept {
  return part.num_tokens() == 0 ? 0 : (part.num_tokens() - 1) / options_.sequence;
}

void TextSource::fill_row(Batch& batch, std::int64_t row, const TokenPart& part, std::int64_t sample) const {
  const auto sequence = static_cast<std::size_t>(options_.sequence);
  std::vector<std::int32_t> tokens(sequence + 1);
  std::vector<std::uint8_t> begins_document(sequence + 1);
  part.read(sample * options_.sequence, tokens, begins_document);
  const auto first = static_cast<std::ptrdiff_t>(row * options_.sequence);  // of the row in [rows, sequence]
  std::copy(tokens.begin(), tokens.end() - 1, batch.ids.begin() + first);
  std::copy(tokens.begin() + 1, tokens.end(), batch.targets.begin() + first);
  if (!options_.respect_documents) return;
  std::size_t start = 0;
  for (std::size_t t = 0; t < sequence; ++t) {
    const std::size_t at = static_cast<std::size_t>(first) + t;
    if (begins_document[t] != 0) start = t;
    if (begins_document[t + 1] != 0) batch.targets[at] = kIgnoredTarget;
    batch.document_starts[at] = static_cast<std::int32_t>(start);
    batch.positions[at] = static_cast<std::int32_t>(t - start);
  }
}

Batch TextSource::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  TANDEM_CHECK(step >= 0 && 0 <= rows.begin && rows.begin <= rows.end && rows.end <= global_rows,
               fmt::format("rows [{}, {}) of {} at step {}", rows.begin, rows.end, global_rows, step));
  std::int64_t first = 0;
  TANDEM_CHECK(!__builtin_mul_overflow(step, global_rows, &first) && !__builtin_add_overflow(first, rows.begin, &first),
               fmt::format("step {} of {} rows is beyond 2^63 samples", step, global_rows));
  const std::int64_t samples = num_samples(training_);
  Batch batch = make_batch(rows.size(), options_.sequence);
  std::optional<EpochOrder> order;
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    const std::int64_t place = (first + row) % samples;
    if (!order || place == 0) order.emplace(samples, options_.seed, (first + row) / samples);
    batch.row_ids[static_cast<std::size_t>(row)] = rows.begin + row;
    fill_row(batch, row, training_, order->sample(place));
  }
  return batch;
}

std::optional<Batch> TextSource::validation_batch(std::int64_t index, std::int64_t rows) const {
  TANDEM_CHECK(index >= 0 && rows >= 1, fmt::format("batch {} of {} rows", index, rows));
  const std::int64_t first = index * rows;
  const std::int64_t count = std::min(rows, num_samples(validation_) - first);
  if (count <= 0) return std::nullopt;
  Batch batch = make_batch(count, options_.sequence);
  for (std::int64_t row = 0; row < count; ++row) fill_row(batch, row, validation_, first + row);
  return batch;
}

std::string TextSource::describe() const {
  const std::int64_t held_out = num_samples(validation_);
  return fmt::format("{}: {} documents, {} tokens; training {} samples of {}, validation {}", store_->describe(),
                     store_->num_documents(), store_->num_tokens(), num_samples(training_), options_.sequence,
                     held_out > 0 ? fmt::format("{} samples", held_out)
                                  : fmt::format("none ({} tokens held out, a sample needs {})", validation_.num_tokens(),
                                                options_.sequence + 1));
}

std::unique_ptr<BatchSource> open_text(const std::vector<std::filesystem::path>& paths, const TextDataOptions& options) {
  std::shared_ptr<const TokenStore> store;
  const auto prefix = paths.size() == 1 ? prefix_of_prepared(paths.front()) : std::nullopt;
  if (prefix) {
    store = std::make_shared<PreparedTokens>(*prefix);
  } else {
    store = std::make_shared<TextTokens>(paths, options.documents);
  }
  return std::make_unique<TextSource>(std::move(store), options);
}

}  // namespace tandem
