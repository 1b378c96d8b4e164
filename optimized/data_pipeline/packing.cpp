// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/packing.h"

#include <algorithm>
#include <array>
#include <bit>

#include <fmt/format.h>

#include "core/error.h"
#include "core/text_data.h"
#include "optimized/data_pipeline/in_parallel.h"

namespace tandem {
namespace {

static_assert(std::has_single_bit(static_cast<std::uint64_t>(kPackWindow)) && kPackWindow <= (1 << 16));

// Room in rows as a binary tree: a node has the larger of its children, so that the first row with room is found on one way down.
class RoomTree {
 public:
  explicit RoomTree(std::int64_t row_length) { room_.fill(row_length); }

  std::int64_t take_first(std::int64_t length) {
    std::size_t node = 1;
    while (node < kRows) node = room_[2 * node] >= length ? 2 * node : 2 * node + 1;
    const auto row = static_cast<std::int64_t>(node - kRows);
    room_[node] -= length;
    while (node > 1) {
      node /= 2;
      room_[node] = std::max(room_[2 * node], room_[2 * node + 1]);
    }
    return row;
  }

 private:
  static constexpr std::size_t kRows = static_cast<std::size_t>(kPackWindow);
  std::array<std::int64_t, 2 * kRows> room_;
};

}  // namespace

std::int64_t pack(std::span<const std::int64_t> lengths, std::int64_t row_length, std::span<std::uint16_t> row_of) {
  TANDEM_CHECK(std::ssize(lengths) <= kPackWindow && lengths.size() == row_of.size(),
               fmt::format("{} pieces to be packed, {} at most", lengths.size(), kPackWindow));
  // Sorted as one number each: what is missing to a whole row, then the place.
  std::array<std::uint64_t, static_cast<std::size_t>(kPackWindow)> order;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    TANDEM_CHECK(lengths[i] >= 1 && lengths[i] <= row_length,
                 fmt::format("a piece of {} for rows of {}", lengths[i], row_length));
    order[i] = static_cast<std::uint64_t>(row_length - lengths[i]) * kPackWindow + i;
  }
  std::sort(order.begin(), order.begin() + std::ssize(lengths));
  RoomTree rooms(row_length);
  std::int64_t rows = 0;
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    const std::size_t i = order[k] % kPackWindow;
    const std::int64_t row = rooms.take_first(lengths[i]);
    row_of[i] = static_cast<std::uint16_t>(row);
    rows = std::max(rows, row + 1);
  }
  return rows;
}

PackedRows::PackedRows(const PieceIndex& pieces, std::int64_t sequence, std::int64_t kept_windows)
    : pieces_(pieces), sequence_(sequence) {
  constexpr std::int64_t kWindowsPerThread = 32;
  const std::int64_t windows = (pieces.num_pieces() + kPackWindow - 1) / kPackWindow;
  before_.assign(static_cast<std::size_t>(windows) + 1, 0);
  kept_.resize(static_cast<std::size_t>(std::min(pieces.num_pieces(), kept_windows * kPackWindow)));
  in_parallel(windows, kWindowsPerThread, [&](Interval mine) {
    std::vector<std::uint16_t> scratch(static_cast<std::size_t>(kPackWindow));
    for (std::int64_t w = mine.begin; w < mine.end; ++w) {
      const auto size = static_cast<std::size_t>(pieces_in(w));
      const std::span<std::uint16_t> row_of = w < kept_windows
                                                  ? std::span(kept_).subspan(static_cast<std::size_t>(w * kPackWindow), size)
                                                  : std::span(scratch).first(size);
      before_[static_cast<std::size_t>(w) + 1] = pack_window(w, row_of);
    }
  });
  for (std::size_t i = 1; i < before_.size(); ++i) before_[i] += before_[i - 1];
}

std::int64_t PackedRows::pieces_in(std::int64_t window) const noexcept {
  return std::min(kPackWindow, pieces_.num_pieces() - window * kPackWindow);
}

std::int64_t PackedRows::pack_window(std::int64_t number, std::span<std::uint16_t> row_of) const {
  std::array<std::int64_t, static_cast<std::size_t>(kPackWindow)> lengths;
  PieceCursor cursor = pieces_.from(number * kPackWindow);
  Piece piece;
  for (std::size_t i = 0; i < row_of.size(); ++i) {
    TANDEM_CHECK(cursor.next(piece), fmt::format("window {} has fewer pieces than the index says", number));
    lengths[i] = piece.pairs;
  }
  return pack(std::span(lengths).first(row_of.size()), sequence_, row_of);
}

void PackedRows::pieces_of(std::int64_t number, Window& window, std::vector<Piece>& found) const {
  TANDEM_CHECK(number >= 0 && number < num_rows(), fmt::format("row {} of {}", number, num_rows()));
  const std::int64_t w = std::upper_bound(before_.begin(), before_.end(), number) - before_.begin() - 1;
  const auto row = static_cast<std::uint16_t>(number - before_[static_cast<std::size_t>(w)]);
  const auto first = static_cast<std::size_t>(w * kPackWindow);
  const auto size = static_cast<std::size_t>(pieces_in(w));
  std::span<const std::uint16_t> row_of;
  if (first + size <= kept_.size()) {
    row_of = std::span(kept_).subspan(first, size);
  } else {
    if (window.number != w) {
      window.row_of.resize(size);
      static_cast<void>(pack_window(w, window.row_of));
      window.number = w;
    }
    row_of = window.row_of;
  }
  found.clear();
  for (std::size_t i = 0; i < size; ++i) {
    if (row_of[i] == row) found.push_back(pieces_.piece(static_cast<std::int64_t>(first + i)));
  }
}

}  // namespace tandem
