// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/batch.h"
#include "core/dtype.h"
#include "core/io/mapped_file.h"

namespace tandem {

/// What stands at the start of an .idx (docs/formats.md), for reader and writer. A dtype's code is its place in the list plus
/// one.
inline constexpr std::string_view kIndexMagic{"MMIDIDX\0\0", 9};
inline constexpr std::uint64_t kIndexVersion = 1;
inline constexpr std::array kIndexDtypes = {DType::u8,  DType::i8,  DType::i16, DType::i32,
                                            DType::i64, DType::f64, DType::f32, DType::u16};

/// True for the integer types that the format has.
[[nodiscard]] bool holds_tokens(DType dtype) noexcept;

/// Tokens as a .bin stores them, `out.size()` of `dtype`, into `out`. `first` is the position of the first one and `file` its
/// file, for the message. Throws InputError on a token beyond 32 bits.
void decode_tokens(DType dtype, std::span<const std::byte> stored, std::int64_t first, std::string_view file,
                   std::span<std::int32_t> out);

/// The .idx of an indexed dataset, memory-mapped; its .bin may be elsewhere. Safe to read from several threads.
///
/// Opening touches a few pages whatever the size: it checks the header, the counts against the size of the file, and that the
/// first and the last entries fit the size of the .bin. Every access checks the entries that it uses, so that what it returns
/// never lies outside the .bin; check() reads all of them. What is wrong is an InputError with file, place and numbers.
class DatasetIndex {
 public:
  /// `bin` is the name of the .bin, for messages, and `bin_bytes` its size.
  DatasetIndex(MappedFile idx, std::string bin, std::int64_t bin_bytes);

  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] std::int64_t token_bytes() const noexcept { return token_bytes_; }
  [[nodiscard]] std::int64_t num_sequences() const noexcept { return num_sequences_; }
  [[nodiscard]] std::int64_t num_documents() const noexcept { return num_documents_; }
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }
  [[nodiscard]] const std::string& bin() const noexcept { return bin_; }

  /// Tokens of sequence `index`, and sequences of document `index`.
  [[nodiscard]] Interval sequence(std::int64_t index) const;
  [[nodiscard]] Interval document_sequences(std::int64_t index) const;
  /// First token of document `index`; num_tokens() for index = num_documents().
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const;

  /// Reads the whole index: no negative length, each sequence starts where the one before it ends, documents do not run
  /// backwards. Throws InputError at the first entry that does not fit.
  void check() const;

 private:
  void read_header();
  void check_ends() const;
  void check_sequences() const;
  void check_documents() const;
  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void refuse_bin(const std::string& index_says) const;
  [[nodiscard]] std::int32_t size_at(std::int64_t index) const noexcept;
  [[nodiscard]] std::int64_t pointer_at(std::int64_t index) const noexcept;
  [[nodiscard]] std::int64_t document_at(std::int64_t index) const noexcept;

  MappedFile idx_;
  std::string bin_;
  std::int64_t bin_bytes_;
  DType dtype_ = DType::u8;
  std::int64_t token_bytes_ = 1;
  std::int64_t num_sequences_ = 0;
  std::int64_t num_documents_ = 0;
  std::int64_t num_tokens_ = 0;
};

}  // namespace tandem
