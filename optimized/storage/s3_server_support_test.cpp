// SPDX-License-Identifier: Apache-2.0
#include <httplib.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include "optimized/storage/s3_server_test_support.h"

namespace tandem {
namespace {

constexpr const char* kAccessKey = "test:access";  // with a colon, as Swift's keys have
constexpr const char* kSecretKey = "secret/with+signs";
constexpr std::size_t kPageKeys = 3;

std::string hexadecimal(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

std::string digest(const EVP_MD* kind, const std::string& bytes) {
  unsigned char value[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_Digest(bytes.data(), bytes.size(), value, &size, kind, nullptr);
  return {reinterpret_cast<char*>(value), size};
}

std::string sign(const std::string& key, const std::string& text) {
  unsigned char value[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(text.data()), text.size(),
       value, &size);
  return {reinterpret_cast<char*>(value), size};
}

std::string field(const std::string& text, const std::string& name) {
  const std::size_t begin = text.find(name + "=");
  if (begin == std::string::npos) return {};
  const std::size_t value = begin + name.size() + 1;
  return text.substr(value, text.find_first_of(", ", value) - value);
}

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string canonical_request(const httplib::Request& request, const std::string& signed_headers) {
  const std::size_t question = request.target.find('?');
  std::string query = question == std::string::npos ? "" : request.target.substr(question + 1);
  std::vector<std::string> parameters = split(query, '&');
  std::ranges::sort(parameters);
  query.clear();
  for (const std::string& parameter : parameters) query += (query.empty() ? "" : "&") + parameter;
  std::string headers;
  for (const std::string& name : split(signed_headers, ';')) headers += name + ":" + request.get_header_value(name) + "\n";
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}", request.method, request.target.substr(0, question), query, headers, signed_headers,
                     request.get_header_value("x-amz-content-sha256"));
}

// AWS Signature Version 4. The code of the refusal; empty where all fits.
std::string fault_of_signature(const httplib::Request& request, const std::string& token) {
  const std::string authorization = request.get_header_value("Authorization");
  const std::vector<std::string> scope = split(field(authorization, "Credential"), '/');
  const std::string signed_headers = field(authorization, "SignedHeaders");
  if (!authorization.starts_with("AWS4-HMAC-SHA256 ") || scope.size() != 5) return "AuthorizationHeaderMalformed";
  if (scope[0] != kAccessKey) return "InvalidAccessKeyId";
  std::string key = std::string("AWS4") + kSecretKey;
  for (std::size_t i = 1; i < scope.size(); ++i) key = sign(key, scope[i]);
  const std::string text =
      fmt::format("AWS4-HMAC-SHA256\n{}\n{}/{}/{}/{}\n{}", request.get_header_value("x-amz-date"), scope[1], scope[2], scope[3],
                  scope[4], hexadecimal(digest(EVP_sha256(), canonical_request(request, signed_headers))));
  if (hexadecimal(sign(key, text)) != field(authorization, "Signature")) return "SignatureDoesNotMatch";
  for (const char* name : {"host", "x-amz-content-sha256", "x-amz-date"}) {
    if (std::ranges::count(split(signed_headers, ';'), name) != 1) return "AccessDenied";
  }
  if (request.get_header_value("x-amz-content-sha256") != hexadecimal(digest(EVP_sha256(), request.body))) {
    return "XAmzContentSHA256Mismatch";
  }
  return request.get_header_value("x-amz-security-token") == token ? "" : "InvalidToken";
}

std::string md5_tag(const std::string& bytes) { return '"' + hexadecimal(digest(EVP_md5(), bytes)) + '"'; }

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  return out;
}

void refuse(httplib::Response& response, int status, const std::string& code) {
  response.status = status;
  response.set_content(
      fmt::format("<?xml version=\"1.0\"?><Error><Code>{}</Code><Message>refused\nby the test</Message></Error>", code),
      "application/xml");
}

struct StoredObject {
  std::string bytes, etag, writer;
};

}  // namespace

class S3TestServer::State {
 public:
  State() {
    const auto handler = [this](const httplib::Request& request, httplib::Response& response) { handle(request, response); };
    server.Get(".*", handler).Put(".*", handler).Post(".*", handler).Delete(".*", handler);
    server.set_keep_alive_timeout(1);
    server.set_tcp_nodelay(true);
    port = server.bind_to_any_port("127.0.0.1");
    thread = std::thread([this] { server.listen_after_bind(); });
  }

