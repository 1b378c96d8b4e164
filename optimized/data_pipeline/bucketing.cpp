// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/bucketing.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/data_pipeline/epoch_order.h"

namespace tandem {

Buckets::Buckets(std::int64_t batches, std::uint64_t seed, const PitfallSet& pitfalls)
    : batches_(batches), seed_(seed), in_order_(pitfalls.on(Pitfall::buckets_drained_in_order)) {}

std::vector<Piece> Buckets::batch(std::int64_t step, std::int64_t rows, const PieceAt& piece_at) const {
  const std::int64_t number = step / batches_;
  const std::int64_t in_window = step % batches_;
  const EpochOrder order(batches_, seed_, fmt::format("data_pipeline/window/{}", number));
  const std::int64_t chosen = in_order_ ? in_window : order.sample(in_window);
  const std::shared_ptr<const Window> found = window(number, rows, piece_at);
  const auto first = found->pieces.begin() + chosen * rows;
  return {first, first + rows};
}

std::shared_ptr<const Buckets::Window> Buckets::window(std::int64_t number, std::int64_t rows, const PieceAt& piece_at) const {
  constexpr std::size_t kRecent = 4;
  // Held while a window is made: who else asks now asks for this one.
  const std::lock_guard lock(mutex_);
  for (const auto& window : recent_) {
    if (window->number == number && window->rows == rows) return window;
  }
  std::int64_t size = 0;
  std::int64_t end = 0;
  TANDEM_CHECK(!__builtin_mul_overflow(batches_, rows, &size) && !__builtin_mul_overflow(size, number + 1, &end),
               fmt::format("window {} of {} batches of {} rows is beyond 2^63 places", number, batches_, rows));
  auto made = std::make_shared<Window>();
  made->number = number;
  made->rows = rows;
  made->pieces.reserve(static_cast<std::size_t>(size));
  for (std::int64_t place = end - size; place < end; ++place) made->pieces.push_back(piece_at(place));
  std::stable_sort(made->pieces.begin(), made->pieces.end(), [](const Piece& a, const Piece& b) { return a.pairs < b.pairs; });
  if (recent_.size() == kRecent) recent_.erase(recent_.begin());
  recent_.push_back(made);
  return made;
}

}  // namespace tandem
