// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.h"
#include "core/io/hash.h"
#include "core/shard.h"
#include "optimized/loss_scaling/fp8.h"
#include "optimized/loss_scaling/loss_scaler.h"

namespace tandem {

/// What a checkpoint says beside its tensors. Random numbers are functions of the seed and of what they are for (core/rng.h), so
/// that config.seed and next_step are all of their state; likewise the position in the data.
struct CheckpointInfo {
  RunConfig config;
  std::int64_t next_step = 0;      ///< the first step that is not yet in the parameters
  std::string data;                ///< where the batches came from, as the command line named it
  std::string data_identity = {};  ///< BatchSource::identity(): the same rows come from a source that says the same
  std::vector<std::int64_t> skipped_batches = {};  ///< that no step takes (optimized/anomaly/skip_list.h), ascending
  // Of the engine; saving takes them from there:
  std::int64_t updates = 0;
  double learning_rate = 0;  ///< that `next_step` begins with; checked against the schedule on loading
  LossScalerState loss_scaler{};
  Fp8ScalingState fp8{};
};

/// One part of a tensor: the tensor NAME of file number `file`, whose values are those of `shard`.
struct CheckpointPiece {
  std::size_t file = 0;
  ShardSpec shard;
};

/// "wte.weight", "m.wte.weight", "v.wte.weight": a parameter's master values, its two moments.
struct CheckpointTensor {
  std::string name;
  Shape shape;
  DType dtype = DType::f32;
  std::vector<CheckpointPiece> pieces;  ///< together each element exactly once
};

struct CheckpointFile {
  std::string name;  ///< in the folder of the step: no '/'
  std::int64_t bytes = 0;
  Hash128 hash;  ///< of all of them
};

/// manifest.json of a step folder, written last: a folder without one is no checkpoint. docs/formats.md describes each field.
struct CheckpointManifest {
  CheckpointInfo info;
  std::map<std::string, std::string> libraries;  ///< that wrote it: "tandem", "compiler", ...
  std::vector<CheckpointFile> files;
  std::vector<CheckpointTensor> tensors;

  /// Throws InputError where there is no such tensor.
  [[nodiscard]] const CheckpointTensor& tensor(std::string_view name) const;
  [[nodiscard]] std::int64_t total_bytes() const noexcept;
};

inline constexpr const char* kManifestName = "manifest.json";

/// Ends with a hash of everything before it. Throws ContractError for what parse_manifest() would refuse to have been: numbers
/// that are not finite.
[[nodiscard]] std::string to_json(const CheckpointManifest& manifest);

/// refuse; accept: what has no hash is not checked (then CheckpointFile::hash is 0): the fault missing_hash_accepted.
enum class MissingHash : std::uint8_t { refuse, accept };

/// Throws InputError naming `file` and what is wrong: no JSON, another format or version, a field that is missing or has the
/// wrong type or cannot be, a hash that is missing or does not fit, pieces that leave a gap or overlap.
[[nodiscard]] CheckpointManifest parse_manifest(std::string_view text, const std::string& file,
                                                MissingHash missing_hash = MissingHash::refuse);
/// The same for the file of a step folder, which may be missing: a folder of format 1 (state.json) gets a line of its own.
[[nodiscard]] CheckpointManifest read_manifest_of(const std::filesystem::path& step_folder,
                                                  MissingHash missing_hash = MissingHash::refuse);

/// As it lies in its file: flat where the shard is a flat range, else the local shape, padding included.
[[nodiscard]] Shape stored_shape(const ShardSpec& shard);

}  // namespace tandem
