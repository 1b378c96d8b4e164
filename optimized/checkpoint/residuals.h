// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/io/safetensors.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/engine/engine.h"

/// What compression of gradients has left over, in a checkpoint: one file `residuals-RANK.safetensors` (five digits) for each
/// rank of the world, for residuals are what ranks have not in common. All tensors are fp32, local parts as the rank holds them:
///
///   residual.NAME       of this rank's own gradient
///   sum_residual.NAME   int8, int4, sign: of the sum; in the file of the first rank of the group that reduces NAME
///   start.NAME          power_sgd: right factor [rank, columns]; likewise
///
/// Metadata: format, gradient_scale (of the loss, in whose units residuals are). A rank without such tensors has no file.
///
/// A run that goes on with the same layout (degrees, order of ranks, pipeline) and codec gets its state back bit for bit, however
/// its buckets are cut. Otherwise nothing that was not sent is lost: of every parameter all residuals are added up, in double, in
/// the order of ranks, and the sum, rounded once, becomes the residual of the first rank of each new group, in whose units it is;
/// of the ranks that hold copies of the same gradient one counts, and gradients that the new codec sends whole have no residual:
/// theirs is dropped. power_sgd starts again then. A run that goes on without compression or without error feedback drops them
/// all.
namespace tandem {

/// What the file of one rank holds; no tensors: there is no file. Owns its values.
struct ResidualSnapshot {
  std::vector<std::pair<std::string, std::vector<float>>> tensors;
  SafetensorsMetadata metadata;
};

/// Copies of what this rank has not sent; nothing without compression. Collective.
[[nodiscard]] ResidualSnapshot residual_snapshot(const Engine& engine);

/// Reads what this rank needs; no communication. Throws InputError where a file or tensor is missing or has another size.
void load_residuals(const std::filesystem::path& step_folder, const CheckpointInfo& info, Engine& engine);

}  // namespace tandem
