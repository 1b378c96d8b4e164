// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "optimized/engine/parameter_store.h"

namespace tandem {

/// What one pass over a tensor's bytes tells.
struct TensorLook {
  bool finite = true;
  double largest = 0;      ///< magnitude; infinite where not finite
  std::uint64_t hash = 0;  ///< of the bytes, continued from the seed
};
/// `values`: fp64, fp32, bf16 or fp16, in the host's memory. Blocks that fit a cache are read for range and hash together.
[[nodiscard]] TensorLook look_at(TensorView values, std::uint64_t seed = 0);
/// The same without the hash.
[[nodiscard]] TensorLook range_of(TensorView values);

/// One tensor of a rank's state between steps.
struct StatePiece {
  std::size_t parameter = 0;
  std::string name;  ///< "h.0.ln_1.weight", "m.h.0.ln_1.weight", "v...", "master h.0.ln_1.weight"
  TensorView values;
  /// All of the local tensor, as every rank that has the same parameter keeps it: there are copies to compare it with.
  bool whole = false;
  bool is_weight = false;  ///< what training computes with, no moment
};
/// Parameters, master copies where they are others, moments: as far as this rank keeps them between steps.
[[nodiscard]] std::vector<StatePiece> state_pieces(const ParameterStore& store);

/// The largest magnitude of each weight tensor from one look to the next. It cannot have grown beyond
///
///   8 x what it was + 1 + sum over the updates in between of rate max(4, 10 norm)
///
/// by training: AdamW moves a weight by at most (1 - b1) / sqrt(1 - b2) = 3.2 rates a step at the usual b1 = 0.9, b2 = 0.999, SGD
/// with momentum 0.9 by 10 rates times the norm of the clipped gradient.
class WeightRanges {
 public:
  struct Excess {
    std::string tensor;
    double value = 0, limit = 0;
  };
  void count_update(double rate, double clipped_norm);
  /// `largest` becomes what the next look compares with.
  [[nodiscard]] std::optional<Excess> see(const std::string& tensor, double largest);
  /// All tensors have been seen.
  void end_look() noexcept { moved_ = 0; }
  void clear() noexcept;

 private:
  std::map<std::string, double> largest_;
  double moved_ = 0;
};

}  // namespace tandem