  ~State() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    released.notify_all();
    while (!server.is_running()) std::this_thread::yield();
    server.stop();
    thread.join();
  }

  void handle(const httplib::Request& request, httplib::Response& response) {
    answer(request, response);
    // The library would cut a refusal to the range that was asked for of the object.
    if (response.status >= 400) const_cast<httplib::Request&>(request).ranges.clear();
  }

  void answer(const httplib::Request& request, httplib::Response& response) {
    S3Seen now{request.method, request.path, {}, {}};
    for (const auto& [name, value] : request.params) now.query[name] = value;
    for (const auto& [name, value] : request.headers) now.headers[lower_case(name)] = value;
    const S3Fault fault = next_fault(now);
    std::unique_lock lock(mutex);
    seen.push_back(now);
    if (const std::string code = fault_of_signature(request, token); !code.empty()) return refuse(response, 403, code);
    if (fault == S3Fault::internal_error) return refuse(response, 500, "InternalError");
    if (fault == S3Fault::slow_down) return refuse(response, 503, "SlowDown");
    if (fault == S3Fault::denied) return refuse(response, 403, "AccessDenied");
    if (fault == S3Fault::stalled) return released.wait(lock, [this] { return stopping; });
    if (fault == S3Fault::error_in_200) return refuse(response, 200, "InternalError");
    if (!request.path.starts_with("/bucket")) return refuse(response, 404, "NoSuchBucket");
    carry_out(now, request, response);
    spoil(fault, response);
  }

  // Without the other lock: a script may change the objects.
  S3Fault next_fault(const S3Seen& now) {
    const std::lock_guard lock(faults_mutex);
    return faults ? faults(now) : S3Fault::none;
  }

  static void spoil(S3Fault fault, httplib::Response& response) {
    if (fault == S3Fault::lost_reply) refuse(response, 500, "InternalError");
    if (fault == S3Fault::wrong_etag) {
      response.headers.erase("ETag");
      response.set_header("ETag", md5_tag("something else"));
    }
    if (fault == S3Fault::shortened_body) response.body.resize(response.body.size() / 2);
    if (fault == S3Fault::closed_mid_body) {
      const std::string body = std::move(response.body);
      response.body.clear();
      response.headers.erase("Content-Type");
      response.set_content_provider(body.size(), "application/octet-stream",
                                    [body](std::size_t offset, std::size_t length, httplib::DataSink& sink) {
                                      sink.write(body.data() + offset, length / 2);
                                      return false;
                                    });
    }
  }

  void carry_out(const S3Seen& now, const httplib::Request& request, httplib::Response& response) {
    const std::string key = now.path.size() > 8 ? now.path.substr(8) : "";
    if (now.method == "GET" && now.asks_for("list-type")) return list(now, response);
    if (now.method == "POST" && now.asks_for("uploads")) return begin_upload(key, response);
    if (now.asks_for("uploadId")) return upload(now, key, request, response);
    if (now.method == "PUT") return put(key, request, response);
    if (now.method == "DELETE") {
      objects.erase(key);
      response.status = 204;
      return;
    }
    const auto found = objects.find(key);
    if (found == objects.end()) return refuse(response, 404, "NoSuchKey");
    if (request.has_header("If-Match") && request.get_header_value("If-Match") != found->second.etag) {
      return refuse(response, 412, "PreconditionFailed");
    }
    response.set_header("ETag", found->second.etag);
    response.set_header("x-amz-meta-writer", found->second.writer);
    response.set_content(found->second.bytes, "application/octet-stream");
  }

  void put(const std::string& key, const httplib::Request& request, httplib::Response& response) {
    if (request.has_header("If-None-Match") && objects.contains(key)) return refuse(response, 412, "PreconditionFailed");
    objects[key] = {request.body, md5_tag(request.body), request.get_header_value("x-amz-meta-writer")};
    response.set_header("ETag", objects[key].etag);
  }

  void begin_upload(const std::string& key, httplib::Response& response) {
    const std::string id = fmt::format("id of/{}", uploads.size());
    uploads[id] = {};
    response.set_content(fmt::format("<InitiateMultipartUploadResult><Key>{}</Key><UploadId>{}</UploadId>"
                                     "</InitiateMultipartUploadResult>",
                                     escaped(key), id),
                         "application/xml");
  }

  void upload(const S3Seen& now, const std::string& key, const httplib::Request& request, httplib::Response& response) {
    const auto found = uploads.find(now.query.at("uploadId"));
    if (found == uploads.end()) return refuse(response, 404, "NoSuchUpload");
    if (now.method == "PUT") {
      found->second[std::stoi(now.query.at("partNumber"))] = request.body;
      response.set_header("ETag", md5_tag(request.body));
      return;
    }
    if (now.method == "DELETE") {
      uploads.erase(found);
      response.status = 204;
      return;
    }
    std::string bytes, md5s;
    for (const auto& [number, part] : found->second) {
      if (request.body.find(md5_tag(part)) == std::string::npos) return refuse(response, 400, "InvalidPart");
      bytes += part;
      md5s += digest(EVP_md5(), part);
    }
    const std::string etag = fmt::format("\"{}-{}\"", hexadecimal(digest(EVP_md5(), md5s)), found->second.size());
    objects[key] = {bytes, etag, ""};
    uploads.erase(found);
    response.set_content("<CompleteMultipartUploadResult><ETag>" + etag + "</ETag></CompleteMultipartUploadResult>",
                         "application/xml");
  }

  void list(const S3Seen& now, httplib::Response& response) const {
    const std::string& prefix = now.query.at("prefix");
    const auto token_at = now.query.find("continuation-token");
    const std::string after = token_at == now.query.end() ? "" : token_at->second.substr(token_at->second.find('+') + 1);
    std::string entries, last;
    std::size_t count = 0;
    bool truncated = false;
    for (const auto& [key, object] : objects) {
      if (!key.starts_with(prefix) || (!after.empty() && key <= after)) continue;
      truncated = count == kPageKeys;
      if (truncated) break;
      entries += fmt::format("<Contents><Key>{}</Key><Size>{}</Size></Contents>", escaped(key), object.bytes.size());
      last = key;
      ++count;
    }
    if (truncated) entries += fmt::format("<NextContinuationToken>after/=+{}</NextContinuationToken>", escaped(last));
    response.set_content(fmt::format("<?xml version=\"1.0\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
                                     "<IsTruncated>{}</IsTruncated>{}</ListBucketResult>",
                                     truncated, entries),
                         "application/xml");
  }

  httplib::Server server;
  int port = 0;
  std::thread thread;
  std::mutex faults_mutex;  // guards the one below
  std::function<S3Fault(const S3Seen&)> faults;
  std::mutex mutex;  // guards what follows
  std::condition_variable released;
  bool stopping = false;
  std::string token;
  std::vector<S3Seen> seen;
  std::map<std::string, StoredObject> objects;
  std::map<std::string, std::map<int, std::string>> uploads;
};

