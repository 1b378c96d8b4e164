// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/s3_request.h"

#include <curl/curl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>

#include <fmt/format.h>

#include "optimized/storage/s3_digest.h"

namespace tandem::s3 {
namespace {

// A refusal is a few lines of XML; what is longer is something else, and of no use.
constexpr std::size_t kMaxRefusalBytes = 64 << 10;
constexpr long kStalledBytesPerSecond = 1024;

struct HeadersDeleter {
  void operator()(curl_slist* list) const noexcept { curl_slist_free_all(list); }
};
using HeaderList = std::unique_ptr<curl_slist, HeadersDeleter>;

void append(HeaderList& list, const std::string& line) {
  curl_slist* longer = curl_slist_append(list.get(), line.c_str());
  if (longer == nullptr) throw IoError("libcurl is out of memory");
  (void)list.release();
  list.reset(longer);
}

bool is_loopback(std::string_view endpoint) {
  const std::string_view host = endpoint.substr(endpoint.find("://") + 3);
  return host.starts_with("127.") || host.starts_with("localhost") || host.starts_with("[::1]");
}

bool is_hopeless(CURLcode code) {
  return code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_URL_MALFORMAT || code == CURLE_PEER_FAILED_VERIFICATION ||
         code == CURLE_SSL_CACERT_BADFILE;
}

std::string_view trimmed(std::string_view text) {
  constexpr const char* kBlank = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kBlank);
  return begin == std::string_view::npos ? std::string_view{} : text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

}  // namespace

std::string Reply::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string{} : found->second;
}

std::string percent_encode(std::string_view text, Slashes slashes) {
  std::string encoded;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
                       c == '.' || c == '~' || (c == '/' && slashes == Slashes::kept);
    if (plain) {
      encoded += c;
    } else {
      encoded += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

// Handles that are not in use, each with the connection that it keeps open.
class Client::Connections {
 public:
  ~Connections() {
    for (CURL* handle : idle_) curl_easy_cleanup(handle);
  }
  CURL* take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        CURL* handle = idle_.back();
        idle_.pop_back();
        return handle;
      }
    }
    CURL* handle = curl_easy_init();
    if (handle == nullptr) throw IoError("libcurl cannot be initialised");
    return handle;
  }
  void give_back(CURL* handle) {
    curl_easy_reset(handle);
    const std::lock_guard lock(mutex_);
    idle_.push_back(handle);
  }

 private:
  std::mutex mutex_;
  std::vector<CURL*> idle_;
};

// One request under way: libcurl's callbacks find everything here.
class Client::Exchange {
 public:
  Exchange(const StoreAccess& access, Connections& connections, const Request& request)
      : access_(access), connections_(connections), request_(request), handle_(connections.take()) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() { connections_.give_back(handle_); }

  Reply run() {
    set_target();
    set_patience();
    set_signature();
    set_body();
    set_callbacks();
    const CURLcode code = curl_easy_perform(handle_);
    if (thrown_) std::rethrow_exception(thrown_);
    if (code != CURLE_OK) {
      reply_.failure = error_text_[0] != '\0' ? error_text_ : curl_easy_strerror(code);
      reply_.hopeless = is_hopeless(code);
    }
    return std::move(reply_);
  }

 private:
  template <class T>
  void set(CURLoption option, T value) {
    if (const CURLcode code = curl_easy_setopt(handle_, option, value); code != CURLE_OK) {
      throw IoError(fmt::format("libcurl: {} (option {})", curl_easy_strerror(code), static_cast<int>(option)));
    }
  }

  // Sorted, and "name=" for a parameter without value: libcurl signs the query as it stands, the server in this form.
  void set_target() {
    std::vector<std::pair<std::string, std::string>> query = request_.query;
    std::ranges::sort(query);
    url_ = access_.endpoint + percent_encode(request_.path, Slashes::kept);
    char separator = '?';
    for (const auto& [name, value] : query) {
      url_ += fmt::format("{}{}={}", std::exchange(separator, '&'), percent_encode(name, Slashes::encoded),
                          percent_encode(value, Slashes::encoded));
    }
    set(CURLOPT_URL, url_.c_str());
    set(CURLOPT_PATH_AS_IS, 1L);
    if (is_loopback(access_.endpoint)) set(CURLOPT_PROXY, "");
  }

