// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "optimized/storage/object_store.h"

namespace tandem::s3 {

struct Reply {
  long status = 0;                             ///< 0: none came
  std::map<std::string, std::string> headers;  ///< names in lower case
  std::vector<std::byte> body;                 ///< without what went to the sink
  std::string failure;                         ///< why the exchange broke off; empty: it was complete
  bool hopeless = false;                       ///< the failure is none of the moment (a certificate, a malformed URL)
  int attempts = 1;                            ///< that were made before this reply was taken

  [[nodiscard]] bool good() const noexcept { return failure.empty() && status >= 200 && status < 300; }
  [[nodiscard]] std::string header(const std::string& name) const;  ///< empty where there is none
};

/// Takes the body of a reply with status 2xx piece by piece; status and headers are known by then. What it throws ends the
/// exchange, and is thrown on.
using BodySink = std::function<void(const Reply& so_far, std::span<const std::byte> piece)>;

struct Request {
  std::string method;
  std::string path;                                             ///< "/bucket/key", not yet encoded
  std::vector<std::pair<std::string, std::string>> query = {};  ///< not yet encoded, in any order
  std::vector<std::string> headers = {};                        ///< "name: value"
  std::span<const std::byte> body = {};
  BodySink sink = {};   ///< empty: the body is collected in the reply
  double patience = 1;  ///< times stall_seconds: for what takes the server long
};

/// Each byte but letters, digits and "-_.~" as %XX: what a signature is made of.
enum class Slashes { kept, encoded };
[[nodiscard]] std::string percent_encode(std::string_view text, Slashes slashes);

/// Sends one request, signed (AWS Signature Version 4), and does not repeat it. Keeps connections; safe to use from several
/// threads. An exchange that stalls or breaks off is a failure in the reply, never an exception.
class Client {
 public:
  explicit Client(StoreAccess access);
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client();

  [[nodiscard]] Reply perform(const Request& request);
  [[nodiscard]] const StoreAccess& access() const noexcept { return access_; }

 private:
  class Exchange;
  class Connections;

  StoreAccess access_;
  std::unique_ptr<Connections> connections_;
};

}  // namespace tandem::s3
