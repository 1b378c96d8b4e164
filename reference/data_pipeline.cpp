// SPDX-License-Identifier: Apache-2.0
#include "reference/data_pipeline.h"

#include <algorithm>
#include <array>
#include <cmath>

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
  int half_bits = 4;
  while ((std::int64_t{1} << 2 * half_bits) < samples) ++half_bits;
  const std::uint32_t mask = (1U << half_bits) - 1;

  CounterRng rng(seed, fmt::format("data_pipeline/epoch/{}", epoch));
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
  if (num_samples(training_) == 0) {
    throw InputError(fmt::format("{} has {} tokens, {} of them for training; a sample needs {} (sequence + 1)", join_names(files),
                                 training_.size() + validation_.size(), training_.size(), options_.sequence + 1));
  }
}

void TextSource::split(const std::vector<std::string>& documents) {
  const auto total = static_cast<std::int64_t>(documents.size());
  const auto held_out = static_cast<std::int64_t>(std::floor(options_.validation_fraction * static_cast<double>(total)));
  for (std::int64_t d = 0; d < total; ++d) {
    // With held_out = 0 every document goes to the training part here.
    Tokens& part = (d + 1) * held_out / total > d * held_out / total ? validation_ : training_;
    for (const char c : documents[static_cast<std::size_t>(d)]) part.push_back({static_cast<unsigned char>(c), d});
    part.push_back({kEndOfDocument, d});
  }
  if (held_out == 0) {
    const auto tail =
        static_cast<std::ptrdiff_t>(std::floor(options_.validation_fraction * static_cast<double>(training_.size())));
    validation_.assign(training_.end() - tail, training_.end());
    training_.erase(training_.end() - tail, training_.end());
  }
}

std::int64_t TextSource::num_samples(const Tokens& part) const noexcept {
  return part.empty() ? 0 : (static_cast<std::int64_t>(part.size()) - 1) / options_.sequence;
}

void TextSource::fill_row(Batch& batch, std::int64_t row, const Tokens& part, std::int64_t sample) const {
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

Batch TextSource::training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const {
  TANDEM_CHECK(step >= 0 && 0 <= rows.begin && rows.begin <= rows.end && rows.end <= global_rows,
               fmt::format("rows [{}, {}) of {} at step {}", rows.begin, rows.end, global_rows, step));
  const std::int64_t samples = num_samples(training_);
  Batch batch = make_batch(rows.size(), options_.sequence);
  std::int64_t epoch = -1;
  std::vector<std::int64_t> order;
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    const std::int64_t number = step * global_rows + r;
    if (number / samples != epoch) {
      epoch = number / samples;
      order = epoch_permutation(samples, options_.seed, epoch);
    }
    batch.row_ids[static_cast<std::size_t>(r - rows.begin)] = r;
    fill_row(batch, r - rows.begin, training_, order[static_cast<std::size_t>(number % samples)]);
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
  return fmt::format("text (reference): {} tokens for training in {} samples, {} for validation in {}", training_.size(),
                     num_samples(training_), validation_.size(), num_samples(validation_));
}

}  // namespace tandem::reference
