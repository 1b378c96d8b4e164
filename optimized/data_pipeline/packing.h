// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optimized/data_pipeline/piece_index.h"

namespace tandem {

/// First fit decreasing: puts pieces, longest first and of equal ones the earlier, each into the first row that has room.
/// `lengths` are at most kPackWindow, each in [1, row_length]. row_of[i] becomes the row of piece i; returns the number of rows.
std::int64_t pack(std::span<const std::int64_t> lengths, std::int64_t row_length, std::span<std::uint16_t> row_of);

/// Packed rows of a part by their number. Memory: 8 bytes a window of kPackWindow pieces for how many rows came before it, and
/// 2 bytes a piece for the first kKeptWindows windows: those behind are packed again whenever one of their rows is asked for.
class PackedRows {
 public:
  static constexpr std::int64_t kKeptWindows = 32768;

  /// What a caller keeps between calls, so that a window whose packing is not kept is packed once for rows in a row.
  struct Window {
    std::int64_t number = -1;
    std::vector<std::uint16_t> row_of;  ///< [pieces of the window]
  };

  /// Borrows `pieces`. Packs all of them, with several threads where there are many.
  PackedRows(const PieceIndex& pieces, std::int64_t sequence, std::int64_t kept_windows = kKeptWindows);

  [[nodiscard]] std::int64_t num_rows() const noexcept { return before_.back(); }
  /// The pieces of row `number` in their order, into `found`. Throws ContractError unless it is in [0, num_rows()).
  void pieces_of(std::int64_t number, Window& window, std::vector<Piece>& found) const;

 private:
  /// Packs window `number`, whose row_of has one element for each of its pieces; returns its rows.
  std::int64_t pack_window(std::int64_t number, std::span<std::uint16_t> row_of) const;
  [[nodiscard]] std::int64_t pieces_in(std::int64_t window) const noexcept;

  const PieceIndex& pieces_;
  std::int64_t sequence_;
  std::vector<std::int64_t> before_;  ///< [windows + 1] rows in the windows before
  std::vector<std::uint16_t> kept_;   ///< row_of of the first windows, one after the other
};

}  // namespace tandem
