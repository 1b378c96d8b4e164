// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tandem {

/// Where a process of a job can be reached, and what people call it.
struct ProcessAddress {
  std::string host;
  std::vector<std::string> addresses;  ///< IPv4, as numbers; tried in order
  std::uint16_t port = 0;
  int pid = 0;

  /// "rank 1 (pid 1234 on host x)"
  [[nodiscard]] std::string describe(int rank) const;
  /// One line, and back. Throws ContractError where the line is none of these.
  [[nodiscard]] std::string to_line() const;
  [[nodiscard]] static ProcessAddress from_line(std::string_view line);
};

/// What one process tells another.
struct Notice {
  std::uint8_t topic = 0;    ///< the listener's own numbers, from 1
  std::uint64_t number = 0;  ///< what the topic makes of it
  std::string text{};
};

/// TCP connections between every two processes of a job, apart from whatever moves their data. The end of a process, however it
/// comes, closes its connections, and every other process hears of it at once: the operating system does that, nobody has to make
/// progress. Notices arrive in the order in which they were sent. One thread per process listens.
///
/// n - 1 sockets in each process. All processes must have the same byte order.
class Lifeline {
 public:
  /// Called by the listening thread; must not block for long.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void heard(int from, const Notice& notice) = 0;
    /// The process has ended without having said goodbye.
    virtual void lost(int rank) = 0;
  };

  /// Opens the socket to which others connect. Throws IoError.
  Lifeline(int rank, int ranks);
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;
  /// Closes all connections: the others hear of an end without goodbye unless there was one.
  ~Lifeline();

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int ranks() const noexcept { return ranks_; }
  /// Of this process; others need it for connect().
  [[nodiscard]] const ProcessAddress& here() const noexcept { return here_; }
  [[nodiscard]] const ProcessAddress& at(int rank) const { return everybody_.at(static_cast<std::size_t>(rank)); }

  /// Connects with all others, which must do so too, and begins to listen. `token` is the same number in all of them and nowhere
  /// else: who does not know it is turned away. Throws IoError naming whom it could not reach before the deadline.
  void connect(std::vector<ProcessAddress> everybody, std::uint64_t token, std::chrono::steady_clock::time_point deadline,
               Listener& listener);

  /// Never blocks: what the socket does not take is sent by the listening thread. Nothing to a process that has ended.
  void send(int to, const Notice& notice) noexcept;
  void send_all(const Notice& notice) noexcept;  ///< to all others

  /// From now on the end of this process is none that others must hear of.
  void say_goodbye() noexcept;

 private:
  struct Connection {
    int socket = -1;
    bool left = false;     ///< said goodbye
    std::string incoming;  // listening thread only
    std::string outgoing;  // guarded by mutex_
  };

  void connect_to(int rank, std::uint64_t token, std::chrono::steady_clock::time_point deadline);
  void accept_one(std::uint64_t token, std::chrono::steady_clock::time_point deadline);
  void listen(const std::stop_token& stop, Listener& listener);
  [[nodiscard]] bool read_from(int rank, Listener& listener);
  void take_notices(int rank, Listener& listener);
  [[nodiscard]] bool flush(Connection& connection) noexcept;
  void close(Connection& connection) noexcept;
  void wake() noexcept;

  const int rank_;
  const int ranks_;
  ProcessAddress here_;
  std::vector<ProcessAddress> everybody_;
  int listening_ = -1;
  int wake_ = -1;
  std::mutex mutex_;  // sockets and outgoing bytes
  std::vector<Connection> connections_;
  std::jthread watcher_;
};

}  // namespace tandem
