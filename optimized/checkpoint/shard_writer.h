// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "core/io/file_operations.h"
#include "core/io/hash.h"
#include "core/io/safetensors.h"
#include "optimized/checkpoint/manifest.h"

namespace tandem {

/// Writes one safetensors file of a checkpoint from front to back, hashing what it writes; a few MB are kept, so that small
/// tensors do not become small requests. The file must not exist and is written under its own name: it is the folder that appears
/// at once. Destroyed without finish(), it closes the file and leaves it.
class ShardWriter {
 public:
  /// Tensors in the order of their bytes, larger elements first (safetensors_header()).
  ShardWriter(FileOperations& files, std::filesystem::path path, std::span<const TensorHeading> tensors,
              const SafetensorsMetadata& metadata = {});
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// The next bytes of the tensors, in pieces of any size.
  void write(std::span<const std::byte> bytes);
  /// Makes the file durable; what the manifest says about it. ContractError where bytes are missing or too many.
  [[nodiscard]] CheckpointFile finish(bool durable = true);

 private:
  void flush();

  FileOperations& files_;
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::vector<std::byte> buffer_;
  Hasher128 hasher_;
  std::int64_t expected_bytes_ = 0;
  std::int64_t written_bytes_ = 0;
};

}  // namespace tandem
