// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "optimized/comm/mpi/sockets.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

constexpr std::uint64_t kMagic = 0x74616e64656d3031;  // of the first version of these texts
constexpr std::uint32_t kLongestText = 1U << 24;
// Whoever connects says who it is at once; a stranger must not keep the others waiting.
constexpr std::chrono::milliseconds kHelloPatience{2000};
constexpr std::chrono::milliseconds kRetryInterval{100};
// After its own deadline rank 0 still has to say who is missing.
constexpr std::chrono::milliseconds kReplyGrace{2000};

class Socket {
 public:
  explicit Socket(int socket = -1) noexcept : socket_(socket) {}
  Socket(Socket&& other) noexcept : socket_(std::exchange(other.socket_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  ~Socket() {
    if (socket_ >= 0) ::close(socket_);
  }
  [[nodiscard]] int get() const noexcept { return socket_; }
  explicit operator bool() const noexcept { return socket_ >= 0; }

 private:
  int socket_;
};

std::string place(const RendezvousOptions& options) { return fmt::format("rendezvous at {}:{}", options.host, options.port); }

bool write_text(const Socket& socket, const std::string& text, SteadyClock::time_point deadline) {
  const std::uint64_t head[] = {kMagic, text.size()};
  return sockets::write_all(socket.get(), head, sizeof(head), deadline) &&
         sockets::write_all(socket.get(), text.data(), text.size(), deadline);
}

std::optional<std::string> read_text(const Socket& socket, SteadyClock::time_point deadline) {
  std::uint64_t head[2] = {};
  if (!sockets::read_all(socket.get(), head, sizeof(head), deadline) || head[0] != kMagic || head[1] > kLongestText)
    return std::nullopt;
  std::string text(head[1], '\0');
  if (!sockets::read_all(socket.get(), text.data(), text.size(), deadline)) return std::nullopt;
  return text;
}

// IPv4 addresses of a host, as numbers.
std::vector<std::string> resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  std::vector<std::string> addresses;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) return addresses;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* const address = reinterpret_cast<const sockaddr_in*>(entry->ai_addr);
    if (inet_ntop(AF_INET, &address->sin_addr, text.data(), text.size()) != nullptr) addresses.emplace_back(text.data());
  }
  freeaddrinfo(list);
  return addresses;
}