  void set_patience() {
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(std::ceil(access_.connect_seconds * 1000)));
    set(CURLOPT_LOW_SPEED_LIMIT, kStalledBytesPerSecond);
    set(CURLOPT_LOW_SPEED_TIME, std::max(1L, static_cast<long>(std::ceil(access_.stall_seconds * request_.patience))));
  }

  // The keys by name and password: the option that takes both at once splits at the first colon, which a key may have.
  void set_signature() {
    scope_ = fmt::format("aws:amz:{}:s3", access_.region);
    set(CURLOPT_AWS_SIGV4, scope_.c_str());
    set(CURLOPT_USERNAME, access_.access_key.c_str());
    set(CURLOPT_PASSWORD, access_.secret_key.c_str());
    append(headers_, fmt::format("x-amz-content-sha256: {}", sha256_hex(request_.body)));
    if (!access_.session_token.empty()) append(headers_, fmt::format("x-amz-security-token: {}", access_.session_token));
    for (const std::string& line : request_.headers) append(headers_, line);
  }

  void set_body() {
    if (request_.method == "PUT") {
      set(CURLOPT_UPLOAD, 1L);
      set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
      set(CURLOPT_UPLOAD_BUFFERSIZE, 1L << 20);
    } else if (request_.method == "POST") {
      set(CURLOPT_POST, 1L);
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
      append(headers_, "Content-Type: application/xml");
    } else if (request_.method == "HEAD") {
      set(CURLOPT_NOBODY, 1L);
    } else {
      set(CURLOPT_CUSTOMREQUEST, request_.method.c_str());
    }
    set(CURLOPT_HTTPHEADER, headers_.get());
  }

  void set_callbacks() {
    set(CURLOPT_ERRORBUFFER, error_text_);
    // Refused by a handle whose last host was not found: it keeps the size that it has.
    static_cast<void>(curl_easy_setopt(handle_, CURLOPT_BUFFERSIZE, 256L << 10));
    set(CURLOPT_READFUNCTION, &Exchange::on_read);
    set(CURLOPT_READDATA, this);
    set(CURLOPT_SEEKFUNCTION, &Exchange::on_seek);
    set(CURLOPT_SEEKDATA, this);
    set(CURLOPT_HEADERFUNCTION, &Exchange::on_header);
    set(CURLOPT_HEADERDATA, this);
    set(CURLOPT_WRITEFUNCTION, &Exchange::on_write);
    set(CURLOPT_WRITEDATA, this);
  }

  static std::size_t on_read(char* to, std::size_t size, std::size_t count, void* self_pointer) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    const std::span<const std::byte> rest = self.request_.body.subspan(self.sent_);
    const std::size_t bytes = std::min(size * count, rest.size());
    if (bytes > 0) std::memcpy(to, rest.data(), bytes);
    self.sent_ += bytes;
    return bytes;
  }

  // A kept connection may turn out to be closed when part of the body is on its way.
  static int on_seek(void* self_pointer, curl_off_t offset, int origin) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    if (origin != SEEK_SET || offset < 0 || static_cast<std::size_t>(offset) > self.request_.body.size()) {
      return CURL_SEEKFUNC_CANTSEEK;
    }
    self.sent_ = static_cast<std::size_t>(offset);
    return CURL_SEEKFUNC_OK;
  }

  static std::size_t on_header(const char* text, std::size_t size, std::size_t count, void* self_pointer) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    try {
      self.read_header({text, size * count});
    } catch (...) {
      self.thrown_ = std::current_exception();
      return 0;
    }
    return size * count;
  }

  void read_header(std::string_view line) {
    if (line.starts_with("HTTP/")) {  // "100 Continue" has headers of its own
      reply_.headers.clear();
      curl_easy_getinfo(handle_, CURLINFO_RESPONSE_CODE, &reply_.status);
      return;
    }
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos) return;
    std::string name(line.substr(0, colon));
    std::ranges::transform(name, name.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    reply_.headers[std::move(name)] = trimmed(line.substr(colon + 1));
  }

  static std::size_t on_write(const char* data, std::size_t size, std::size_t count, void* self_pointer) {
    auto& self = *static_cast<Exchange*>(self_pointer);
    try {
      self.take_body(std::as_bytes(std::span(data, size * count)));
    } catch (...) {
      self.thrown_ = std::current_exception();
      return 0;
    }
    return size * count;
  }

  void take_body(std::span<const std::byte> piece) {
    curl_easy_getinfo(handle_, CURLINFO_RESPONSE_CODE, &reply_.status);
    const bool refused = reply_.status < 200 || reply_.status >= 300;
    if (!refused && request_.sink) {
      request_.sink(reply_, piece);
    } else if (!refused || reply_.body.size() + piece.size() <= kMaxRefusalBytes) {
      reply_.body.insert(reply_.body.end(), piece.begin(), piece.end());
    }
  }

  const StoreAccess& access_;
  Connections& connections_;
  const Request& request_;
  CURL* handle_;
  HeaderList headers_;
  std::string url_, scope_;
  char error_text_[CURL_ERROR_SIZE] = {};
  std::size_t sent_ = 0;
  Reply reply_;
  std::exception_ptr thrown_;
};

Client::Client(StoreAccess access) : access_(std::move(access)), connections_(std::make_unique<Connections>()) {
  static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (initialised != CURLE_OK) throw IoError(fmt::format("libcurl: {}", curl_easy_strerror(initialised)));
}

Client::~Client() = default;

Reply Client::perform(const Request& request) { return Exchange(access_, *connections_, request).run(); }

}  // namespace tandem::s3
