// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/shard_writer.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{4} << 20;  // hashed while still in the cache that the copy to the system fills

}  // namespace

ShardWriter::ShardWriter(FileOperations& files, std::filesystem::path path, std::span<const TensorHeading> tensors,
                         const SafetensorsMetadata& metadata)
    : files_(files), path_(std::move(path)) {
  const std::string header = safetensors_header(tensors, metadata);
  expected_bytes_ = std::ssize(header);
  for (const TensorHeading& tensor : tensors) {
    expected_bytes_ += num_elements(tensor.shape) * static_cast<std::int64_t>(size_bytes(tensor.dtype));
  }
  descriptor_ = files_.create(path_);
  write(std::as_bytes(std::span(header)));
}

ShardWriter::~ShardWriter() {
  if (descriptor_ < 0) return;
  try {
    files_.close(descriptor_, path_);
  } catch (const IoError&) {
    // The file is given up: whoever threw before this has said why.
  }
}

void ShardWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::span<const std::byte> piece = bytes.first(std::min(kPieceBytes - buffer_.size(), bytes.size()));
    bytes = bytes.subspan(piece.size());
    hasher_.update(piece);
    written_bytes_ += std::ssize(piece);
    if (piece.size() == kPieceBytes) {
      files_.write(descriptor_, path_, piece);
      continue;
    }
    buffer_.insert(buffer_.end(), piece.begin(), piece.end());
    if (buffer_.size() == kPieceBytes) flush();
  }
}

void ShardWriter::flush() {
  if (!buffer_.empty()) files_.write(descriptor_, path_, buffer_);
  buffer_.clear();
}

CheckpointFile ShardWriter::finish(bool durable) {
  TANDEM_CHECK(written_bytes_ == expected_bytes_,
               fmt::format("{}: {} of {} bytes written", path_.string(), written_bytes_, expected_bytes_));
  flush();
  if (durable) files_.sync(descriptor_, path_);
  files_.close(std::exchange(descriptor_, -1), path_);
  return {path_.filename().string(), written_bytes_, hasher_.digest()};
}

}  // namespace tandem
