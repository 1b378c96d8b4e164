// SPDX-License-Identifier: Apache-2.0
#include "core/io/dataset_index.h"

#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;

// The header has 34 bytes, so that nothing behind it is aligned.
template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class Stored>
void decode(std::span<const std::byte> stored, std::int64_t first, std::string_view file, std::span<std::int32_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto token = load<Stored>(stored.data() + i * sizeof(Stored));
    if (!std::in_range<std::int32_t>(token)) {
      throw InputError(fmt::format("{} has token {} at {}, beyond 32 bits", file, token, first + static_cast<std::int64_t>(i)));
    }
    out[i] = static_cast<std::int32_t>(token);
  }
}

}  // namespace

bool holds_tokens(DType dtype) noexcept {
  return dtype == DType::u8 || dtype == DType::i8 || dtype == DType::u16 || dtype == DType::i16 || dtype == DType::i32 ||
         dtype == DType::i64;
}

void decode_tokens(DType dtype, std::span<const std::byte> stored, std::int64_t first, std::string_view file,
                   std::span<std::int32_t> out) {
  TANDEM_CHECK(stored.size() == out.size() * size_bytes(dtype),
               fmt::format("{} bytes for {} tokens of {}", stored.size(), out.size(), name(dtype)));
  switch (dtype) {
    case DType::u8: return decode<std::uint8_t>(stored, first, file, out);
    case DType::i8: return decode<std::int8_t>(stored, first, file, out);
    case DType::u16: return decode<std::uint16_t>(stored, first, file, out);
    case DType::i16: return decode<std::int16_t>(stored, first, file, out);
    case DType::i32: return decode<std::int32_t>(stored, first, file, out);
    case DType::i64: return decode<std::int64_t>(stored, first, file, out);
    default: throw ContractError(fmt::format("{} holds no tokens", name(dtype)));
  }
}

DatasetIndex::DatasetIndex(MappedFile idx, std::string bin, std::int64_t bin_bytes)
    : idx_(std::move(idx)), bin_(std::move(bin)), bin_bytes_(bin_bytes) {
  read_header();
  check_ends();
  num_tokens_ = bin_bytes_ / token_bytes_;
}

void DatasetIndex::refuse(const std::string& what) const {
  throw InputError(fmt::format("{} is not a valid index of a dataset: {}; prepare the data again", idx_.path().string(), what));
}

void DatasetIndex::refuse_bin(const std::string& index_says) const {
  throw InputError(fmt::format("{} has {} bytes, but by its .idx {}; prepare the data again", bin_, bin_bytes_, index_says));
}

void DatasetIndex::read_header() {
  const std::span<const std::byte> bytes = idx_.bytes();
  if (bytes.size() < kHeaderBytes) refuse(fmt::format("{} bytes, the header alone takes {}", bytes.size(), kHeaderBytes));
  if (std::memcmp(bytes.data(), kIndexMagic.data(), kIndexMagic.size()) != 0) refuse("it does not start with MMIDIDX");
  const auto version = load<std::uint64_t>(&bytes[9]);
  if (version != kIndexVersion) refuse(fmt::format("version {}, this program reads {}", version, kIndexVersion));
  const auto code = std::to_integer<std::uint8_t>(bytes[17]);
  if (code < 1 || code > kIndexDtypes.size()) {
    refuse(fmt::format("dtype code {} is not between 1 and {}", code, kIndexDtypes.size()));
  }
  dtype_ = kIndexDtypes[code - 1U];
  if (!holds_tokens(dtype_)) refuse(fmt::format("dtype code {} ({}) does not hold tokens", code, name(dtype_)));
  token_bytes_ = static_cast<std::int64_t>(size_bytes(dtype_));
  const auto sequences = load<std::uint64_t>(&bytes[18]);
  const auto documents = load<std::uint64_t>(&bytes[26]);
  const std::uint64_t body = bytes.size() - kHeaderBytes;
  // Bounded first: sums of counts that a damaged file made huge must not wrap around.
  if (sequences > body / 12 || documents > body / 8 || sequences * 12 + documents * 8 > body) {
    refuse(fmt::format("{} sequences and {} document entries do not fit its {} bytes: truncated?", sequences, documents,
                       bytes.size()));
  }
  const std::uint64_t expected = sequences * 12 + documents * 8;
  if (body == expected + sequences && sequences > 0) {
    refuse("it has a mode for each sequence (multimodal data), which this program does not read");
  }
  if (body != expected) refuse(fmt::format("{} bytes follow the document index", body - expected));
  if (documents == 0) refuse("the document index is empty, it must at least have the 0 at its start");
  num_sequences_ = static_cast<std::int64_t>(sequences);
  num_documents_ = static_cast<std::int64_t>(documents) - 1;
}

