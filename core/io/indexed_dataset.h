// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/dtype.h"
#include "core/io/atomic_file.h"
#include "core/io/dataset_index.h"
#include "core/io/hash.h"
#include "core/io/mapped_file.h"

namespace tandem {

/// PREFIX.bin and PREFIX.idx, the names of the two files of an indexed dataset.
[[nodiscard]] std::filesystem::path bin_path(const std::filesystem::path& prefix);
[[nodiscard]] std::filesystem::path idx_path(const std::filesystem::path& prefix);

/// Writes Megatron-LM's indexed format (docs/formats.md): a .bin of all tokens in a row, and an .idx with the length and place of
/// each sequence and the sequences of each document. Tokens go straight to disk; memory grows by 4 bytes a sequence and 8 a
/// document.
///
/// Both files appear together at commit(); an older pair stays as it was until then, and a crash in between leaves old .bin and
/// .idx, a .bin alone, or the new pair, never a mixed one. Throws IoError as AtomicFile.
class IndexedDatasetWriter {
 public:
  /// dtype: u8, u16, i16, i32 or i64.
  IndexedDatasetWriter(std::filesystem::path prefix, DType dtype);

  /// One sequence of the current document. Throws ContractError where a token does not fit the dtype.
  void add_sequence(std::span<const std::int32_t> tokens);
  /// A sequence in pieces, for tokens that are bytes already (dtype u8 only): append() any number of times, then end_sequence(),
  /// which throws ContractError beyond 2^31 - 1 tokens.
  void append(std::span<const std::uint8_t> tokens);
  /// The same for tokens of any dtype, as it stores them.
  void append_stored(std::span<const std::byte> tokens);
  void end_sequence();
  /// Ends the current document, which may be empty.
  void end_document();
  /// Makes both files durable without showing them yet. Throws ContractError where sequences follow the last end_document().
  void finish();
  /// finish(), then the new pair takes the place of the old.
  void commit();

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }
  [[nodiscard]] std::int64_t num_documents() const noexcept { return static_cast<std::int64_t>(document_ends_.size()); }
  /// Of the sequence that has not ended.
  [[nodiscard]] std::int64_t open_tokens() const noexcept { return open_tokens_; }
  /// Of the .idx; known once finish() has returned.
  [[nodiscard]] Hash128 idx_hash() const noexcept { return idx_hash_; }

 private:
  void write_index();
  void write_indexed(std::span<const std::byte> bytes);

  std::filesystem::path prefix_;
  DType dtype_;
  AtomicFile bin_;
  AtomicFile idx_;
  std::vector<std::int32_t> sequence_sizes_;
  std::vector<std::int64_t> document_ends_;  ///< number of sequences up to the end of each document
  std::int64_t num_tokens_ = 0;
  std::int64_t open_tokens_ = 0;  ///< of the sequence that has not ended
  bool finished_ = false;
  Hasher128 idx_hasher_;
  Hash128 idx_hash_;
};

/// An indexed dataset, memory-mapped. Positions are 64-bit and count tokens from the start of the .bin. Nothing is copied: memory
/// does not grow with the data, nor does the time to open it. Safe to read from several threads. What is checked, and when, is
/// said at DatasetIndex.
class IndexedDataset {
 public:
  explicit IndexedDataset(const std::filesystem::path& prefix) : IndexedDataset(MappedFile(idx_path(prefix)), prefix) {}

  [[nodiscard]] DType dtype() const noexcept { return index_.dtype(); }
  [[nodiscard]] std::int64_t num_sequences() const noexcept { return index_.num_sequences(); }
  [[nodiscard]] std::int64_t num_documents() const noexcept { return index_.num_documents(); }
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return index_.num_tokens(); }

  /// Tokens of sequence `index`, and sequences of document `index`.
  [[nodiscard]] Interval sequence(std::int64_t index) const { return index_.sequence(index); }
  [[nodiscard]] Interval document_sequences(std::int64_t index) const { return index_.document_sequences(index); }
  /// First token of document `index`; num_tokens() for index = num_documents().
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const { return index_.document_begin(index); }

  /// Copies tokens [first, first + out.size()) to `out`. Throws ContractError beyond the end, InputError on a token that does not
  /// fit 32 bits.
  void read(std::int64_t first, std::span<std::int32_t> out) const;
  [[nodiscard]] std::span<const std::byte> bin_bytes() const noexcept { return bin_.bytes(); }
  /// Path of the .bin, for messages.
  [[nodiscard]] const std::string& bin() const noexcept { return index_.bin(); }
  /// Reads the whole index (DatasetIndex::check()).
  void check() const { index_.check(); }

 private:
  IndexedDataset(MappedFile idx, const std::filesystem::path& prefix);

  MappedFile bin_;
  DatasetIndex index_;
};

}  // namespace tandem
