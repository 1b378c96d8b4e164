// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "optimized/comm/group.h"
#include "optimized/comm/parking.h"
#include "optimized/comm/threads/mailbox.h"
#include "optimized/comm/threads/transfer_plan.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// The meeting place of the ranks of one communicator. A collective has three moments: every rank *arrives* with its call; the
/// last one to arrive checks the calls and *opens* the operation; when all units of its plan are done it is *complete*. Between
/// the last two, any rank works on the buffers of all. Those that lie in a device's memory the last rank works on alone, in its
/// lane, behind what each rank's own lane had been given when it issued its call: one kernel, or a few copies, for all of them.
///
/// No rank may leave while another works on its buffers. Before the operation opens, a rank that gives up (failure, deadline,
/// cancellation) spoils the group, so that it can never open any more; after that moment it stays until completion, which waits
/// for nothing but memory.
class SharedGroup : public WorldState::Sleepers {
 public:
  SharedGroup(std::shared_ptr<WorldState> world, std::vector<int> members);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
  [[nodiscard]] const std::vector<int>& members() const noexcept { return members_; }  ///< world rank of each rank
  [[nodiscard]] const std::shared_ptr<WorldState>& world() const noexcept { return world_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
  [[nodiscard]] Mailbox& mailbox() noexcept { return mailbox_; }

  /// Group::run() of one rank. Where it throws, no buffer has been touched.
  void run(int rank, Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times);

  void wake() noexcept override;

 private:
  struct alignas(64) Seat {
    std::atomic<std::uint64_t> arrived{0};  ///< collectives that this rank has come to
    Call* call = nullptr;
  };

  void open(std::uint64_t index, int rank);
  [[nodiscard]] Memory* lane_for(int rank) const noexcept;
  void carry_out_on(Memory& lane, std::uint64_t index, int rank);
  void check_calls();
  void make_groups();
  void wait_until_open(std::uint64_t index, int rank, bool foreground, const std::atomic<bool>& cancelled);
  [[nodiscard]] bool withdraw(std::uint64_t index);
  [[nodiscard]] bool is_open(std::uint64_t index) const noexcept { return opened_.load() > index || completed_.load() > index; }
  [[nodiscard]] std::vector<int> missing_seats(std::uint64_t index) const;
  [[nodiscard]] int ended_seat(std::uint64_t index) const noexcept;
  void complete(std::uint64_t index) noexcept;

  const std::shared_ptr<WorldState> world_;
  const std::vector<int> members_;
  const std::uint64_t id_;
  std::vector<Seat> seats_;
  std::vector<Call*> calls_;  ///< of the operation that is open, by rank
  TransferPlan plan_;
  Parking parking_;
  Mailbox mailbox_;
  std::atomic<bool> broken_{false};  ///< the device failed in the operation that is complete; the world has, too
  alignas(64) std::atomic<std::uint64_t> arrivals_{0};  ///< of all collectives so far; the top bit: spoiled
  alignas(64) std::atomic<std::uint64_t> opened_{0};    ///< collectives opened so far
  alignas(64) std::atomic<std::uint64_t> completed_{0};
};

/// One rank's place in a SharedGroup.
class SharedSeat final : public Group {
 public:
  SharedSeat(std::shared_ptr<SharedGroup> group, int rank);

  std::int64_t run(Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times) override;
  void wake() noexcept override { group_->wake(); }
  [[nodiscard]] bool takes_device_memory() const noexcept override { return true; }
  [[nodiscard]] Posted post(MessageCall call) override;

 private:
  const std::shared_ptr<SharedGroup> group_;
};

/// The seats of a new group.
[[nodiscard]] std::vector<std::shared_ptr<Group>> make_shared_group(const std::shared_ptr<WorldState>& world,
                                                                    const std::vector<int>& members);

}  // namespace tandem
