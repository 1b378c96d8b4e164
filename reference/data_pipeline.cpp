// SPDX-License-Identifier: Apache-2.0
#include "reference/data_pipeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/rng.h"
#include "core/text.h"

namespace tandem::reference {
namespace {

std::vector<std::string> lines_with_ends(std::string_view text) {
  std::vector<std::string> lines;
  std::string line;
  for (const char c : text) {
    line.push_back(c);
    if (c == '\n') {
      lines.push_back(line);
      line.clear();
    }
  }
  if (!line.empty()) lines.push_back(line);
  return lines;
}

std::string without_end(const std::string& line) {
  return !line.empty() && line.back() == '\n' ? line.substr(0, line.size() - 1) : line;
}

bool is_empty(const std::string& line) { return without_end(line).empty() || without_end(line) == "\r"; }

std::string join_names(const std::vector<std::filesystem::path>& files) {
  std::vector<std::string> names;
  for (const auto& file : files) names.push_back(file.string());
  return fmt::format("{}", fmt::join(names, ", "));
}

// Pieces one behind the other, each with its own positions and attention, then padding as if it were one more.
void fill_from_pieces(Batch& batch, std::int64_t row, const std::vector<PieceTokens>& pieces) {
  std::int64_t t = 0;
  for (const PieceTokens& piece : pieces) {
    const std::int64_t start = t;
    for (std::size_t i = 0; i + 1 < piece.size(); ++i, ++t) {
      const auto at = static_cast<std::size_t>(row * batch.sequence + t);
      batch.ids[at] = piece[i];
      batch.targets[at] = piece[i + 1];
      batch.positions[at] = static_cast<std::int32_t>(t - start);
      batch.document_starts[at] = static_cast<std::int32_t>(start);
    }
  }
  for (const std::int64_t start = t; t < batch.sequence; ++t) {
    const auto at = static_cast<std::size_t>(row * batch.sequence + t);
    batch.positions[at] = static_cast<std::int32_t>(t - start);
    batch.document_starts[at] = static_cast<std::int32_t>(start);
  }
}

}  // namespace

std::vector<std::string> split_documents(std::string_view text, DocumentRule rule) {
  if (rule == DocumentRule::file) return {std::string(text)};
  std::vector<std::string> documents;
  bool inside_paragraph = false;
  for (const std::string& line : lines_with_ends(text)) {
    if (is_empty(line)) {
      inside_paragraph = false;
    } else if (rule == DocumentRule::line) {
      documents.push_back(without_end(line));
    } else {
      if (!inside_paragraph) documents.emplace_back();
      documents.back() += line;
      inside_paragraph = true;
    }
  }
  return documents;
}

std::vector<std::int64_t> epoch_permutation(std::int64_t samples, std::uint64_t seed, std::int64_t epoch) {
  return permutation_of(samples, seed, fmt::format("data_pipeline/epoch/{}", epoch));
}

std::vector<std::int64_t> permutation_of(std::int64_t samples, std::uint64_t seed, std::string_view stream) {
  int half_bits = 4;
  while ((std::int64_t{1} << 2 * half_bits) < samples) ++half_bits;
  const std::uint32_t mask = (1U << half_bits) - 1;

  CounterRng rng(seed, stream);
  const std::uint64_t key = rng.next_u64();
  const std::array<std::uint32_t, 2> words = {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};

  std::vector<std::int64_t> image(std::size_t{1} << 2 * half_bits);
  for (std::size_t x = 0; x < image.size(); ++x) {
    auto left = static_cast<std::uint32_t>(x >> half_bits);
    std::uint32_t right = static_cast<std::uint32_t>(x) & mask;
    for (std::uint32_t round = 0; round < 8; ++round) {
      const std::uint32_t next_right = left ^ (philox4x32({right, round, 0, 0}, words)[0] & mask);
      left = right;
      right = next_right;
    }
    image[x] = std::int64_t{left} << half_bits | right;
  }

  std::vector<std::int64_t> permutation;
  for (std::int64_t i = 0; i < samples; ++i) {
    std::int64_t x = image[static_cast<std::size_t>(i)];
    while (x >= samples) x = image[static_cast<std::size_t>(x)];
    permutation.push_back(x);
  }
  return permutation;
}

std::vector<PieceTokens> cut_pieces(const std::vector<std::vector<std::int32_t>>& documents, std::int64_t sequence) {
  std::vector<PieceTokens> pieces;
  for (const std::vector<std::int32_t>& tokens : documents) {
    const auto size = static_cast<std::int64_t>(tokens.size());
    // The last token of a piece is the first of the next: each pair is in one piece.
    for (std::int64_t first = 0; first + 1 < size; first += sequence) {
      const std::int64_t last = std::min(first + sequence, size - 1);
      pieces.emplace_back(tokens.begin() + first, tokens.begin() + last + 1);
    }
  }
  return pieces;
}

std::vector<std::vector<PieceTokens>> pack_pieces(const std::vector<PieceTokens>& pieces, std::int64_t sequence) {
  std::vector<std::vector<PieceTokens>> packed;
  const auto pairs = [&](std::size_t piece) { return static_cast<std::int64_t>(pieces[piece].size()) - 1; };
  for (std::size_t first = 0; first < pieces.size(); first += kPackWindow) {
    std::vector<std::size_t> order(std::min<std::size_t>(kPackWindow, pieces.size() - first));
    std::iota(order.begin(), order.end(), first);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return pairs(a) > pairs(b); });
    std::vector<std::vector<std::size_t>> rows;
    std::vector<std::int64_t> room;
    for (const std::size_t piece : order) {
      std::size_t row = 0;
      while (row < rows.size() && room[row] < pairs(piece)) ++row;
      if (row == rows.size()) {
        rows.emplace_back();
        room.push_back(sequence);
      }
      rows[row].push_back(piece);
      room[row] -= pairs(piece);
    }
    for (std::vector<std::size_t>& row : rows) {
      std::sort(row.begin(), row.end());
      packed.emplace_back();
      for (const std::size_t piece : row) packed.back().push_back(pieces[piece]);
    }
  }
  return packed;
}

