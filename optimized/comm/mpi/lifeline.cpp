// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/lifeline.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "optimized/comm/mpi/sockets.h"

namespace tandem {
namespace {

constexpr std::uint8_t kGoodbye = 0;

// Before every notice on its way: size of the text, topic, number.
constexpr std::size_t kHeadBytes = 4 + 1 + 8;
// Reports of what a process did last are far below.
constexpr std::uint32_t kLargestText = 1U << 20;

struct Hello {
  std::uint64_t token = 0;
  std::int64_t rank = 0;
};

std::string packed(const Notice& notice) {
  const auto size = static_cast<std::uint32_t>(std::min<std::size_t>(notice.text.size(), kLargestText));
  std::string bytes(kHeadBytes, '\0');
  std::memcpy(bytes.data(), &size, 4);
  std::memcpy(bytes.data() + 4, &notice.topic, 1);
  std::memcpy(bytes.data() + 5, &notice.number, 8);
  return bytes.append(notice.text, 0, size);
}

}  // namespace

std::string ProcessAddress::describe(int rank) const { return fmt::format("rank {} (pid {} on host {})", rank, pid, host); }

std::string ProcessAddress::to_line() const { return fmt::format("{} {} {} {}", host, pid, port, fmt::join(addresses, " ")); }

ProcessAddress ProcessAddress::from_line(std::string_view line) {
  ProcessAddress result;
  std::istringstream words{std::string(line)};
  words >> result.host >> result.pid >> result.port;
  TANDEM_CHECK(!words.fail(), fmt::format("'{}' is no address of a process", line));
  for (std::string address; words >> address;) result.addresses.push_back(address);
  return result;
}

Lifeline::Lifeline(int rank, int ranks) : rank_(rank), ranks_(ranks), connections_(static_cast<std::size_t>(ranks)) {
  here_.host = sockets::host_name();
  here_.addresses = sockets::own_addresses();
  here_.pid = getpid();
  std::tie(listening_, here_.port) = sockets::listen_anywhere(ranks + 8);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) throw IoError(fmt::format("eventfd: {}", std::strerror(errno)));
}

Lifeline::~Lifeline() {
  if (watcher_.joinable()) {
    watcher_.request_stop();
    wake();
    watcher_.join();
  }
  for (Connection& connection : connections_) close(connection);
  if (listening_ >= 0) ::close(listening_);
  if (wake_ >= 0) ::close(wake_);
}

void Lifeline::connect(std::vector<ProcessAddress> everybody, std::uint64_t token, std::chrono::steady_clock::time_point deadline,
                       Listener& listener) {
  TANDEM_CHECK(std::ssize(everybody) == ranks_, fmt::format("{} addresses of {} processes", everybody.size(), ranks_));
  everybody_ = std::move(everybody);
  // A connection stands as soon as the other end listens, which it does since before its address was known: no order is needed.
  for (int rank = 0; rank < rank_; ++rank) connect_to(rank, token, deadline);
  for (int i = rank_ + 1; i < ranks_; ++i) accept_one(token, deadline);
  ::close(std::exchange(listening_, -1));
  watcher_ = std::jthread([this, &listener](const std::stop_token& stop) { listen(stop, listener); });
}

void Lifeline::connect_to(int rank, std::uint64_t token, std::chrono::steady_clock::time_point deadline) {
  const ProcessAddress& there = at(rank);
  std::vector<std::string> addresses = there.addresses;
  if (there.host == here_.host) addresses.insert(addresses.begin(), "127.0.0.1");
  const Hello hello{token, rank_};
  for (const std::string& address : addresses) {
    const int socket = sockets::connect_to(address, there.port, deadline);
    if (socket < 0) continue;
    if (sockets::write_all(socket, &hello, sizeof(hello), deadline)) {
      sockets::prepare(socket);
      connections_[static_cast<std::size_t>(rank)].socket = socket;
      return;
    }
    ::close(socket);
  }
  throw IoError(fmt::format("{} cannot reach {} at port {} of {}: {}; do the hosts see each other's ports?",
                            here_.describe(rank_), there.describe(rank), there.port, fmt::join(addresses, ", "),
                            std::strerror(errno)));
}

