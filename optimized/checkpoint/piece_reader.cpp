// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/piece_reader.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "core/shard_runs.h"

namespace tandem {
namespace {

constexpr std::int64_t kBufferBytes = std::int64_t{1} << 20;
constexpr std::int64_t kDirectBytes = kBufferBytes / 4;  // stretches from here on are read into their places

template <class Stored, class Kept, class Convert>
void convert_as(const std::byte* from, std::byte* to, std::int64_t count, const Convert& convert) {
  for (std::int64_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(Stored)), sizeof(Stored));
    const Kept kept = convert(value);
    std::memcpy(to + i * static_cast<std::int64_t>(sizeof(Kept)), &kept, sizeof(Kept));
  }
}

// `decode`: of a stored element, to float or double.
template <class Stored, class Decode>
void convert_from(const std::byte* from, DType to_dtype, std::byte* to, std::int64_t count, const Decode& decode) {
  const auto to_float = [&](Stored value) { return static_cast<float>(decode(value)); };
  switch (to_dtype) {
    case DType::f64:
      return convert_as<Stored, double>(from, to, count, [&](Stored value) { return static_cast<double>(decode(value)); });
    case DType::f32: return convert_as<Stored, float>(from, to, count, to_float);
    case DType::bf16:
      return convert_as<Stored, std::uint16_t>(from, to, count, [&](Stored value) { return to_bf16_bits(to_float(value)); });
    case DType::f16:
      return convert_as<Stored, std::uint16_t>(from, to, count, [&](Stored value) { return to_f16_bits(to_float(value)); });
    default: throw ContractError(fmt::format("{} is no floating dtype", name(to_dtype)));
  }
}

}  // namespace

void convert_elements(DType from_dtype, const std::byte* from, DType to_dtype, std::byte* to, std::int64_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_bytes(from_dtype));
    return;
  }
  switch (from_dtype) {
    case DType::f64: return convert_from<double>(from, to_dtype, to, count, [](double value) { return value; });
    case DType::f32: return convert_from<float>(from, to_dtype, to, count, [](float value) { return value; });
    case DType::bf16: return convert_from<std::uint16_t>(from, to_dtype, to, count, from_bf16_bits);
    case DType::f16: return convert_from<std::uint16_t>(from, to_dtype, to, count, from_f16_bits);
    default: throw ContractError(fmt::format("{} is no floating dtype", name(from_dtype)));
  }
}

PieceReader::File::File(const std::filesystem::path& path)
    : header(path),
      bytes(path),
      data_begin(bytes.size_bytes() - (header.entries().empty() ? 0 : header.entries().back().end_bytes)) {}

PieceReader::Stored PieceReader::find(const CheckpointTensor& tensor, const CheckpointPiece& piece) {
  const File& file = files_.try_emplace(piece.file, folder_ / manifest_.files[piece.file].name).first->second;
  const SafetensorsEntry& entry = file.header.entry(tensor.name);
  const Shape shape = stored_shape(piece.shard);
  if (entry.dtype != tensor.dtype || entry.shape != shape) {
    throw InputError(fmt::format("{}: tensor '{}' is {} {}, the manifest says {} {}", file.header.path().string(), tensor.name,
                                 name(entry.dtype), to_string(entry.shape), name(tensor.dtype), to_string(shape)));
  }
  return {&file.bytes, file.data_begin + entry.begin_bytes, file.data_begin + entry.end_bytes};
}

// At most kBufferBytes, of which the file's bytes from `begin` on that belong to the tensor are read at once: what is asked for
// next lies behind.
const std::byte* PieceReader::buffered(const Stored& stored, std::int64_t begin, std::int64_t size) {
  const bool here = buffered_file_ == stored.file && buffered_begin_ <= begin && begin + size <= buffered_end_;
  if (!here) {
    buffer_.resize(kBufferBytes);
    buffered_file_ = nullptr;
    const std::int64_t count = std::min(stored.end - begin, std::ssize(buffer_));
    stored.file->read(begin, std::span(buffer_).first(static_cast<std::size_t>(count)));
    buffered_file_ = stored.file;
    buffered_begin_ = begin;
    buffered_end_ = begin + count;
  }
  return buffer_.data() + (begin - buffered_begin_);
}

void PieceReader::read(const CheckpointTensor& tensor, const ShardSpec& shard, TensorView target) {
  TANDEM_CHECK(shard.global_shape == tensor.shape && target.num_elements() == shard.num_elements(),
               fmt::format("{} is {}: {} elements of {} are asked for", tensor.name, to_string(tensor.shape),
                           target.num_elements(), to_string(shard.global_shape)));
  const auto from_size = static_cast<std::int64_t>(size_bytes(tensor.dtype));
  const auto to_size = static_cast<std::int64_t>(size_bytes(target.dtype()));
  auto* const to = static_cast<std::byte*>(target.data());
  const std::vector<ShardRun> wanted = shard_runs(shard);
  const std::int64_t elements = num_elements(std::span<const ShardRun>(wanted));
  if (elements < target.num_elements()) std::memset(to, 0, static_cast<std::size_t>(target.size_bytes()));
  std::int64_t found = 0;
  for (const CheckpointPiece& piece : tensor.pieces) {
    Stored stored;
    for_each_common(shard_runs(piece.shard), wanted, [&](std::int64_t source, std::int64_t at, std::int64_t count) {
      if (stored.file == nullptr) stored = find(tensor, piece);
      found += count;
      const std::int64_t begin = stored.begin + source * from_size;
      if (tensor.dtype == target.dtype() && count * from_size >= kDirectBytes) {
        return stored.file->read(begin, {to + at * to_size, static_cast<std::size_t>(count * from_size)});
      }
      const std::int64_t most = kBufferBytes / from_size;
      for (std::int64_t done = 0; done < count; done += most) {
        const std::int64_t now = std::min(most, count - done);
        const std::byte* const from = buffered(stored, begin + done * from_size, now * from_size);
        convert_elements(tensor.dtype, from, target.dtype(), to + (at + done) * to_size, now);
      }
    });
  }
  TANDEM_CHECK(found == elements, fmt::format("{}: its pieces have {} of {} elements", tensor.name, found, elements));
}

}  // namespace tandem
