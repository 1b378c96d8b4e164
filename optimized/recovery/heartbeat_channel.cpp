// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/heartbeat_channel.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "optimized/recovery/heartbeat_datagram.h"

namespace tandem {
namespace {

sockaddr_in resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  const int problem = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (problem != 0 || list == nullptr) {
    throw InputError(fmt::format("heartbeats: no IPv4 address of host \"{}\": {}", host, ::gai_strerror(problem)));
  }
  sockaddr_in address = *reinterpret_cast<const sockaddr_in*>(list->ai_addr);
  ::freeaddrinfo(list);
  address.sin_port = htons(port);
  return address;
}

int datagram_socket() {
  const int made = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) throw IoError(fmt::format("heartbeats: no socket: {}", std::generic_category().message(errno)));
  return made;
}

const sockaddr* generic(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

// One of the losses that were asked for, if there is one left.
bool takes_one(std::atomic<std::int64_t>& lost) noexcept {
  std::int64_t left = lost.load();
  while (left > 0 && !lost.compare_exchange_weak(left, left - 1)) continue;
  return left > 0;
}

}  // namespace

Endpoint4 parse_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  Endpoint4 endpoint;
  if (colon != std::string::npos && colon > 0) {
    endpoint.host = text.substr(0, colon);
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, endpoint.port);
    if (error == std::errc() && stop == end && endpoint.port > 0) return endpoint;
  }
  throw InputError(fmt::format("\"{}\" is no HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:40000", text));
}

HeartbeatReceiver::HeartbeatReceiver(const std::string& host, std::uint16_t port) {
  sockaddr_in address = resolve(host, port);
  socket_ = datagram_socket();
  // Beats that arrive while the supervisor does not run wait here.
  const int buffer_bytes = 1 << 20;
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof(buffer_bytes));
  socklen_t size = sizeof(address);
  if (::bind(socket_, generic(address), size) != 0 || ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    const int reason = errno;
    ::close(socket_);
    throw IoError(fmt::format("heartbeats: cannot listen on {}:{}: {}", host, port, std::generic_category().message(reason)));
  }
  port_ = ntohs(address.sin_port);
}

HeartbeatReceiver::~HeartbeatReceiver() { ::close(socket_); }

std::vector<Heartbeat> HeartbeatReceiver::receive() {
  // So many that a flood does not keep the caller here for ever.
  constexpr int kMostDatagrams = 10000;
  std::vector<Heartbeat> beats;
  std::array<std::byte, kDatagramBytes + 1> bytes;
  for (int count = 0; count < kMostDatagrams; ++count) {
    const ssize_t size = ::recv(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size < 0 && errno != EINTR) break;
    if (size > 0) decode_beats(std::span<const std::byte>(bytes).first(static_cast<std::size_t>(size)), beats);
  }
  return beats;
}

class HeartbeatSender::State {
 public:
  State(const Endpoint4& to, std::uint64_t attempt, double beat_seconds, const ProgressBoard& board)
      : attempt_(attempt), beat_(std::chrono::nanoseconds(static_cast<std::int64_t>(beat_seconds * 1e9))), board_(board) {
    TANDEM_CHECK(beat_seconds > 0, fmt::format("a beat of {} s", beat_seconds));
    to_ = resolve(to.host, to.port);
    socket_ = datagram_socket();
    try {
      thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
    } catch (const std::system_error& error) {
      ::close(socket_);
      throw IoError(fmt::format("heartbeats: no thread: {}", error.what()));
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    thread_.request_stop();
    thread_.join();
    ::close(socket_);
  }
  void lose(std::int64_t beats) noexcept { lost_ += beats; }

 private:
  void run(const std::stop_token& stop) noexcept {
    auto next = std::chrono::steady_clock::now();
    while (!stop.stop_requested()) {
      send();
      // A thread that comes late sends one beat, not all that it has missed.
      next = std::max(next + beat_, std::chrono::steady_clock::now());
      std::unique_lock lock(mutex_);
      changed_.wait_until(lock, stop, next, [] { return false; });
    }
    send();
  }

  void send() noexcept {
    ++sequence_;
    if (takes_one(lost_)) return;
    std::array<Heartbeat, kDatagramBeats> beats;
    std::size_t count = 0;
    for (int rank = 0; rank < board_.ranks(); ++rank) {
      const ProgressSlot& slot = board_.slot(rank);
      if (!slot.is_here.load(std::memory_order_acquire)) continue;
      beats[count++] = beat_of(slot, rank, attempt_, sequence_);
      if (count == beats.size()) send_datagram({beats.data(), std::exchange(count, 0)});
    }
    if (count > 0) send_datagram({beats.data(), count});
  }

  void send_datagram(std::span<const Heartbeat> beats) noexcept {
    Datagram datagram;
    const std::span<const std::byte> bytes = encode_beats(beats, datagram);
    // Not connected, so that a port where nobody listens (any more, or yet) is no error of a later beat.
    static_cast<void>(::sendto(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL, generic(to_), sizeof(to_)));
  }

  std::uint64_t attempt_, sequence_ = 0;
  std::chrono::nanoseconds beat_;
  const ProgressBoard& board_;
  sockaddr_in to_{};
  int socket_ = -1;
  std::atomic<std::int64_t> lost_{0};
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::jthread thread_;
};

HeartbeatSender::HeartbeatSender(const Endpoint4& to, std::uint64_t attempt, double beat_seconds, const ProgressBoard& board)
    : state_(std::make_unique<State>(to, attempt, beat_seconds, board)) {}
HeartbeatSender::~HeartbeatSender() = default;
void HeartbeatSender::lose(std::int64_t beats) noexcept { state_->lose(beats); }

void BoardHeartbeats::watch(const ProgressBoard* board, std::uint64_t attempt) {
  board_ = board;
  attempt_ = attempt;
  next_ns_ = 0;
}

std::vector<Heartbeat> BoardHeartbeats::receive() {
  std::vector<Heartbeat> beats;
  const std::int64_t now_ns = Timeline::now_ns();
  if (board_ == nullptr || now_ns < next_ns_) return beats;
  next_ns_ = now_ns + static_cast<std::int64_t>(beat_seconds_ * 1e9);
  ++sequence_;
  if (takes_one(lost_)) return beats;
  for (int rank = 0; rank < board_->ranks(); ++rank) {
    const ProgressSlot& slot = board_->slot(rank);
    if (slot.is_here.load(std::memory_order_acquire)) beats.push_back(beat_of(slot, rank, attempt_, sequence_));
  }
  return beats;
}

}  // namespace tandem