void Lifeline::accept_one(std::uint64_t token, std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const int socket = sockets::accept_from(listening_, deadline);
    if (socket < 0) {
      std::vector<std::string> missing;
      for (int rank = rank_ + 1; rank < ranks_; ++rank) {
        if (connections_[static_cast<std::size_t>(rank)].socket < 0) missing.push_back(at(rank).describe(rank));
      }
      throw IoError(fmt::format("{} was not reached by {}", here_.describe(rank_), fmt::join(missing, ", ")));
    }
    Hello hello;
    const bool known = sockets::read_all(socket, &hello, sizeof(hello), deadline) && hello.token == token && hello.rank > rank_ &&
                       hello.rank < ranks_ && connections_[static_cast<std::size_t>(hello.rank)].socket < 0;
    if (known) {
      sockets::prepare(socket);
      connections_[static_cast<std::size_t>(hello.rank)].socket = socket;
      return;
    }
    ::close(socket);
  }
}

void Lifeline::send(int to, const Notice& notice) noexcept {
  bool rest = false;
  {
    const std::scoped_lock lock(mutex_);
    Connection& connection = connections_[static_cast<std::size_t>(to)];
    if (connection.socket < 0) return;
    connection.outgoing += packed(notice);
    rest = flush(connection);
  }
  if (rest) wake();
}

void Lifeline::send_all(const Notice& notice) noexcept {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) send(rank, notice);
  }
}

void Lifeline::say_goodbye() noexcept { send_all({kGoodbye, 0, {}}); }

// True: something is left. An error is left to the reading side, which hears of it as the end of the process.
bool Lifeline::flush(Connection& connection) noexcept {
  while (!connection.outgoing.empty()) {
    const ssize_t sent =
        ::send(connection.socket, connection.outgoing.data(), connection.outgoing.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      connection.outgoing.erase(0, static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    } else if (errno != EINTR) {
      connection.outgoing.clear();
    }
  }
  return false;
}

void Lifeline::close(Connection& connection) noexcept {
  if (connection.socket >= 0) ::close(std::exchange(connection.socket, -1));
  connection.outgoing.clear();
}

void Lifeline::wake() noexcept {
  const std::uint64_t one = 1;
  // Where the counter is full, it is awake.
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof(one));
}

void Lifeline::listen(const std::stop_token& stop, Listener& listener) {
  std::vector<pollfd> entries;
  std::vector<int> owners;
  while (!stop.stop_requested()) {
    entries.assign(1, {wake_, POLLIN, 0});
    owners.assign(1, -1);
    {
      const std::scoped_lock lock(mutex_);
      for (int rank = 0; rank < ranks_; ++rank) {
        const Connection& connection = connections_[static_cast<std::size_t>(rank)];
        if (connection.socket < 0) continue;
        entries.push_back({connection.socket, static_cast<short>(connection.outgoing.empty() ? POLLIN : POLLIN | POLLOUT), 0});
        owners.push_back(rank);
      }
    }
    if (poll(entries.data(), entries.size(), -1) < 0) continue;
    std::uint64_t count = 0;
    if ((entries[0].revents & POLLIN) != 0) [[maybe_unused]]
      const ssize_t got = ::read(wake_, &count, sizeof(count));
    for (std::size_t i = 1; i < entries.size(); ++i) {
      Connection& connection = connections_[static_cast<std::size_t>(owners[i])];
      if ((entries[i].revents & POLLOUT) != 0) {
        const std::scoped_lock lock(mutex_);
        static_cast<void>(flush(connection));
      }
      if ((entries[i].revents & (POLLIN | POLLHUP | POLLERR)) == 0 || read_from(owners[i], listener)) continue;
      {
        const std::scoped_lock lock(mutex_);
        close(connection);
      }
      if (!connection.left) listener.lost(owners[i]);
    }
  }
}

// False: the other end is closed.
bool Lifeline::read_from(int rank, Listener& listener) {
  Connection& connection = connections_[static_cast<std::size_t>(rank)];
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t got = ::recv(connection.socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) {
      connection.incoming.append(buffer.data(), static_cast<std::size_t>(got));
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    const bool open = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    take_notices(rank, listener);
    return open;
  }
}

void Lifeline::take_notices(int rank, Listener& listener) {
  Connection& connection = connections_[static_cast<std::size_t>(rank)];
  std::size_t at = 0;
  while (connection.incoming.size() - at >= kHeadBytes) {
    const char* const head = connection.incoming.data() + at;
    std::uint32_t size = 0;
    Notice notice;
    std::memcpy(&size, head, 4);
    std::memcpy(&notice.topic, head + 4, 1);
    std::memcpy(&notice.number, head + 5, 8);
    if (connection.incoming.size() - at - kHeadBytes < size) break;
    notice.text.assign(head + kHeadBytes, size);
    at += kHeadBytes + size;
    if (notice.topic == kGoodbye) {
      connection.left = true;
    } else {
      listener.heard(rank, notice);
    }
  }
  connection.incoming.erase(0, at);
}

}  // namespace tandem
