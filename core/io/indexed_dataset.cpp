// SPDX-License-Identifier: Apache-2.0
#include "core/io/indexed_dataset.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kMagic = "MMIDIDX\0\0"sv;
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr std::array kCodes = {DType::u8, DType::i8, DType::i16, DType::i32, DType::i64, DType::f64, DType::f32, DType::u16};

static_assert(kMagic.size() == 9);

std::uint8_t code_of(DType dtype) {
  return static_cast<std::uint8_t>(std::find(kCodes.begin(), kCodes.end(), dtype) - kCodes.begin() + 1);
}

bool holds_tokens(DType dtype) {
  return dtype == DType::u8 || dtype == DType::i8 || dtype == DType::u16 || dtype == DType::i16 || dtype == DType::i32 ||
         dtype == DType::i64;
}

// The header has 34 bytes, so that nothing behind it is aligned.
template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
void write_value(AtomicFile& file, const T& value) {
  file.write(std::as_bytes(std::span(&value, 1)));
}

[[noreturn]] void refuse(const MappedFile& file, const std::string& what) {
  throw InputError(fmt::format("{} is not a valid index of a dataset: {}", file.path().string(), what));
}

/// Calls use(Stored{}), Stored being the integer type of the dtype.
template <class Use>
void with_token_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::u8: return use(std::uint8_t{});
    case DType::i8: return use(std::int8_t{});
    case DType::u16: return use(std::uint16_t{});
    case DType::i16: return use(std::int16_t{});
    case DType::i32: return use(std::int32_t{});
    case DType::i64: return use(std::int64_t{});
    default: throw ContractError(fmt::format("{} holds no tokens", name(dtype)));
  }
}

std::filesystem::path with_suffix(std::filesystem::path prefix, std::string_view suffix) { return prefix += suffix; }

}  // namespace

std::filesystem::path bin_path(const std::filesystem::path& prefix) { return with_suffix(prefix, ".bin"); }
std::filesystem::path idx_path(const std::filesystem::path& prefix) { return with_suffix(prefix, ".idx"); }

IndexedDatasetWriter::IndexedDatasetWriter(std::filesystem::path prefix, DType dtype)
    : prefix_(std::move(prefix)), dtype_(dtype), bin_(bin_path(prefix_)), idx_(idx_path(prefix_)) {
  TANDEM_CHECK(holds_tokens(dtype), fmt::format("{} holds no tokens", name(dtype)));
}

void IndexedDatasetWriter::add_sequence(std::span<const std::int32_t> tokens) {
  with_token_type(dtype_, [&]<class Stored>(Stored) {
    std::vector<Stored> stored(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      TANDEM_CHECK(std::in_range<Stored>(tokens[i]), fmt::format("token {} does not fit {}", tokens[i], name(dtype_)));
      stored[i] = static_cast<Stored>(tokens[i]);
    }
    bin_.write(std::as_bytes(std::span(stored)));
  });
  open_tokens_ += static_cast<std::int64_t>(tokens.size());
  end_sequence();
}

void IndexedDatasetWriter::append(std::span<const std::uint8_t> tokens) {
  TANDEM_CHECK(dtype_ == DType::u8, fmt::format("the dataset holds {}", name(dtype_)));
  bin_.write(std::as_bytes(tokens));
  open_tokens_ += static_cast<std::int64_t>(tokens.size());
}

void IndexedDatasetWriter::end_sequence() {
  TANDEM_CHECK(std::in_range<std::int32_t>(open_tokens_),
               fmt::format("a sequence of {} tokens; the format has 31 bits", open_tokens_));
  sequence_sizes_.push_back(static_cast<std::int32_t>(open_tokens_));
  num_tokens_ += open_tokens_;
  open_tokens_ = 0;
}

void IndexedDatasetWriter::end_document() { document_ends_.push_back(static_cast<std::int64_t>(sequence_sizes_.size())); }

