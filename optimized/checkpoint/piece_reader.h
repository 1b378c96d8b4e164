// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <utility>
#include <vector>

#include "core/io/safetensors.h"
#include "core/shard.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/storage/file_copy.h"

namespace tandem {

/// Reads parts of tensors out of the files of a step folder: of each about the bytes that are asked for, through one small buffer
/// or straight into their places. No whole tensor is ever put together. The manifest is borrowed.
class PieceReader {
 public:
  PieceReader(std::filesystem::path step_folder, const CheckpointManifest& manifest)
      : folder_(std::move(step_folder)), manifest_(manifest) {}

  /// Sets `target`, the elements that `shard` keeps in their order, from the pieces of `tensor`, rounded to the target's dtype
  /// (to 16 bits by way of fp32); padding becomes 0. Throws InputError where a file lacks the tensor or has it with another dtype
  /// or shape than the manifest says, ContractError where `shard` is of another global shape, IoError where reading fails.
  void read(const CheckpointTensor& tensor, const ShardSpec& shard, TensorView target);

 private:
  struct File {
    explicit File(const std::filesystem::path& path);
    SafetensorsFile header;
    FileReader bytes;
    std::int64_t data_begin;  // of the first tensor's first byte
  };
  /// A tensor's bytes in its file.
  struct Stored {
    const FileReader* file = nullptr;
    std::int64_t begin = 0, end = 0;
  };
  [[nodiscard]] Stored find(const CheckpointTensor& tensor, const CheckpointPiece& piece);
  [[nodiscard]] const std::byte* buffered(const Stored& stored, std::int64_t begin, std::int64_t size);

  std::filesystem::path folder_;
  const CheckpointManifest& manifest_;
  std::map<std::size_t, File> files_;  // by index, opened when first needed
  std::vector<std::byte> buffer_;
  const FileReader* buffered_file_ = nullptr;
  std::int64_t buffered_begin_ = 0, buffered_end_ = 0;  // of the file
};

/// Rounds `count` floating elements from one dtype to another, to 16 bits by way of fp32. `from` need not be aligned.
void convert_elements(DType from_dtype, const std::byte* from, DType to_dtype, std::byte* to, std::int64_t count);

}  // namespace tandem
