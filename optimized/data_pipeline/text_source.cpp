// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/text_source.h"

#include <algorithm>
#include <numeric>
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

// Shape and row numbers; whoever fills a row writes all else of it but ids that are 0.
Batch empty_batch(Interval rows, std::int64_t sequence) {
  Batch batch;
  batch.rows = rows.size();
  batch.sequence = sequence;
  const auto count = static_cast<std::size_t>(batch.rows * sequence);
  batch.ids.resize(count);
  batch.targets.resize(count);
  batch.positions.resize(count);
  batch.document_starts.resize(count);
  batch.row_ids.resize(static_cast<std::size_t>(batch.rows));
  std::iota(batch.row_ids.begin(), batch.row_ids.end(), rows.begin);
  return batch;
}

// Samples in the order of training: those of one epoch after the other.
class TrainingOrder {
 public:
  TrainingOrder(std::int64_t samples, std::uint64_t seed) : samples_(samples), seed_(seed) {}

  std::int64_t sample(std::int64_t number) {
    const std::int64_t epoch = number / samples_;
    if (!order_ || epoch != epoch_) order_.emplace(samples_, seed_, epoch_ = epoch);
    return order_->sample(number % samples_);
  }

 private:
  std::int64_t samples_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
  std::optional<EpochOrder> order_;
};

std::int64_t first_number(std::int64_t step, std::int64_t rows) {
  std::int64_t first = 0, end = 0;
  TANDEM_CHECK(!__builtin_mul_overflow(step, rows, &first) && !__builtin_add_overflow(first, rows, &end),
               fmt::format("step {} of {} rows is beyond 2^63 samples", step, rows));
  return first;
}

// Planted: a position that was kept in 32 bits.
std::int64_t place_of(std::int64_t token, const PitfallSet& pitfalls) {
  return pitfalls.on(Pitfall::sample_index_wraps) ? static_cast<std::int64_t>(static_cast<std::uint32_t>(token)) : token;
}

}  // namespace

TextSource::Part::Part(const std::shared_ptr<const TokenStore>& store, const TextDataOptions& options, SplitPart part)
    : tokens(store, options.validation_fraction, part) {
  if (options.batching != Batching::stream) pieces.emplace(tokens, options.sequence);
  if (options.batching == Batching::packed) packed.emplace(*pieces, options.sequence);
}

TextSource::TextSource(std::shared_ptr<const TokenStore> store, const TextDataOptions& options, const PitfallSet& pitfalls)
    : options_(checked(options)),
      pitfalls_(pitfalls),
      store_(std::move(store)),
      training_(store_, options, SplitPart::training),
      validation_(store_, options, SplitPart::validation),
      buckets_(options.bucket_batches, options.seed, pitfalls) {
  if (num_samples(training_) > 0) return;
  const std::string needs = options_.batching == Batching::stream
                                ? fmt::format("a sample needs {} (sequence + 1)", options_.sequence + 1)
                                : "a sample needs a document of at least 2";
  throw InputError(fmt::format("{} has {} tokens, {} of them for training; {}", store_->describe(), store_->num_tokens(),
                               training_.tokens.num_tokens(), needs));
}

bool TextSource::pads_to_longest() const noexcept {
  return options_.batching == Batching::padded || options_.batching == Batching::bucketed;
}

std::int64_t TextSource::num_samples(const Part& part) const noexcept {
  if (part.packed) return part.packed->num_rows();
  if (part.pieces) return part.pieces->num_pieces();
  return part.tokens.num_tokens() == 0 ? 0 : (part.tokens.num_tokens() - 1) / options_.sequence;
}

