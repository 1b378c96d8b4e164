// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/s3_digest.h"

#include <openssl/evp.h>

#include "core/error.h"

namespace tandem::s3 {

struct Digest::State {
  const EVP_MD* kind = nullptr;
  EVP_MD_CTX* context = nullptr;
};

Digest::Digest(Kind kind) : state_(std::make_unique<State>()) {
  state_->kind = kind == Kind::sha256 ? EVP_sha256() : EVP_md5();
  state_->context = EVP_MD_CTX_new();
  if (state_->context == nullptr) throw IoError("OpenSSL gives no digest");
  restart();
}

Digest::~Digest() { EVP_MD_CTX_free(state_->context); }

void Digest::restart() {
  if (EVP_DigestInit_ex(state_->context, state_->kind, nullptr) != 1) throw IoError("OpenSSL refuses a digest (FIPS mode?)");
}

void Digest::update(std::span<const std::byte> bytes) {
  if (EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) != 1) throw IoError("OpenSSL fails to digest");
}

std::vector<std::byte> Digest::finish() {
  std::vector<std::byte> value(EVP_MAX_MD_SIZE);
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(state_->context, reinterpret_cast<unsigned char*>(value.data()), &size) != 1) {
    throw IoError("OpenSSL fails to digest");
  }
  value.resize(size);
  return value;
}

std::string to_hexadecimal(std::span<const std::byte> bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<unsigned>(byte) >> 4];
    text += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  Digest digest(Digest::Kind::sha256);
  digest.update(bytes);
  return to_hexadecimal(digest.finish());
}

std::vector<std::byte> md5_bytes(std::span<const std::byte> bytes) {
  Digest digest(Digest::Kind::md5);
  digest.update(bytes);
  return digest.finish();
}

}  // namespace tandem::s3
