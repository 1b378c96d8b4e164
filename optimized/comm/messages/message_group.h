// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/world_settings.h"
#include "optimized/comm/group.h"
#include "optimized/comm/messages/group_peers.h"
#include "optimized/comm/wire.h"

namespace tandem {

/// What the message groups of one rank share.
struct MessageRank {
  std::shared_ptr<WorldState> world;
  std::unique_ptr<Wire> wire;
  WorldSettings settings;
  LinkProfile link;                          ///< that `automatic` chooses by: the settings' own, or the laptop's
  std::atomic<std::uint32_t> next_group{1};  ///< number of the next group that this rank becomes a member of
};

/// A group whose ranks exchange messages over a wire: collectives by the algorithms of optimized/collectives, point-to-point
/// messages as they are. Works between threads and between processes.
///
/// Other than in shared memory, a rank can be done with its part of a collective before it shows that the others' calls do not
/// match: it hears of it with its next operation. Buffers of a collective that failed may hold anything.
///
/// Whoever waits looks every kLook whether the world has failed, the peer has ended or the deadline has passed, and every fourth
/// time whether the calls of the ranks match; a failure wakes it earlier where the wire can. The deadline of a collective is that
/// of each of its messages.
class MessageGroup final : public Group, public std::enable_shared_from_this<MessageGroup> {
 public:
  static constexpr std::chrono::milliseconds kLook{20};
  /// How long a message of a rank that has ended may still be on its way.
  static constexpr std::chrono::milliseconds kGrace{100};

  /// `number`, of which no other group of a member has the same, gives the group its channels and its id. `rank` is this rank's
  /// place among the members.
  MessageGroup(std::shared_ptr<MessageRank> here, std::uint32_t number, const std::vector<int>& members, int rank);

  std::int64_t run(Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times) override;
  void wake() noexcept override {}
  [[nodiscard]] Posted post(MessageCall call) override;

  /// What a thread waits for.
  struct Waiting {
    int peer = 0;                ///< place in the group
    const Call* call = nullptr;  ///< of a collective
    const MessageCall* message = nullptr;
    const std::atomic<bool>* cancelled = nullptr;
  };
  /// Blocks until the transfer is complete. Throws as Group::run() does; the transfer is then still to be cancelled.
  void wait_for(Transfer& transfer, const Waiting& waiting);

 private:
  using Flights = std::vector<RankFlights>;

  void carry_out(Call& call);
  void split(Call& call);
  [[nodiscard]] CollectiveAlgorithm algorithm_of(const Call& call) const;
  [[nodiscard]] std::uint64_t mark_of(const Call& call) const;
  [[nodiscard]] std::string describe(const Waiting& waiting) const;
  [[nodiscard]] std::optional<std::string> find_disagreement(const Flights& flights, const Waiting& waiting) const;
  void look(const Waiting& waiting, std::optional<Clock::time_point>& ended_since);
  [[noreturn]] void fail_contract(const Waiting& waiting, const std::string& of_wire);
  [[noreturn]] void time_out(const Waiting& waiting);

  const std::shared_ptr<MessageRank> here_;
  const std::uint32_t channel_;  // of collectives; messages have the next one
  std::uint64_t number_ = 0;     // of the collective under way
  GroupPeers peers_;
};

/// The group of all ranks, as the one at this end of the wire sees it.
[[nodiscard]] std::shared_ptr<Group> make_message_group(const std::shared_ptr<WorldState>& world, std::unique_ptr<Wire> wire,
                                                        const WorldSettings& settings);

}  // namespace tandem