void TextSource::fill_stream(Batch& batch, std::int64_t row, const TokenPart& part, std::int64_t sample) const {
  const auto sequence = static_cast<std::size_t>(options_.sequence);
  const std::int64_t first = place_of(sample * options_.sequence, pitfalls_);
  const std::size_t at = static_cast<std::size_t>(row) * sequence;  // of the row in [rows, sequence]
  const std::span<std::int32_t> ids = std::span(batch.ids).subspan(at, sequence);
  const std::span<std::int32_t> targets = std::span(batch.targets).subspan(at, sequence);
  const std::span<std::int32_t> positions = std::span(batch.positions).subspan(at, sequence);
  if (!options_.respect_documents) {
    part.read(first + 1, targets, {});
    part.read(first, ids.first(1), {});
    std::copy(targets.begin(), targets.end() - 1, ids.begin() + 1);
    std::iota(positions.begin(), positions.end(), 0);
    return;
  }
  std::vector<std::int32_t> tokens(sequence + 1);
  std::vector<std::uint8_t> begins_document(sequence + 1);
  part.read(first, tokens, begins_document);
  std::copy(tokens.begin(), tokens.end() - 1, ids.begin());
  std::copy(tokens.begin() + 1, tokens.end(), targets.begin());
  std::size_t start = 0;
  for (std::size_t t = 0; t < sequence; ++t) {
    if (begins_document[t] != 0) start = t;
    if (begins_document[t + 1] != 0) targets[t] = kIgnoredTarget;
    batch.document_starts[at + t] = static_cast<std::int32_t>(start);
    positions[t] = static_cast<std::int32_t>(t - start);
  }
}

void TextSource::fill_pieces(Batch& batch, std::int64_t row, std::span<const Piece> pieces) const {
  const auto row_begin = static_cast<std::size_t>(row * batch.sequence);
  const auto sequence = static_cast<std::size_t>(batch.sequence);
  std::size_t start = 0;  // of a piece, or of the padding, in its row
  const auto begin_document = [&](std::size_t length) {
    const auto positions = std::span(batch.positions).subspan(row_begin + start, length);
    const auto starts = std::span(batch.document_starts).subspan(row_begin + start, length);
    std::iota(positions.begin(), positions.end(), 0);
    // Planted: positions restart, attention does not.
    const bool restarts = !pitfalls_.on(Pitfall::packed_documents_attend);
    std::fill(starts.begin(), starts.end(), restarts ? static_cast<std::int32_t>(start) : 0);
  };
  for (const Piece& piece : pieces) {
    const auto length = static_cast<std::size_t>(piece.pairs);
    const auto ids = std::span(batch.ids).subspan(row_begin + start, length);
    const auto targets = std::span(batch.targets).subspan(row_begin + start, length);
    const std::int64_t first = place_of(piece.first_token, pitfalls_);
    store_->read(first + 1, targets);
    store_->read(first, ids.first(1));
    std::copy(targets.begin(), targets.end() - 1, ids.begin() + 1);
    begin_document(length);
    start += length;
  }
  if (start == sequence) return;
  // Ids are 0 already. Planted: the end of a document is what the model learns to expect behind it, over and over.
  const std::int32_t target = pitfalls_.on(Pitfall::padding_is_target) ? kEndOfDocument : kIgnoredTarget;
  const auto targets = std::span(batch.targets).subspan(row_begin + start, sequence - start);
  std::fill(targets.begin(), targets.end(), target);
  begin_document(sequence - start);
}

// Planted: what has been shifted is shifted again, and the last target of a row is the first of the next.
void TextSource::plant(Batch& batch) const {
  if (!pitfalls_.on(Pitfall::labels_shifted_twice) || batch.targets.empty()) return;
  std::rotate(batch.targets.begin(), batch.targets.begin() + 1, batch.targets.end());
}

Batch TextSource::whole_rows(const Part& part, Interval rows, const SampleAt& sample_at) const {
  Batch batch = empty_batch(rows, options_.sequence);
  PackedRows::Window window;
  std::vector<Piece> pieces;
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    const std::int64_t sample = sample_at(rows.begin + row);
    if (!part.packed) {
      fill_stream(batch, row, part.tokens, sample);
    } else {
      part.packed->pieces_of(sample, window, pieces);
      fill_pieces(batch, row, pieces);
    }
  }
  plant(batch);
  return batch;
}

Batch TextSource::padded_rows(std::span<const Piece> pieces, Interval rows) const {
  std::int64_t longest = 1;
  for (const Piece& piece : pieces) longest = std::max(longest, piece.pairs);
  const std::int64_t multiple = pieces.empty() ? 1 : options_.pad_multiple;
  Batch batch = empty_batch(rows, (longest + multiple - 1) / multiple * multiple);
  for (std::int64_t row = 0; row < rows.size(); ++row) {
    fill_pieces(batch, row, pieces.subspan(static_cast<std::size_t>(rows.begin + row), 1));
  }
  plant(batch);
  return batch;
}