void DatasetIndex::check_ends() const {
  if (num_sequences_ == 0) {
    if (bin_bytes_ != 0) refuse_bin("it has no sequences");
  } else {
    if (pointer_at(0) != 0) refuse(fmt::format("sequence 0 starts at byte {}, not at 0", pointer_at(0)));
    const std::int64_t last = num_sequences_ - 1;
    if (size_at(last) < 0) refuse(fmt::format("sequence {} has {} tokens", last, size_at(last)));
    const std::int64_t bytes = size_at(last) * token_bytes_;
    if (pointer_at(last) < 0 || pointer_at(last) != bin_bytes_ - bytes) {
      refuse_bin(fmt::format("the last sequence, {}, starts at byte {} and has {}", last, pointer_at(last), bytes));
    }
    if (bin_bytes_ % token_bytes_ != 0) refuse_bin(fmt::format("its tokens have {} bytes each", token_bytes_));
  }
  if (document_at(0) != 0) refuse(fmt::format("the document index starts with {}, not with 0", document_at(0)));
  if (document_at(num_documents_) != num_sequences_) {
    refuse(fmt::format("its documents end at sequence {} of {}", document_at(num_documents_), num_sequences_));
  }
}

void DatasetIndex::check() const {
  check_sequences();
  check_documents();
}

void DatasetIndex::check_sequences() const {
  std::int64_t pointer = 0;
  for (std::int64_t i = 0; i < num_sequences_; ++i) {
    const std::int32_t tokens = size_at(i);
    if (tokens < 0) refuse(fmt::format("sequence {} has {} tokens", i, tokens));
    if (pointer_at(i) != pointer) {
      refuse(fmt::format("sequence {} starts at byte {}, the ones before it end at {}", i, pointer_at(i), pointer));
    }
    pointer += tokens * token_bytes_;
    if (pointer > bin_bytes_) refuse_bin(fmt::format("sequence {} ends at byte {}", i, pointer));
  }
}

void DatasetIndex::check_documents() const {
  for (std::int64_t d = 0; d < num_documents_; ++d) (void)document_sequences(d);
}

std::int32_t DatasetIndex::size_at(std::int64_t index) const noexcept {
  return load<std::int32_t>(idx_.bytes().data() + kHeaderBytes + index * 4);
}

std::int64_t DatasetIndex::pointer_at(std::int64_t index) const noexcept {
  return load<std::int64_t>(idx_.bytes().data() + kHeaderBytes + num_sequences_ * 4 + index * 8);
}

std::int64_t DatasetIndex::document_at(std::int64_t index) const noexcept {
  return load<std::int64_t>(idx_.bytes().data() + kHeaderBytes + num_sequences_ * 12 + index * 8);
}

Interval DatasetIndex::sequence(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index < num_sequences_, fmt::format("sequence {} of {}", index, num_sequences_));
  const std::int32_t tokens = size_at(index);
  const std::int64_t pointer = pointer_at(index);
  if (tokens < 0 || pointer < 0 || pointer % token_bytes_ != 0 || pointer > bin_bytes_ - tokens * token_bytes_) {
    refuse(fmt::format("sequence {} has {} tokens from byte {} on, the .bin has {} bytes", index, tokens, pointer, bin_bytes_));
  }
  return {pointer / token_bytes_, pointer / token_bytes_ + tokens};
}

Interval DatasetIndex::document_sequences(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index < num_documents_, fmt::format("document {} of {}", index, num_documents_));
  const Interval sequences = {document_at(index), document_at(index + 1)};
  if (sequences.begin < 0 || sequences.end < sequences.begin || sequences.end > num_sequences_) {
    refuse(fmt::format("document {} has sequences {} to {} of {}", index, sequences.begin, sequences.end, num_sequences_));
  }
  return sequences;
}

std::int64_t DatasetIndex::document_begin(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index <= num_documents_, fmt::format("document {} of {}", index, num_documents_));
  if (index == num_documents_) return num_tokens_;
  const std::int64_t first = document_sequences(index).begin;
  return first == num_sequences_ ? num_tokens_ : sequence(first).begin;
}

}  // namespace tandem