Socket listen_at(const RendezvousOptions& options) {
  Socket listening(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(options.port);
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  // A port that the last start of the job used a moment ago can be used again.
  if (!listening || setsockopt(listening.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      bind(listening.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any)) != 0 ||
      listen(listening.get(), options.ranks + 8) != 0) {
    throw IoError(fmt::format("{}: rank 0 cannot listen on port {}: {}", place(options), options.port, std::strerror(errno)));
  }
  return listening;
}

// What a process says first.
struct Hello {
  int rank = -1, ranks = 0;
  std::string generation, line;

  [[nodiscard]] std::string to_text() const { return fmt::format("{} {}\n{}\n{}", rank, ranks, generation, line); }
  [[nodiscard]] static std::optional<Hello> from_text(const std::string& text) {
    std::istringstream lines(text);
    Hello hello;
    lines >> hello.rank >> hello.ranks;
    lines.get();
    if (!std::getline(lines, hello.generation)) return std::nullopt;
    std::getline(lines, hello.line, '\0');
    return hello;
  }
};

// Those that have come to rank 0.
class Host {
 public:
  explicit Host(const RendezvousOptions& options)
      : options_(options), sockets_(static_cast<std::size_t>(options.ranks)), lines_(static_cast<std::size_t>(options.ranks)) {
    lines_[0] = options.line;
  }

  [[nodiscard]] RendezvousResult serve() {
    const Socket listening = listen_at(options_);
    const SteadyClock::time_point deadline = SteadyClock::now() + options_.deadline;
    while (missing().size() > 0) {
      Socket connection(sockets::accept_from(listening.get(), deadline));
      if (!connection) give_up();
      take(std::move(connection));
    }
    std::random_device random;
    const std::uint64_t token = (std::uint64_t{random()} << 32) | random();
    tell_all(fmt::format("ok {}\n{}", token, fmt::join(lines_, "\n")));
    return {lines_, token};
  }

 private:
  [[nodiscard]] std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < options_.ranks; ++rank) {
      if (!sockets_[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  }

  void take(Socket connection) {
    const SteadyClock::time_point deadline = SteadyClock::now() + kHelloPatience;
    const std::optional<std::string> text = read_text(connection, deadline);
    const std::optional<Hello> hello = text ? Hello::from_text(*text) : std::nullopt;
    if (!hello) return;
    if (const std::string reason = why_not(*hello); !reason.empty()) {
      static_cast<void>(write_text(connection, "no " + reason, deadline));
      return;
    }
    lines_[static_cast<std::size_t>(hello->rank)] = hello->line;
    sockets_[static_cast<std::size_t>(hello->rank)] = std::move(connection);
  }

  [[nodiscard]] std::string why_not(const Hello& hello) const {
    if (hello.generation != options_.generation) {
      return fmt::format("it is of '{}', the others of '{}'", hello.generation, options_.generation);
    }
    if (hello.ranks != options_.ranks)
      return fmt::format("it comes with {} ranks, the others with {}", hello.ranks, options_.ranks);
    if (hello.rank < 1 || hello.rank >= options_.ranks) return fmt::format("there is no place for rank {}", hello.rank);
    if (sockets_[static_cast<std::size_t>(hello.rank)]) return fmt::format("rank {} is there already", hello.rank);
    return {};
  }

  void tell_all(const std::string& text) const {
    const SteadyClock::time_point deadline = SteadyClock::now() + kHelloPatience;
    for (const Socket& socket : sockets_) {
      if (socket) static_cast<void>(write_text(socket, text, deadline));
    }
  }

  [[noreturn]] void give_up() const {
    const std::vector<int> absent = missing();
    const std::string text = fmt::format(
        "{}: rank{} {} of {} did not come within {} ms; are all processes started, and do their hosts reach this port?",
        place(options_), absent.size() == 1 ? "" : "s", fmt::join(absent, ", "), options_.ranks, options_.deadline.count());
    tell_all("late " + text);
    throw TimeoutError(text);
  }

  const RendezvousOptions& options_;
  std::vector<Socket> sockets_;  // by rank
  std::vector<std::string> lines_;
};

Socket connect(const RendezvousOptions& options, SteadyClock::time_point deadline) {
  for (;;) {
    const std::vector<std::string> addresses = resolve(options.host);
    int error = 0;
    for (const std::string& address : addresses) {
      Socket socket(sockets::connect_to(address, options.port, deadline));
      if (socket) return socket;
      error = errno;
    }
    if (SteadyClock::now() + kRetryInterval >= deadline) {
      throw IoError(fmt::format("{}: rank {} cannot reach rank 0 within {} ms: {}", place(options), options.rank,
                                options.deadline.count(),
                                addresses.empty() ? "the host name is not known" : std::strerror(error)));
    }
    std::this_thread::sleep_for(kRetryInterval);
  }
}

RendezvousResult come(const RendezvousOptions& options) {
  const SteadyClock::time_point deadline = SteadyClock::now() + options.deadline;
  const Socket socket = connect(options, deadline);
  const Hello hello{options.rank, options.ranks, options.generation, options.line};
  std::optional<std::string> reply;
  if (write_text(socket, hello.to_text(), deadline)) reply = read_text(socket, deadline + options.deadline + kReplyGrace);
  if (!reply) throw IoError(fmt::format("{}: rank 0 went away before all {} ranks were there", place(options), options.ranks));
  std::istringstream lines(*reply);
  std::string word;
  lines >> word;
  RendezvousResult result;
  if (word == "ok") {
    lines >> result.token;
    lines.get();
    for (std::string line; std::getline(lines, line);) result.lines.push_back(line);
    TANDEM_CHECK(std::ssize(result.lines) == options.ranks,
                 fmt::format("{} lines of {} ranks", result.lines.size(), options.ranks));
    return result;
  }
  lines.get();
  std::string reason;
  std::getline(lines, reason, '\0');
  if (word == "late") throw TimeoutError(reason);
  throw InputError(fmt::format("{}: rank {} was turned away: {}", place(options), options.rank, reason));
}

}  // namespace

RendezvousResult meet(const RendezvousOptions& options) {
  TANDEM_CHECK(options.rank >= 0 && options.rank < options.ranks, fmt::format("rank {} of {}", options.rank, options.ranks));
  TANDEM_CHECK((options.generation + options.line).find('\n') == std::string::npos, "one line each");
  return options.rank == 0 ? Host(options).serve() : come(options);
}

}  // namespace tandem