std::vector<Piece> TextSource::pieces_of_step(std::int64_t step, std::int64_t rows) const {
  TrainingOrder order(num_samples(training_), options_.seed);
  const auto piece_at = [&](std::int64_t place) { return training_.pieces->piece(order.sample(place)); };
  if (options_.batching == Batching::bucketed) return buckets_.batch(step, rows, piece_at);
  const std::int64_t first = first_number(step, rows);
  std::vector<Piece> pieces;
  for (std::int64_t row = 0; row < rows; ++row) pieces.push_back(piece_at(first + row));
  return pieces;
}

Batch TextSource::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  TANDEM_CHECK(step >= 0 && 0 <= rows.begin && rows.begin <= rows.end && rows.end <= global_rows,
               fmt::format("rows [{}, {}) of {} at step {}", rows.begin, rows.end, global_rows, step));
  if (pads_to_longest()) return padded_rows(pieces_of_step(step, global_rows), rows);
  const std::int64_t first = first_number(step, global_rows);
  TrainingOrder order(num_samples(training_), options_.seed);
  return whole_rows(training_, rows, [&](std::int64_t row) { return order.sample(first + row); });
}

std::optional<Batch> TextSource::validation_batch(std::int64_t index, std::int64_t rows) const {
  TANDEM_CHECK(index >= 0 && rows >= 1, fmt::format("batch {} of {} rows", index, rows));
  const std::int64_t first = index * rows;
  const std::int64_t count = std::min(rows, num_samples(validation_) - first);
  if (count <= 0) return std::nullopt;
  if (!pads_to_longest()) return whole_rows(validation_, {0, count}, [&](std::int64_t row) { return first + row; });
  std::vector<Piece> pieces(static_cast<std::size_t>(count));
  PieceCursor cursor = validation_.pieces->from(first);
  for (Piece& piece : pieces) TANDEM_CHECK(cursor.next(piece), fmt::format("{} held-out pieces from {} on", count, first));
  return padded_rows(pieces, {0, count});
}

std::string TextSource::describe() const {
  const std::int64_t held_out = num_samples(validation_);
  const std::string rows =
      options_.batching == Batching::stream
          ? fmt::format("{} samples of {}", num_samples(training_), options_.sequence)
          : fmt::format("{} {} rows of at most {}", num_samples(training_), name(options_.batching), options_.sequence);
  return fmt::format("{}: {} documents, {} tokens; training {}, validation {}", store_->describe(), store_->num_documents(),
                     store_->num_tokens(), rows,
                     held_out > 0 ? fmt::format("{} samples", held_out)
                                  : fmt::format("none ({} tokens held out, a sample needs {})", validation_.tokens.num_tokens(),
                                                options_.batching == Batching::stream ? options_.sequence + 1 : 2));
}

std::string TextSource::identity() const {
  std::string batching = fmt::format("{} rows of {}", name(options_.batching), options_.sequence);
  if (options_.batching == Batching::stream && options_.respect_documents) batching += " with documents";
  if (options_.batching == Batching::bucketed) batching += fmt::format(" in windows of {} batches", options_.bucket_batches);
  if (pads_to_longest() && options_.pad_multiple > 1) batching += fmt::format(" to multiples of {}", options_.pad_multiple);
  return fmt::format("{}; {} documents, {} tokens; {}; held out {}; seed {}", store_->identity(), store_->num_documents(),
                     store_->num_tokens(), batching, options_.validation_fraction, options_.seed);
}

std::unique_ptr<BatchSource> open_text(const std::vector<std::filesystem::path>& paths, const TextDataOptions& options,
                                       const PitfallSet& pitfalls) {
  std::shared_ptr<const TokenStore> store;
  if (paths.size() == 1) store = open_stored_tokens(paths.front());
  if (!store) store = std::make_shared<TextTokens>(paths, options.documents);
  return std::make_unique<TextSource>(std::move(store), options, pitfalls);
}

}  // namespace tandem
