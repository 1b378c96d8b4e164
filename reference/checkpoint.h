// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tandem::reference {

/// A whole tensor as it is stored: row-major elements of `dtype`, byte for byte.
struct StateTensor {
  Shape shape;
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;
  friend bool operator==(const StateTensor&, const StateTensor&) = default;
};

/// All that a training run goes on from, whatever layout it had. Random numbers are functions of the seed and of what they are
/// for, and batches of the step: `seed`, `next_step` and `data_identity` are all of their state.
struct State {
  std::int64_t next_step = 0;  ///< the first that is not in the parameters
  std::int64_t updates = 0;
  std::uint64_t seed = 0;
  std::string data_identity;
  double learning_rate = 0;  ///< of the next update
  double loss_scale = 1;
  std::int64_t growth_tracker = 0;
  std::int64_t skipped_steps = 0;
  std::vector<double> fp8_histories;
  std::int64_t fp8_position = 0;
  /// "wte.weight" (master values), "m.wte.weight", "v.wte.weight"; what ranks have not in common,
  /// "residuals-00000/residual.NAME".
  std::map<std::string, StateTensor, std::less<>> tensors;
};

/// Names of the fields and tensors in which two states differ, to the last bit; tensors that one of them lacks too. Empty: equal.
[[nodiscard]] std::vector<std::string> differences(const State& one, const State& other);

/// The plain way to keep a state: FOLDER/tensors.safetensors, then FOLDER/state.json, one after the other; returns when both are
/// on the disk. `folder` is made. Throws IoError.
void save(const std::filesystem::path& folder, const State& state);
/// Throws InputError where a file is missing or is none of save()'s.
[[nodiscard]] State load(const std::filesystem::path& folder);

/// The state in a step folder of sharded files (docs/formats.md, checkpoints), put together element by element: each piece's
/// elements go where global_indices() says. Checks what the page promises: hashes, dtypes, shapes, and that the pieces give each
/// element exactly once. Throws InputError, naming the file, where it does not hold.
[[nodiscard]] State assemble(const std::filesystem::path& step_folder);

}  // namespace tandem::reference
