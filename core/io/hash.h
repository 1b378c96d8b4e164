// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// 128-bit content hash, for integrity and equality of tensors and files; not against an adversary.
struct Hash128 {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  friend auto operator<=>(const Hash128&, const Hash128&) = default;
};

/// XXH3, 64 and 128 bits: the same bytes give the same value on every platform and with every version of the library.
[[nodiscard]] std::uint64_t hash64(std::span<const std::byte> bytes, std::uint64_t seed = 0) noexcept;
[[nodiscard]] Hash128 hash128(std::span<const std::byte> bytes) noexcept;

/// 32 hexadecimal digits, high word first (the notation of `xxhsum -H2`), and back; parse_hash128 throws InputError.
[[nodiscard]] std::string to_hex(const Hash128& hash);
[[nodiscard]] std::string to_hex(std::uint64_t hash);
[[nodiscard]] Hash128 parse_hash128(std::string_view hex);

/// hash128 of bytes that arrive in pieces.
class Hasher128 {
 public:
  Hasher128();
  Hasher128(Hasher128&&) noexcept;
  Hasher128& operator=(Hasher128&&) noexcept;
  ~Hasher128();

  void update(std::span<const std::byte> bytes);
  /// Of everything so far; update() may go on.
  [[nodiscard]] Hash128 digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem
