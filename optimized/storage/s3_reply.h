// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "optimized/storage/s3_request.h"

namespace tandem::s3 {

/// What the service says about a request that it did not carry out.
struct Refusal {
  std::string code;     ///< "NoSuchKey", "SlowDown"; empty where the body is no error of S3
  std::string message;  ///< one line
};
[[nodiscard]] Refusal read_refusal(const Reply& reply);

/// Whether the same request may succeed when it is made again: the exchange broke off, the server has too much to do (429, 503),
/// failed (500, 502, 504) or lost part of the body. Never where it understood and refused (403, 404, 412).
[[nodiscard]] bool may_succeed_again(const Reply& reply);

/// "403 SignatureDoesNotMatch: ...; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", or why there was no reply. One line.
[[nodiscard]] std::string reason_of(const Reply& reply);

/// Before attempt `failures` + 1: first_delay_seconds * 2^(failures - 1), at most 20, times `draw` (in [0.5, 1], so that many
/// clients that were refused together do not come back together).
[[nodiscard]] double retry_delay_seconds(int failures, double first_delay_seconds, double draw);

/// The MD5 that a service names an object's content by, where it does: 32 hexadecimal digits. Empty for objects of several parts
/// and for those encrypted with a key of a key service, whose ETag is something else.
[[nodiscard]] std::string content_md5_of(const Reply& reply);
/// The ETag without its quotes.
[[nodiscard]] std::string etag_of(const Reply& reply);

struct Listing {
  std::vector<ObjectInfo> objects;  ///< keys as the bucket has them
  std::string continuation;         ///< token of the next page; empty: this was the last
};
/// Of ListObjectsV2; nothing where the body is none.
[[nodiscard]] std::optional<Listing> read_listing(const Reply& reply);

/// Of CreateMultipartUpload; empty where the body is no such reply.
[[nodiscard]] std::string read_upload_id(const Reply& reply);
/// Of CompleteMultipartUpload, whose refusal may come with status 200.
[[nodiscard]] bool is_completed(const Reply& reply);

}  // namespace tandem::s3