void IndexedDatasetWriter::finish() {
  if (finished_) return;
  const auto num_sequences = static_cast<std::int64_t>(sequence_sizes_.size());
  TANDEM_CHECK(open_tokens_ == 0 && (document_ends_.empty() ? 0 : document_ends_.back()) == num_sequences,
               "the last document has not ended");
  write_index();
  bin_.finish();
  idx_.finish();
  finished_ = true;
}

void IndexedDatasetWriter::commit() {
  finish();
  // An old .idx beside a new .bin would describe other bytes. Missing, it is noticed.
  (void)::unlink(idx_.path().c_str());
  bin_.commit();
  idx_.commit();
}

void IndexedDatasetWriter::write_index() {
  idx_.write(kMagic);
  write_value(idx_, kVersion);
  write_value(idx_, code_of(dtype_));
  write_value(idx_, std::uint64_t{sequence_sizes_.size()});
  write_value(idx_, std::uint64_t{document_ends_.size() + 1});
  idx_.write(std::as_bytes(std::span(sequence_sizes_)));
  std::int64_t pointer = 0;
  for (const std::int32_t tokens : sequence_sizes_) {
    write_value(idx_, pointer);
    pointer += std::int64_t{tokens} * static_cast<std::int64_t>(size_bytes(dtype_));
  }
  write_value(idx_, std::int64_t{0});
  idx_.write(std::as_bytes(std::span(document_ends_)));
}

IndexedDataset::IndexedDataset(const std::filesystem::path& prefix) : idx_(idx_path(prefix)), bin_(bin_path(prefix)) {
  read_header();
  check_sequences();
  check_documents();
}

void IndexedDataset::read_header() {
  const std::span<const std::byte> bytes = idx_.bytes();
  if (bytes.size() < kHeaderBytes) refuse(idx_, fmt::format("{} bytes, the header alone takes {}", bytes.size(), kHeaderBytes));
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) refuse(idx_, "it does not start with MMIDIDX");
  const auto version = load<std::uint64_t>(&bytes[9]);
  if (version != kVersion) refuse(idx_, fmt::format("version {}, this program reads 1", version));
  const auto code = std::to_integer<std::uint8_t>(bytes[17]);
  if (code < 1 || code > kCodes.size()) refuse(idx_, fmt::format("dtype code {} is not between 1 and {}", code, kCodes.size()));
  dtype_ = kCodes[code - 1U];
  if (!holds_tokens(dtype_)) refuse(idx_, fmt::format("dtype code {} ({}) does not hold tokens", code, name(dtype_)));
  const auto sequences = load<std::uint64_t>(&bytes[18]);
  const auto documents = load<std::uint64_t>(&bytes[26]);
  const std::uint64_t body = bytes.size() - kHeaderBytes;
  // Bounded first: sums of counts that a damaged file made huge must not wrap around.
  if (sequences > body / 12 || documents > body / 8 || sequences * 12 + documents * 8 > body) {
    refuse(idx_, fmt::format("{} sequences and {} document entries do not fit its {} bytes: truncated?", sequences, documents,
                             bytes.size()));
  }
  const std::uint64_t expected = sequences * 12 + documents * 8;
  if (body == expected + sequences && sequences > 0) {
    refuse(idx_, "it has a mode for each sequence (multimodal data), which this program does not read");
  }
  if (body != expected) refuse(idx_, fmt::format("{} bytes follow the document index", body - expected));
  if (documents == 0) refuse(idx_, "the document index is empty, it must at least have the 0 at its start");
  num_sequences_ = static_cast<std::int64_t>(sequences);
  num_documents_ = static_cast<std::int64_t>(documents) - 1;
}

