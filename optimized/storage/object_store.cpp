// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/object_store.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/text.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/s3_store.h"
#include "optimized/storage/store_key.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxKeyBytes = 900;
constexpr std::string_view kS3Scheme = "s3://", kFileScheme = "file://";

bool is_control(char c) noexcept { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

std::string_view fault_of_parts(std::string_view key) noexcept {
  while (true) {
    const std::size_t end = key.find('/');
    const std::string_view part = key.substr(0, end);
    if (part.empty()) return "it has an empty part";
    if (part == "." || part == "..") return "it has a part '.' or '..'";
    if (end == std::string_view::npos) return {};
    key.remove_prefix(end + 1);
  }
}

int hexadecimal_digit(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

std::string decode_percent(std::string_view url, std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i];
      continue;
    }
    const int high = i + 2 < text.size() ? hexadecimal_digit(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? hexadecimal_digit(text[i + 2]) : -1;
    if (high < 0 || low < 0) throw InputError(fmt::format("{}: '%' must be followed by two hexadecimal digits", url));
    decoded += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return decoded;
}

std::shared_ptr<ObjectStore> open_folder(std::string_view url) {
  const std::string_view path = url.substr(kFileScheme.size());
  if (!path.starts_with('/')) throw InputError(fmt::format("{}: a file URL is file:///PATH, with an absolute path", url));
  return std::make_shared<FolderStore>(decode_percent(url, path));
}

bool is_bucket_name(std::string_view bucket) {
  return bucket.size() >= 3 && bucket.size() <= 63 && std::ranges::all_of(bucket, [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
         });
}

// A prefix may end with '/', which says no more than without.
std::shared_ptr<ObjectStore> open_s3(std::string_view url, const StoreAccess& access) {
  const std::string_view rest = url.substr(kS3Scheme.size());
  const std::size_t slash = rest.find('/');
  const std::string_view bucket = rest.substr(0, slash);
  std::string_view prefix = slash == std::string_view::npos ? std::string_view{} : rest.substr(slash + 1);
  while (prefix.ends_with('/')) prefix.remove_suffix(1);
  if (!is_bucket_name(bucket)) {
    throw InputError(
        fmt::format("{}: '{}' is no name of a bucket (3 to 63 letters, digits, . - or _); an S3 URL is s3://BUCKET or "
                    "s3://BUCKET/PREFIX",
                    url, bucket));
  }
  if (const std::string_view fault = prefix.empty() ? std::string_view{} : fault_of_key(prefix); !fault.empty()) {
    throw InputError(fmt::format("{}: '{}' is no prefix of keys: {}", url, prefix, fault));
  }
  const std::string& endpoint = access.endpoint;
  if (!endpoint.empty() && !endpoint.starts_with("http://") && !endpoint.starts_with("https://")) {
    throw InputError(fmt::format("the endpoint '{}' (AWS_ENDPOINT_URL) must begin with http:// or https://", endpoint));
  }
  if (access.access_key.empty() || access.secret_key.empty()) {
    throw InputError(fmt::format("{}: the store wants keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", url));
  }
  return open_s3_store(std::string(bucket), std::string(prefix), access);
}

}  // namespace

std::string_view fault_of_key(std::string_view key) noexcept {
  if (key.empty()) return "it is empty";
  if (key.size() > kMaxKeyBytes) return "it is longer than 900 bytes";
  if (std::ranges::any_of(key, is_control)) return "it has a control character";
  if (first_invalid_utf8(key)) return "it is not UTF-8";
  return fault_of_parts(key);
}

void check_key(std::string_view key) {
  const std::string_view fault = fault_of_key(key);
  TANDEM_CHECK(fault.empty(), fmt::format("'{}' cannot be the key of an object: {}", key, fault));
}

void check_key_prefix(std::string_view prefix) {
  // Whole parts must be good ones; a last part that goes on may be "." so far.
  const std::string probe = std::string(prefix) + "x";
  const std::string_view fault = fault_of_key(probe);
  TANDEM_CHECK(fault.empty(), fmt::format("'{}' cannot begin the key of an object: {}", prefix, fault));
}

std::shared_ptr<ObjectStore> open_store(std::string_view url, const StoreAccess& access) {
  if (url.empty()) throw InputError("the store's URL is empty; use s3://BUCKET/PREFIX, file:///PATH or a folder");
  if (url.starts_with(kS3Scheme)) return open_s3(url, access);
  if (url.starts_with(kFileScheme)) return open_folder(url);
  if (url.find("://") != std::string_view::npos) {
    throw InputError(fmt::format("{}: unknown kind of store; use s3://BUCKET/PREFIX, file:///PATH or a folder", url));
  }
  return std::make_shared<FolderStore>(std::filesystem::path(url));
}

}  // namespace tandem
