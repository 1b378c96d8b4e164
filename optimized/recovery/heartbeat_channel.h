// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/heartbeat.h"

namespace tandem {

/// "127.0.0.1:40000"
struct Endpoint4 {
  std::string host;  ///< IPv4 address or name
  std::uint16_t port = 0;
};
/// Throws InputError.
[[nodiscard]] Endpoint4 parse_endpoint(const std::string& text);

/// Where beats come from.
class HeartbeatSource {
 public:
  virtual ~HeartbeatSource() = default;
  /// All that has arrived since the last call. Does not wait.
  [[nodiscard]] virtual std::vector<Heartbeat> receive() = 0;
};

/// Beats as datagrams (heartbeat_datagram.h): what is lost is lost, nobody waits for anybody. A datagram that is none of ours is
/// ignored.
class HeartbeatReceiver final : public HeartbeatSource {
 public:
  /// port 0: any that is free. Throws InputError for a host that does not exist, IoError.
  explicit HeartbeatReceiver(const std::string& host = "127.0.0.1", std::uint16_t port = 0);
  ~HeartbeatReceiver() override;
  HeartbeatReceiver(const HeartbeatReceiver&) = delete;
  HeartbeatReceiver& operator=(const HeartbeatReceiver&) = delete;
  [[nodiscard]] std::vector<Heartbeat> receive() override;
  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

 private:
  int socket_ = -1;
  std::uint16_t port_ = 0;
};

/// Sends a beat of every rank of the board that lives in this process (ProgressSlot::is_here), now and every `beat_seconds`, from
/// a thread of its own. Failures of the network are ignored.
class HeartbeatSender {
 public:
  /// Borrows the board. Throws InputError for a host that does not exist, IoError.
  HeartbeatSender(const Endpoint4& to, std::uint64_t attempt, double beat_seconds, const ProgressBoard& board);
  /// A last beat, then the thread ends; does not wait for the next beat's time.
  ~HeartbeatSender();
  HeartbeatSender(const HeartbeatSender&) = delete;
  HeartbeatSender& operator=(const HeartbeatSender&) = delete;
  /// The next `beats` of this process are not sent: a planted fault.
  void lose(std::int64_t beats) noexcept;

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// The board of a run in this process, as beats (for tests, and where workers are threads): a beat of every rank that is there
/// (ProgressSlot::is_here), from the first call on and at most every `beat_seconds`. Only lose() may be called from another
/// thread.
class BoardHeartbeats final : public HeartbeatSource {
 public:
  explicit BoardHeartbeats(double beat_seconds) : beat_seconds_(beat_seconds) {}
  /// Borrows; null: none.
  void watch(const ProgressBoard* board, std::uint64_t attempt);
  void lose(std::int64_t beats) noexcept { lost_ += beats; }
  [[nodiscard]] std::vector<Heartbeat> receive() override;

 private:
  double beat_seconds_;
  const ProgressBoard* board_ = nullptr;
  std::uint64_t attempt_ = 0, sequence_ = 0;
  std::int64_t next_ns_ = 0;
  std::atomic<std::int64_t> lost_{0};
};

}  // namespace tandem