S3TestServer::S3TestServer() : state_(std::make_unique<State>()) {}
S3TestServer::~S3TestServer() = default;

StoreAccess S3TestServer::access() const {
  StoreAccess access;
  access.endpoint = fmt::format("http://127.0.0.1:{}", state_->port);
  access.access_key = kAccessKey;
  access.secret_key = kSecretKey;
  access.attempts = 3;
  access.first_delay_seconds = 0.001;
  access.part_bytes = std::int64_t{5} << 20;
  return access;
}

void S3TestServer::set_faults(std::function<S3Fault(const S3Seen&)> faults) {
  const std::lock_guard lock(state_->faults_mutex);
  state_->faults = std::move(faults);
}

void S3TestServer::require_session_token(std::string token) {
  const std::lock_guard lock(state_->mutex);
  state_->token = std::move(token);
}

std::vector<S3Seen> S3TestServer::seen() const {
  const std::lock_guard lock(state_->mutex);
  return state_->seen;
}

std::map<std::string, std::string> S3TestServer::objects() const {
  const std::lock_guard lock(state_->mutex);
  std::map<std::string, std::string> bytes;
  for (const auto& [key, object] : state_->objects) bytes[key] = object.bytes;
  return bytes;
}

void S3TestServer::set_object(const std::string& key, std::string bytes) {
  const std::lock_guard lock(state_->mutex);
  std::string etag = md5_tag(bytes);
  state_->objects[key] = {std::move(bytes), std::move(etag), ""};
}

std::size_t S3TestServer::unfinished_uploads() const {
  const std::lock_guard lock(state_->mutex);
  return state_->uploads.size();
}

}  // namespace tandem