TextSource::TextSource(const std::vector<std::filesystem::path>& files, const TextDataOptions& options) : options_(options) {
  validate(options_);
  if (files.empty()) throw InputError("no text file is named");
  std::vector<std::string> documents;
  for (const auto& file : files) {
    const std::string text = read_text_file(file);
    if (text.empty()) throw InputError(fmt::format("{} is empty", file.string()));
    require_text(text, file.string());
    const std::vector<std::string> found = split_documents(text, options_.documents);
    if (found.empty()) throw InputError(fmt::format("{} has no document: all its lines are empty", file.string()));
    documents.insert(documents.end(), found.begin(), found.end());
  }
  split(documents);
  if (num_samples(training_) > 0) return;
  const std::string needs = options_.batching == Batching::stream
                                ? fmt::format("a sample needs {} (sequence + 1)", options_.sequence + 1)
                                : "a sample needs a document of at least 2";
  throw InputError(fmt::format("{} has {} tokens, {} of them for training; {}", join_names(files),
                               training_.tokens.size() + validation_.tokens.size(), training_.tokens.size(), needs));
}

void TextSource::split(const std::vector<std::string>& documents) {
  Tokens& training = training_.tokens;
  Tokens& validation = validation_.tokens;
  const auto total = static_cast<std::int64_t>(documents.size());
  const auto held_out = static_cast<std::int64_t>(std::floor(options_.validation_fraction * static_cast<double>(total)));
  for (std::int64_t d = 0; d < total; ++d) {
    // With held_out = 0 every document goes to the training part here.
    Tokens& part = (d + 1) * held_out / total > d * held_out / total ? validation : training;
    for (const char c : documents[static_cast<std::size_t>(d)]) part.push_back({static_cast<unsigned char>(c), d});
    part.push_back({kEndOfDocument, d});
  }
  if (held_out == 0) {
    const auto tail =
        static_cast<std::ptrdiff_t>(std::floor(options_.validation_fraction * static_cast<double>(training.size())));
    validation.assign(training.end() - tail, training.end());
    training.erase(training.end() - tail, training.end());
  }
  training_.rows = rows_of(training);
  validation_.rows = rows_of(validation);
}

std::vector<TextSource::Row> TextSource::rows_of(const Tokens& part) const {
  if (options_.batching == Batching::stream) return {};
  std::vector<std::vector<std::int32_t>> documents;
  for (std::size_t i = 0; i < part.size(); ++i) {
    if (i == 0 || part[i].document != part[i - 1].document) documents.emplace_back();
    documents.back().push_back(part[i].id);
  }
  const std::vector<PieceTokens> pieces = cut_pieces(documents, options_.sequence);
  if (options_.batching == Batching::packed) return pack_pieces(pieces, options_.sequence);
  std::vector<Row> rows;
  for (const PieceTokens& piece : pieces) rows.push_back({piece});
  return rows;
}

std::int64_t TextSource::num_samples(const Part& part) const noexcept {
  if (options_.batching != Batching::stream) return static_cast<std::int64_t>(part.rows.size());
  return part.tokens.empty() ? 0 : (static_cast<std::int64_t>(part.tokens.size()) - 1) / options_.sequence;
}

