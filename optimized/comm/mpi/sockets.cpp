// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::sockets {
namespace {

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
}

// False: the deadline passed.
bool wait_for(int socket, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{socket, events, 0};
    const int ready = poll(&entry, 1, milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0) return false;
    if (errno != EINTR) return false;
  }
}

[[noreturn]] void refuse(const char* what) {
  throw IoError(fmt::format("connection between the processes of the job: {}: {}", what, std::strerror(errno)));
}

}  // namespace

std::pair<int, std::uint16_t> listen_anywhere(int backlog) {
  const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listening < 0) refuse("no socket");
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(any);
  auto* const address = reinterpret_cast<sockaddr*>(&any);
  if (bind(listening, address, size) != 0 || listen(listening, backlog) != 0 || getsockname(listening, address, &size) != 0) {
    const int error = errno;
    close(listening);
    errno = error;
    refuse("cannot listen");
  }
  return {listening, ntohs(any.sin_port)};
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 || (entry->ifa_flags & IFF_UP) == 0) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* const internet = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (inet_ntop(AF_INET, &internet->sin_addr, text.data(), text.size()) != nullptr) addresses.emplace_back(text.data());
  }
  freeifaddrs(list);
  return addresses;
}

std::string host_name() {
  std::array<char, 256> text{};
  return gethostname(text.data(), text.size() - 1) == 0 ? text.data() : "unknown";
}

int connect_to(const std::string& address, std::uint16_t port, Deadline deadline) {
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_port = htons(port);
  if (inet_pton(AF_INET, address.c_str(), &there.sin_addr) != 1) {
    errno = EINVAL;
    return -1;
  }
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (connection < 0) return -1;
  int error = 0;
  if (connect(connection, reinterpret_cast<const sockaddr*>(&there), sizeof(there)) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof(error);
      if (!wait_for(connection, POLLOUT, deadline)) {
        error = ETIMEDOUT;
      } else if (getsockopt(connection, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
        error = errno;
      }
    }
  }
  if (error == 0) return connection;
  close(connection);
  errno = error;
  return -1;
}

int accept_from(int listening, Deadline deadline) {
  for (;;) {
    const int connection = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (connection >= 0) return connection;
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED) return -1;
    if (!wait_for(listening, POLLIN, deadline)) return -1;
  }
}

bool write_all(int socket, const void* bytes, std::size_t size, Deadline deadline) {
  const auto* at = static_cast<const char*>(bytes);
  while (size > 0) {
    const ssize_t written = ::send(socket, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written > 0) {
      at += written;
      size -= static_cast<std::size_t>(written);
    } else if (errno != EINTR) {
      if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
      if (!wait_for(socket, POLLOUT, deadline)) return false;
    }
  }
  return true;
}

bool read_all(int socket, void* bytes, std::size_t size, Deadline deadline) {
  auto* at = static_cast<char*>(bytes);
  while (size > 0) {
    const ssize_t got = ::recv(socket, at, size, MSG_DONTWAIT);
    if (got > 0) {
      at += got;
      size -= static_cast<std::size_t>(got);
    } else if (got == 0) {
      return false;
    } else if (errno != EINTR) {
      if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
      if (!wait_for(socket, POLLIN, deadline)) return false;
    }
  }
  return true;
}

void prepare(int socket) noexcept {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  const int idle_seconds = 10;
  const int interval_seconds = 5;
  const int probes = 3;
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof(idle_seconds));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &interval_seconds, sizeof(interval_seconds));
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

}  // namespace tandem::sockets
