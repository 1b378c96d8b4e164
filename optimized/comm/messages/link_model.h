// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/world_settings.h"
#include "optimized/comm/messages/port_schedule.h"

namespace tandem {

/// When messages leave and arrive by the alpha-beta model of a link. A rank has one port between nodes and one within its node,
/// each of them full duplex. A message of s bytes over a link of latency a and B bytes/s, posted at time t:
///
///   start   = max(t, sender's port free)               the sender's port is taken until start + s / B
///   arrival = max(start + a, receiver's port free) + s / B, until when the receiver's port is taken (port_schedule.h)
///
/// All times are nanoseconds on one clock, of which this class knows nothing. Not thread-safe.
class LinkModel {
 public:
  LinkModel(const LinkProfile& profile, int ranks);

  struct Departure {
    std::int64_t start_ns = 0;
    std::int64_t left_ns = 0;        ///< the bytes are out of the sender
    std::int64_t receivable_ns = 0;  ///< the first of them may come in
  };
  /// A message that `from` posts at this time. A message to itself takes no time.
  [[nodiscard]] Departure depart(int from, int to, std::int64_t bytes, std::int64_t posted_ns);
  /// When the message is there. To be called once for each departure.
  [[nodiscard]] std::int64_t arrive(int from, int to, std::int64_t bytes, const Departure& departure);

 private:
  // Within the node, between nodes.
  using SendPorts = std::array<std::int64_t, 2>;
  using ReceivePorts = std::array<PortSchedule, 2>;

  [[nodiscard]] std::size_t port_of(int from, int to) const noexcept { return profile_.same_node(from, to) ? 0 : 1; }
  [[nodiscard]] std::int64_t moving_ns(int from, int to, std::int64_t bytes) const noexcept;

  const LinkProfile profile_;
  std::vector<SendPorts> sending_until_ns_;  // by rank
  std::vector<ReceivePorts> receiving_;      // by rank
  std::vector<std::uint64_t> messages_;      // of each rank, for the jitter
};

/// What time it is for one rank on one channel, in the eyes of the model.
///
/// A thread that sleeps until a message arrives wakes up late, by some 50 microseconds on a quiet machine and by much more on a
/// busy one. A message that it posts then would leave late, and make others late: in a ring of n ranks such delays add up and are
/// soon larger than the latencies of the link. So a message counts as posted when what caused it came about by the model:
///  - on a channel of collectives, whose threads do nothing but communicate: the last arrival of a message of this operation;
///    before the first one the end of the operation before it, or the time at which the operation was issued, whichever was
///    later;
///  - on a channel of messages between which the rank computes, only the lateness of the last waking is taken off.
/// Never more than kLongestLateness: whatever is later than that is time that really passed. The sums inside of a collective
/// therefore cost no time of the model until they last as long.
class ModelClock {
 public:
  static constexpr std::int64_t kLongestLateness_ns = 2'000'000;

  explicit ModelClock(bool of_collectives) : of_collectives_(of_collectives) {}

  /// A collective begins that was issued then.
  void begin(std::int64_t issued_ns) noexcept;
  /// Of a message that is posted now.
  [[nodiscard]] std::int64_t post_ns(std::int64_t now_ns) noexcept;
  /// A wait that began at one time has ended now; the message arrived at arrival_ns of the model.
  void waited(std::int64_t arrival_ns, std::int64_t began_ns, std::int64_t now_ns) noexcept;

 private:
  const bool of_collectives_;
  std::int64_t model_ns_ = 0;     // collectives: of the last event
  std::int64_t lateness_ns_ = 0;  // messages
};

}  // namespace tandem
