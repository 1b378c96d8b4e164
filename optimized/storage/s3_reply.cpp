// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/s3_reply.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>
#include <pugixml.hpp>

namespace tandem::s3 {
namespace {

constexpr std::size_t kMaxMessageBytes = 300;
constexpr double kMaxDelaySeconds = 20;

// Text of a server, made fit for a line of ours.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  if (text.size() > kMaxMessageBytes) text.resize(kMaxMessageBytes);
  return text;
}

bool parse(const Reply& reply, pugi::xml_document& document) {
  return document.load_buffer(reply.body.data(), reply.body.size()).status == pugi::status_ok;
}

std::string advice_for(long status, const std::string& code) {
  if (code == "InvalidAccessKeyId" || code == "SignatureDoesNotMatch") {
    return "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
  }
  if (code == "NoSuchBucket") return "make the bucket first, or correct the URL";
  if (code == "RequestTimeTooSkewed") return "set this machine's clock";
  if (code == "ExpiredToken" || code == "InvalidToken") return "renew AWS_SESSION_TOKEN";
  if (code == "AuthorizationHeaderMalformed" || code == "PermanentRedirect" || status == 301 || status == 307) {
    return "set AWS_REGION (and AWS_ENDPOINT_URL) to the bucket's";
  }
  if (status == 401 || status == 403) return "check the keys, and what they may do with this bucket";
  if (status == 501) return "this store cannot do that";
  return {};
}

}  // namespace

Refusal read_refusal(const Reply& reply) {
  pugi::xml_document document;
  if (!parse(reply, document)) return {};
  const pugi::xml_node error = document.child("Error");
  return {one_line(error.child_value("Code")), one_line(error.child_value("Message"))};
}

bool may_succeed_again(const Reply& reply) {
  if (!reply.failure.empty()) return !reply.hopeless;
  if (reply.status == 408 || reply.status == 429) return true;
  if (reply.status >= 500) return reply.status != 501 && reply.status != 505;
  if (reply.status != 400 && reply.status != 409) return false;
  const std::string code = read_refusal(reply).code;
  return code == "RequestTimeout" || code == "IncompleteBody" || code == "BadDigest" || code == "XAmzContentSHA256Mismatch" ||
         code == "OperationAborted" || code == "ConditionalRequestConflict";
}

std::string reason_of(const Reply& reply) {
  if (!reply.failure.empty()) {
    const bool connected = reply.status != 0;
    const std::string text = one_line(reply.failure);
    return connected ? text : fmt::format("{}; check AWS_ENDPOINT_URL, and that the store runs", text);
  }
  const Refusal refusal = read_refusal(reply);
  std::string text = fmt::format("status {}", reply.status);
  if (!refusal.code.empty()) text += fmt::format(" {}", refusal.code);
  if (!refusal.message.empty()) text += fmt::format(": {}", refusal.message);
  if (const std::string advice = advice_for(reply.status, refusal.code); !advice.empty()) text += fmt::format("; {}", advice);
  return text;
}

double retry_delay_seconds(int failures, double first_delay_seconds, double draw) {
  return std::min(std::ldexp(first_delay_seconds, failures - 1), kMaxDelaySeconds) * draw;
}

std::string etag_of(const Reply& reply) {
  std::string tag = reply.header("etag");
  std::erase(tag, '"');
  return tag;
}

std::string content_md5_of(const Reply& reply) {
  const std::string encryption = reply.header("x-amz-server-side-encryption");
  if (!encryption.empty() && encryption != "AES256") return {};
  if (!reply.header("x-amz-server-side-encryption-customer-algorithm").empty()) return {};
  std::string tag = etag_of(reply);
  const bool is_md5 =
      tag.size() == 32 && std::ranges::all_of(tag, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  return is_md5 ? tag : std::string{};
}

std::optional<Listing> read_listing(const Reply& reply) {
  pugi::xml_document document;
  if (!parse(reply, document)) return {};
  const pugi::xml_node root = document.child("ListBucketResult");
  if (!root) return {};
  Listing listing;
  for (const pugi::xml_node entry : root.children("Contents")) {
    listing.objects.push_back({entry.child_value("Key"), entry.child("Size").text().as_llong(-1)});
  }
  if (std::strcmp(root.child_value("IsTruncated"), "true") == 0) {
    listing.continuation = root.child_value("NextContinuationToken");
    if (listing.continuation.empty()) return {};  // what is missing would look as if it did not exist
  }
  return listing;
}

std::string read_upload_id(const Reply& reply) {
  pugi::xml_document document;
  if (!parse(reply, document)) return {};
  return document.child("InitiateMultipartUploadResult").child_value("UploadId");
}

bool is_completed(const Reply& reply) {
  pugi::xml_document document;
  return parse(reply, document) && document.child("CompleteMultipartUploadResult");
}

}  // namespace tandem::s3
