// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "optimized/storage/s3_digest.h"
#include "optimized/storage/s3_session.h"

namespace tandem::s3 {
namespace {

// N of "bytes A-B/N"; -1 where it says none.
std::int64_t total_of(const std::string& content_range) {
  const std::size_t slash = content_range.find('/');
  std::int64_t total = -1;
  if (slash != std::string::npos) {
    std::from_chars(content_range.data() + slash + 1, content_range.data() + content_range.size(), total);
  }
  return total;
}

}  // namespace

class Session::Download {
 public:
  Download(Session& session, const std::string& key, std::optional<Interval> range, const Target& target)
      : session_(session), key_(key), range_(range), target_(target), digest_(Digest::Kind::md5) {}

  void run() {
    while (true) {
      const std::int64_t before = received_;
      Reply reply = session_.client_.perform(next_request());
      if (reply.good()) reply.failure = doubt(reply);
      if (reply.good()) return;
      if ((reply.status == 412 || reply.status == 416) && received_ > 0 && reply.failure.empty()) {
        reply.failure = "the object was replaced while it was read";
        start_again();
      }
      if (received_ - before >= session_.access().part_bytes) failures_ = 0;
      reply.attempts = ++failures_;
      if (!may_succeed_again(reply)) refuse(reply);
      if (std::max(failures_, restarts_) >= session_.access().attempts) session_.refuse("read", key_, reply);
      session_.wait_before_retry(failures_);
    }
  }

 private:
  Request next_request() {
    Request request{.method = "GET", .path = session_.path_of(key_)};
    const std::int64_t first = (range_ ? range_->begin : 0) + received_;
    if (range_) {
      request.headers.push_back(fmt::format("Range: bytes={}-{}", first, range_->end - 1));
    } else if (first > 0) {
      request.headers.push_back(fmt::format("Range: bytes={}-", first));
    }
    if (received_ > 0 && !etag_.empty()) request.headers.push_back("If-Match: " + etag_);
    request.sink = [this, first, in_part = !request.headers.empty()](const Reply& reply, std::span<const std::byte> piece) {
      if (in_part) check_place(reply, first);
      take(reply, piece);
    };
    return request;
  }

  void check_place(const Reply& reply, std::int64_t first) const {
    const std::string place = reply.header("content-range");
    if (reply.status == 206 && place.starts_with(fmt::format("bytes {}-", first))) return;
    throw StoreError(fmt::format("{}: cannot read '{}' from byte {} on: the store sent something else (status {}, '{}')",
                                 session_.describe(), key_, first, reply.status, place));
  }

  void take(const Reply& reply, std::span<const std::byte> piece) {
    if (etag_.empty()) {
      etag_ = reply.header("etag");
      expected_md5_ = content_md5_of(reply);
    }
    received_ += static_cast<std::int64_t>(piece.size());
    if (!range_ && !expected_md5_.empty()) digest_.update(piece);
    target_.append(piece);
  }

  // libcurl has compared the bytes with the length that the reply stated.
  std::string doubt(const Reply& reply) {
    if (range_ && received_ != range_->size()) {
      const std::int64_t total = total_of(reply.header("content-range"));
      if (total >= 0 && total < range_->end) refuse_range(total);
      std::string reason = fmt::format("{} bytes came, {} were asked for", received_, range_->size());
      start_again();
      return reason;
    }
    if (range_ || expected_md5_.empty()) return {};
    const std::string md5 = to_hexadecimal(digest_.finish());
    if (md5 == expected_md5_) return {};
    const std::string reason =
        fmt::format("the {} bytes that came are not the object (MD5 {}, not {})", received_, md5, expected_md5_);
    start_again();
    return reason;
  }

  void start_again() {
    ++restarts_;
    received_ = 0;
    etag_.clear();
    expected_md5_.clear();
    digest_.restart();
    target_.restart();
  }

  [[noreturn]] void refuse_range(std::int64_t total) const {
    throw InputError(fmt::format("{}: '{}' has {} bytes, [{}, {}) was asked for", session_.describe(), key_, total, range_->begin,
                                 range_->end));
  }

  [[noreturn]] void refuse(const Reply& reply) const {
    if (reply.status == 416 && range_) refuse_range(total_of(reply.header("content-range")));
    if (reply.status == 404 && read_refusal(reply).code != "NoSuchBucket") {
      throw InputError(fmt::format("{}: there is no '{}'", session_.describe(), key_));
    }
    session_.refuse("read", key_, reply);
  }

  Session& session_;
  const std::string& key_;
  std::optional<Interval> range_;
  const Target& target_;
  Digest digest_;
  std::string etag_, expected_md5_;
  std::int64_t received_ = 0;
  int failures_ = 0;  // in a row
  int restarts_ = 0;
};

void Session::download(const std::string& key, std::optional<Interval> range, const Target& target) {
  Download(*this, key, range, target).run();
}

}  // namespace tandem::s3
