// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "optimized/comm/call.h"
#include "optimized/comm/message.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// When the phases of one operation were, for the timeline.
struct PhaseTimes {
  std::int64_t begin_ns = 0;
  std::int64_t opened_ns = 0;  ///< all ranks had arrived, as far as this rank can tell
  std::int64_t end_ns = 0;
};

/// The ranks of one communicator as one of them sees them: how its operations are carried out. SharedGroup's seats do it in the
/// memory that the ranks share, MessageGroup by messages.
class Group {
 public:
  /// `id`: the same number on all members, and for no other group of a member. `members`: world rank of each rank.
  Group(std::shared_ptr<WorldState> world, std::uint64_t id, std::vector<int> members, int rank)
      : world_(std::move(world)), id_(id), members_(std::move(members)), rank_(rank) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  virtual ~Group() = default;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
  [[nodiscard]] const std::vector<int>& members() const noexcept { return members_; }
  [[nodiscard]] int world_rank() const noexcept { return members_[static_cast<std::size_t>(rank_)]; }
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  [[nodiscard]] WorldState& world() const noexcept { return *world_; }

  /// Takes part in the group's next collective; `call` must live until it returns. One thread at a time. Returns the bytes that
  /// this rank sent, once the operation is complete; throws PeerError, TimeoutError, ContractError, and then nobody touches the
  /// buffers any more. `cancelled` is looked at while waiting, after wake() at the latest 50 ms later.
  virtual std::int64_t run(Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times) = 0;
  virtual void wake() noexcept = 0;

  /// Whether run() and post() take buffers in a device's memory. Where they do not, copies in the host's memory are what travels
  /// (staging.h).
  [[nodiscard]] virtual bool takes_device_memory() const noexcept { return false; }

  struct Posted {
    std::shared_ptr<PostedMessage> message;
    bool can_advance = false;  ///< advance() of the message will do something
  };
  [[nodiscard]] virtual Posted post(MessageCall call) = 0;

 private:
  const std::shared_ptr<WorldState> world_;
  const std::uint64_t id_;
  const std::vector<int> members_;
  const int rank_;
};

}  // namespace tandem
