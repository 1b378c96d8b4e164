// SPDX-License-Identifier: Apache-2.0
#include "core/io/indexed_dataset.h"

#include <algorithm>
#include <string>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

std::uint8_t code_of(DType dtype) {
  return static_cast<std::uint8_t>(std::find(kIndexDtypes.begin(), kIndexDtypes.end(), dtype) - kIndexDtypes.begin() + 1);
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
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
  append_stored(std::as_bytes(tokens));
}

void IndexedDatasetWriter::append_stored(std::span<const std::byte> tokens) {
  TANDEM_CHECK(tokens.size() % size_bytes(dtype_) == 0, fmt::format("{} bytes of {}", tokens.size(), name(dtype_)));
  bin_.write(tokens);
  open_tokens_ += static_cast<std::int64_t>(tokens.size() / size_bytes(dtype_));
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

void IndexedDatasetWriter::write_indexed(std::span<const std::byte> bytes) {
  idx_.write(bytes);
  idx_hasher_.update(bytes);
}

void IndexedDatasetWriter::write_index() {
  write_indexed(std::as_bytes(std::span(kIndexMagic)));
  write_indexed(bytes_of(kIndexVersion));
  write_indexed(bytes_of(code_of(dtype_)));
  write_indexed(bytes_of(std::uint64_t{sequence_sizes_.size()}));
  write_indexed(bytes_of(std::uint64_t{document_ends_.size() + 1}));
  write_indexed(std::as_bytes(std::span(sequence_sizes_)));
  std::int64_t pointer = 0;
  for (const std::int32_t tokens : sequence_sizes_) {
    write_indexed(bytes_of(pointer));
    pointer += std::int64_t{tokens} * static_cast<std::int64_t>(size_bytes(dtype_));
  }
  write_indexed(bytes_of(std::int64_t{0}));
  write_indexed(std::as_bytes(std::span(document_ends_)));
  idx_hash_ = idx_hasher_.digest();
}

IndexedDataset::IndexedDataset(MappedFile idx, const std::filesystem::path& prefix)
    : bin_(bin_path(prefix)), index_(std::move(idx), bin_.path().string(), static_cast<std::int64_t>(bin_.bytes().size())) {}

void IndexedDataset::read(std::int64_t first, std::span<std::int32_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  TANDEM_CHECK(first >= 0 && first <= num_tokens() - count,
               fmt::format("tokens [{}, {}) of {}", first, first + count, num_tokens()));
  const auto token_bytes = static_cast<std::size_t>(index_.token_bytes());
  decode_tokens(dtype(), bin_.bytes().subspan(static_cast<std::size_t>(first) * token_bytes, out.size() * token_bytes), first,
                index_.bin(), out);
}

}  // namespace tandem