void IndexedDataset::check_sequences() {
  const auto token_bytes = static_cast<std::int64_t>(size_bytes(dtype_));
  const auto bin_bytes = static_cast<std::int64_t>(bin_.bytes().size());
  std::int64_t pointer = 0;
  for (std::int64_t i = 0; i < num_sequences_; ++i) {
    const std::int32_t tokens = size_at(i);
    if (tokens < 0) refuse(idx_, fmt::format("sequence {} has {} tokens", i, tokens));
    if (pointer_at(i) != pointer) {
      refuse(idx_, fmt::format("sequence {} starts at byte {}, the ones before it end at {}", i, pointer_at(i), pointer));
    }
    pointer += tokens * token_bytes;
    if (pointer > bin_bytes) refuse_bin(fmt::format("sequence {} ends at byte {}", i, pointer));
  }
  if (pointer != bin_bytes) refuse_bin(fmt::format("the sequences end at byte {}", pointer));
  num_tokens_ = pointer / token_bytes;
}

void IndexedDataset::refuse_bin(const std::string& index_says) const {
  throw InputError(fmt::format("{} has {} bytes, but by its .idx {}; prepare the data again", bin_.path().string(),
                               bin_.bytes().size(), index_says));
}

void IndexedDataset::check_documents() const {
  if (document_at(0) != 0) refuse(idx_, fmt::format("the document index starts with {}, not with 0", document_at(0)));
  for (std::int64_t i = 1; i <= num_documents_; ++i) {
    if (document_at(i) < document_at(i - 1) || document_at(i) > num_sequences_) {
      refuse(idx_,
             fmt::format("document {} has sequences {} to {} of {}", i - 1, document_at(i - 1), document_at(i), num_sequences_));
    }
  }
  if (document_at(num_documents_) != num_sequences_) {
    refuse(idx_, fmt::format("its documents end at sequence {} of {}", document_at(num_documents_), num_sequences_));
  }
}

std::int32_t IndexedDataset::size_at(std::int64_t index) const noexcept {
  return load<std::int32_t>(idx_.bytes().data() + kHeaderBytes + index * 4);
}

std::int64_t IndexedDataset::pointer_at(std::int64_t index) const noexcept {
  return load<std::int64_t>(idx_.bytes().data() + kHeaderBytes + num_sequences_ * 4 + index * 8);
}

std::int64_t IndexedDataset::document_at(std::int64_t index) const noexcept {
  return load<std::int64_t>(idx_.bytes().data() + kHeaderBytes + num_sequences_ * 12 + index * 8);
}

Interval IndexedDataset::sequence(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index < num_sequences_, fmt::format("sequence {} of {}", index, num_sequences_));
  const std::int64_t begin = pointer_at(index) / static_cast<std::int64_t>(size_bytes(dtype_));
  return {begin, begin + size_at(index)};
}

Interval IndexedDataset::document_sequences(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index < num_documents_, fmt::format("document {} of {}", index, num_documents_));
  return {document_at(index), document_at(index + 1)};
}

std::int64_t IndexedDataset::document_begin(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index <= num_documents_, fmt::format("document {} of {}", index, num_documents_));
  const std::int64_t first = document_at(index);
  return first == num_sequences_ ? num_tokens_ : pointer_at(first) / static_cast<std::int64_t>(size_bytes(dtype_));
}

void IndexedDataset::read(std::int64_t first, std::span<std::int32_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  TANDEM_CHECK(first >= 0 && first <= num_tokens_ - count,
               fmt::format("tokens [{}, {}) of {}", first, first + count, num_tokens_));
  with_token_type(dtype_, [&]<class Stored>(Stored) {
    const std::byte* from = bin_.bytes().data() + first * static_cast<std::int64_t>(sizeof(Stored));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto token = load<Stored>(from + i * static_cast<std::int64_t>(sizeof(Stored)));
      if (!std::in_range<std::int32_t>(token)) {
        throw InputError(fmt::format("{} has token {} at {}, beyond 32 bits", bin_.path().string(), token, first + i));
      }
      out[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(token);
    }
  });
}

}  // namespace tandem
