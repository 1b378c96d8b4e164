// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem {

/// What a block of memory is for. Every allocation carries one.
enum class MemoryCategory : std::uint8_t { parameters, gradients, optimizer, activations, communication, workspace };
inline constexpr std::size_t kMemoryCategories = 6;

/// "parameters", "gradients", ...: the keys of `peak_bytes` in result files.
[[nodiscard]] std::string_view name(MemoryCategory category);

using BytesByCategory = std::array<std::int64_t, kMemoryCategories>;

/// Counts the bytes of one rank, by category. Written by that rank's allocator only; not thread-safe.
class MemoryLedger {
 public:
  void allocated(MemoryCategory category, std::int64_t bytes);
  /// Throws ContractError where more is freed than was allocated.
  void freed(MemoryCategory category, std::int64_t bytes);

  [[nodiscard]] const BytesByCategory& current() const noexcept { return current_; }
  /// Highest value that each category reached (at its own moment).
  [[nodiscard]] const BytesByCategory& peak() const noexcept { return peak_; }
  [[nodiscard]] std::int64_t peak_total() const noexcept { return peak_total_; }
  /// Starts peaks anew from what is allocated now.
  void reset_peaks();

  /// For core/io/binary.h.
  template <class Archive>
  void serialize(Archive& archive) {
    archive(current_, peak_, total_, peak_total_);
  }

 private:
  BytesByCategory current_{}, peak_{};
  std::int64_t total_ = 0, peak_total_ = 0;
};

}  // namespace tandem
