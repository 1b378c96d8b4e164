// SPDX-License-Identifier: Apache-2.0
#include "core/io/hash.h"

#include <charconv>

#include <fmt/format.h>

#include "core/error.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tandem {

std::uint64_t hash64(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

Hash128 hash128(std::span<const std::byte> bytes) noexcept {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

std::string to_hex(const Hash128& hash) { return fmt::format("{:016x}{:016x}", hash.high, hash.low); }

std::string to_hex(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

Hash128 parse_hash128(std::string_view hex) {
  Hash128 hash;
  const auto parse = [&](std::string_view digits, std::uint64_t& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    return error == std::errc() && end == digits.data() + digits.size();
  };
  if (hex.size() != 32 || !parse(hex.substr(0, 16), hash.high) || !parse(hex.substr(16), hash.low)) {
    throw InputError(fmt::format("'{}' is not a hash of 32 hexadecimal digits", hex));
  }
  return hash;
}

struct Hasher128::State {
  XXH3_state_t* xxh = XXH3_createState();
  State() {
    if (xxh == nullptr || XXH3_128bits_reset(xxh) == XXH_ERROR) throw std::bad_alloc();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { XXH3_freeState(xxh); }
};

Hasher128::Hasher128() : state_(std::make_unique<State>()) {}
Hasher128::Hasher128(Hasher128&&) noexcept = default;
Hasher128& Hasher128::operator=(Hasher128&&) noexcept = default;
Hasher128::~Hasher128() = default;

void Hasher128::update(std::span<const std::byte> bytes) {
  TANDEM_CHECK(XXH3_128bits_update(state_->xxh, bytes.data(), bytes.size()) == XXH_OK);
}

Hash128 Hasher128::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(state_->xxh);
  return {hash.high64, hash.low64};
}

}  // namespace tandem
