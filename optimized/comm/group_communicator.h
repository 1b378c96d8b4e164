// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "optimized/comm/call_communicator.h"
#include "optimized/comm/endpoint.h"
#include "optimized/comm/group.h"

namespace tandem {

/// The communicator over a group: checks arguments, keeps the queue of operations (endpoint.h).
class GroupCommunicator final : public CallCommunicator {
 public:
  explicit GroupCommunicator(std::shared_ptr<Group> group);
  GroupCommunicator(const GroupCommunicator&) = delete;
  GroupCommunicator& operator=(const GroupCommunicator&) = delete;
  ~GroupCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return endpoint_->rank(); }
  [[nodiscard]] int size() const noexcept override { return endpoint_->group().size(); }

  void barrier() override;
  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override;
  void set_timeline(Timeline* timeline) noexcept override { endpoint_->set_timeline(timeline); }
  void set_memory(Memory* memory) override { endpoint_->set_memory(memory); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return endpoint_->bytes_sent(purpose); }

  /// Throws ContractError when an operation was dropped without having been waited for.
  void require_none_dropped() const { endpoint_->require_none_dropped(); }

 private:
  [[nodiscard]] std::shared_ptr<Work::State> issue(Call call) override { return endpoint_->issue(std::move(call)); }
  [[nodiscard]] std::shared_ptr<Work::State> issue(MessageCall call) override { return endpoint_->issue(std::move(call)); }
  [[nodiscard]] WorldState& world() const noexcept override { return endpoint_->group().world(); }
  [[nodiscard]] int world_rank() const noexcept override { return endpoint_->group().world_rank(); }

  std::shared_ptr<Endpoint> endpoint_;
};

}  // namespace tandem