void TextSource::fill_from_stream(Batch& batch, std::int64_t row, const Tokens& part, std::int64_t sample) const {
  const std::int64_t sequence = options_.sequence;
  std::int32_t document_start = 0;
  for (std::int64_t t = 0; t < sequence; ++t) {
    const Token& token = part[static_cast<std::size_t>(sample * sequence + t)];
    const Token& next = part[static_cast<std::size_t>(sample * sequence + t + 1)];
    const auto at = static_cast<std::size_t>(row * sequence + t);  // token t of the row in [rows, sequence]
    batch.ids[at] = token.id;
    batch.targets[at] = next.id;
    if (!options_.respect_documents) continue;
    if (t > 0 && token.document != part[static_cast<std::size_t>(sample * sequence + t - 1)].document) {
      document_start = static_cast<std::int32_t>(t);
    }
    if (next.document != token.document) batch.targets[at] = kIgnoredTarget;
    batch.document_starts[at] = document_start;
    batch.positions[at] = static_cast<std::int32_t>(t) - document_start;
  }
}

std::vector<std::int64_t> TextSource::samples_at(std::int64_t first, std::int64_t count) const {
  const std::int64_t samples = num_samples(training_);
  std::int64_t epoch = -1;
  std::vector<std::int64_t> order, found;
  for (std::int64_t number = first; number < first + count; ++number) {
    if (number / samples != epoch) {
      epoch = number / samples;
      order = epoch_permutation(samples, options_.seed, epoch);
    }
    found.push_back(order[static_cast<std::size_t>(number % samples)]);
  }
  return found;
}

std::int64_t TextSource::pairs_of(std::int64_t sample) const {
  return static_cast<std::int64_t>(training_.rows[static_cast<std::size_t>(sample)].front().size()) - 1;
}

std::vector<std::int64_t> TextSource::samples_of_step(std::int64_t step, std::int64_t rows) const {
  if (options_.batching != Batching::bucketed) return samples_at(step * rows, rows);
  const std::int64_t batches = options_.bucket_batches;
  const std::int64_t window = step / batches;
  std::vector<std::int64_t> samples = samples_at(window * batches * rows, batches * rows);
  // Stable: pieces of the same length stay in the order of their places.
  std::stable_sort(samples.begin(), samples.end(), [&](std::int64_t a, std::int64_t b) { return pairs_of(a) < pairs_of(b); });
  const auto order = permutation_of(batches, options_.seed, fmt::format("data_pipeline/window/{}", window));
  const auto first = samples.begin() + order[static_cast<std::size_t>(step % batches)] * rows;
  return {first, first + rows};
}

Batch TextSource::batch_of(const Part& part, const std::vector<std::int64_t>& samples) const {
  std::int64_t sequence = options_.sequence;
  if (options_.batching == Batching::padded || options_.batching == Batching::bucketed) {
    sequence = 1;
    for (const std::int64_t sample : samples) {
      const PieceTokens& piece = part.rows[static_cast<std::size_t>(sample)].front();
      sequence = std::max(sequence, static_cast<std::int64_t>(piece.size()) - 1);
    }
    while (!samples.empty() && sequence % options_.pad_multiple != 0) ++sequence;
  }
  Batch batch = make_batch(static_cast<std::int64_t>(samples.size()), sequence);
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    const std::int64_t sample = samples[static_cast<std::size_t>(row)];
    if (options_.batching == Batching::stream) {
      fill_from_stream(batch, row, part.tokens, sample);
    } else {
      fill_from_pieces(batch, row, part.rows[static_cast<std::size_t>(sample)]);
    }
  }
  return batch;
}

Batch TextSource::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  TANDEM_CHECK(step >= 0 && 0 <= rows.begin && rows.begin <= rows.end && rows.end <= global_rows,
               fmt::format("rows [{}, {}) of {} at step {}", rows.begin, rows.end, global_rows, step));
  return slice_rows(batch_of(training_, samples_of_step(step, global_rows)), rows.begin, rows.size());
}

std::optional<Batch> TextSource::validation_batch(std::int64_t index, std::int64_t rows) const {
  TANDEM_CHECK(index >= 0 && rows >= 1, fmt::format("batch {} of {} rows", index, rows));
  const std::int64_t first = index * rows;
  const std::int64_t count = std::min(rows, num_samples(validation_) - first);
  if (count <= 0) return std::nullopt;
  std::vector<std::int64_t> samples(static_cast<std::size_t>(count));
  std::iota(samples.begin(), samples.end(), first);
  return batch_of(validation_, samples);
}

std::string TextSource::describe() const {
  return fmt::format("text (reference): {} tokens for training in {} samples, {} for validation in {}", training_.tokens.size(),
                     num_samples(training_), validation_.tokens.size(), num_samples(validation_));
}

}  // namespace tandem::reference
