// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/pitfall.h"
#include "optimized/data_pipeline/piece_index.h"

namespace tandem {

/// Which pieces the batches of a window of steps have when they are grouped by length (core/text_data.h). Only the pieces of a
/// window are in memory: 16 bytes each, for the last few windows asked for. Safe to ask from several threads.
class Buckets {
 public:
  using PieceAt = std::function<Piece(std::int64_t place)>;

  /// Windows of `batches` batches.
  Buckets(std::int64_t batches, std::uint64_t seed, const PitfallSet& pitfalls);

  /// The `rows` pieces of the batch of `step`. `piece_at` is called for the places of the step's window, in order, where the
  /// window is not in memory. Throws ContractError beyond 2^63 places.
  [[nodiscard]] std::vector<Piece> batch(std::int64_t step, std::int64_t rows, const PieceAt& piece_at) const;

 private:
  struct Window {
    std::int64_t number = 0;
    std::int64_t rows = 0;
    std::vector<Piece> pieces;  ///< [batches * rows] by length, then place
  };
  [[nodiscard]] std::shared_ptr<const Window> window(std::int64_t number, std::int64_t rows, const PieceAt& piece_at) const;

  std::int64_t batches_;
  std::uint64_t seed_;
  bool in_order_;  ///< planted: short batches first in every window
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const Window>> recent_;  ///< the oldest first
};

}  // namespace tandem
