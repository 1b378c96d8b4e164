// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optimized/storage/object_store.h"

namespace tandem {

/// For tests: what goes wrong with one request.
enum class S3Fault : std::uint8_t {
  none,
  internal_error,   // 500, nothing done
  slow_down,        // 503
  denied,           // 403 AccessDenied
  lost_reply,       // done, but answered with 500
  error_in_200,     // done by halves: status 200, an error in the body
  wrong_etag,       // answered with the ETag of something else
  closed_mid_body,  // half of the reply's body, then the connection is closed
  shortened_body,   // half of the reply's body, as if it were all of it
  stalled,          // no reply before the server stops
};

/// What a client sent.
struct S3Seen {
  std::string method;
  std::string path;
  std::map<std::string, std::string> query;
  std::map<std::string, std::string> headers;  ///< names in lower case
  [[nodiscard]] bool asks_for(const std::string& query_name) const { return query.contains(query_name); }
};

/// A server on loopback that speaks the part of S3 that the client needs. It works out every signature by itself, from what came
/// over the wire, and refuses what does not fit; it has one bucket, "bucket", and lists three keys a page.
class S3TestServer {
 public:
  S3TestServer();
  ~S3TestServer();
  S3TestServer(const S3TestServer&) = delete;
  S3TestServer& operator=(const S3TestServer&) = delete;

  /// With the server's keys, and delays that a test can wait for.
  [[nodiscard]] StoreAccess access() const;
  /// Asked before each request, in turn; may change the objects.
  void set_faults(std::function<S3Fault(const S3Seen&)> faults);
  /// Requests with another token are refused.
  void require_session_token(std::string token);

  [[nodiscard]] std::vector<S3Seen> seen() const;
  [[nodiscard]] std::map<std::string, std::string> objects() const;
  void set_object(const std::string& key, std::string bytes);
  [[nodiscard]] std::size_t unfinished_uploads() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace tandem
