// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include "optimized/storage/s3_digest.h"
#include "optimized/storage/s3_session.h"

namespace tandem::s3 {
namespace {

constexpr std::int64_t kMaxParts = 10000;
// A service puts the parts together before it replies.
constexpr double kPatienceForCompletion = 10;

}  // namespace

class Session::Upload {
 public:
  Upload(Session& session, const std::string& key, std::int64_t bytes, const Source& source)
      : session_(session), key_(key), bytes_(bytes), source_(source) {}

  void run() {
    const Reply begun = session_.ask(
        {.method = "POST", .path = session_.path_of(key_), .query = {{"uploads", ""}}},
        [](const Reply& reply) -> std::string { return read_upload_id(reply).empty() ? "the reply names no upload" : ""; });
    if (!begun.good()) session_.refuse("begin to write", key_, begun);
    id_ = read_upload_id(begun);
    try {
      send_parts();
      complete();
    } catch (...) {
      // Parts of an upload that nobody completes are stored, and paid for, without being seen. Once only: where the store is
      // down, waiting has been long enough.
      (void)session_.client_.perform({.method = "DELETE", .path = session_.path_of(key_), .query = {{"uploadId", id_}}});
      throw;
    }
  }

 private:
  void send_parts() {
    const std::int64_t part_bytes = std::max(session_.access().part_bytes, (bytes_ + kMaxParts - 1) / kMaxParts);
    for (std::int64_t offset = 0; offset < bytes_; offset += part_bytes) {
      send_part(source_(offset, std::min(part_bytes, bytes_ - offset)));
    }
  }

  void send_part(std::span<const std::byte> part) {
    const std::vector<std::byte> md5 = md5_bytes(part);
    const std::string number = fmt::format("{}", ++num_parts_);
    const Reply reply = session_.ask(
        {.method = "PUT", .path = session_.path_of(key_), .query = {{"partNumber", number}, {"uploadId", id_}}, .body = part},
        [&](const Reply& stored) -> std::string {
          if (etag_of(stored).empty()) return "the reply has no ETag";
          const std::string tag = content_md5_of(stored);
          if (tag.empty() || tag == to_hexadecimal(md5)) return {};
          return fmt::format("the store has other bytes than were sent (ETag {})", tag);
        });
    if (!reply.good()) session_.refuse(fmt::format("write part {} of", number).c_str(), key_, reply);
    parts_ += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>\"{}\"</ETag></Part>", number, etag_of(reply));
    all_md5_.insert(all_md5_.end(), md5.begin(), md5.end());
  }

  void complete() {
    const std::string text = fmt::format("<CompleteMultipartUpload>{}</CompleteMultipartUpload>", parts_);
    const Reply reply =
        session_.ask({.method = "POST",
                      .path = session_.path_of(key_),
                      .query = {{"uploadId", id_}},
                      .body = std::as_bytes(std::span(text)),
                      .patience = kPatienceForCompletion},
                     [](const Reply& answer) -> std::string {
                       if (is_completed(answer)) return {};
                       const Refusal refusal = read_refusal(answer);
                       return refusal.code.empty() ? "the reply confirms nothing" : refusal.code + ": " + refusal.message;
                     });
    if (reply.good()) return;
    // After an attempt whose reply was lost, the upload may be gone because it is complete.
    if (reply.attempts > 1 && reply.failure.empty() && reply.status == 404 && is_there()) return;
    session_.refuse("finish writing", key_, reply);
  }

  // The ETag of an object of several parts is the MD5 of their MD5s.
  bool is_there() const {
    const Reply there = session_.ask({.method = "HEAD", .path = session_.path_of(key_)});
    return there.good() && etag_of(there) == fmt::format("{}-{}", to_hexadecimal(md5_bytes(all_md5_)), num_parts_);
  }

  Session& session_;
  const std::string& key_;
  std::int64_t bytes_;
  const Source& source_;
  std::string id_, parts_;
  std::vector<std::byte> all_md5_;
  int num_parts_ = 0;
};

void Session::put_in_parts(const std::string& key, std::int64_t bytes, const Source& source) {
  Upload(*this, key, bytes, source).run();
}

}  // namespace tandem::s3
