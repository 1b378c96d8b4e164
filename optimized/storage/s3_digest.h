// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tandem::s3 {

/// Of the bytes so far, in lower-case hexadecimal: what S3 signs (SHA-256), and what it calls an object by (MD5).
class Digest {
 public:
  enum class Kind { sha256, md5 };
  explicit Digest(Kind kind);
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;
  ~Digest();

  void restart();
  void update(std::span<const std::byte> bytes);
  /// Ends this digest; restart() begins another.
  [[nodiscard]] std::vector<std::byte> finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

[[nodiscard]] std::string to_hexadecimal(std::span<const std::byte> bytes);
[[nodiscard]] std::string sha256_hex(std::span<const std::byte> bytes);
[[nodiscard]] std::vector<std::byte> md5_bytes(std::span<const std::byte> bytes);

}  // namespace tandem::s3
