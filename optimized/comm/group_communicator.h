// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "optimized/comm/communicator.h"
#include "optimized/comm/endpoint.h"
#include "optimized/comm/group.h"

namespace tandem {

/// The communicator over a group: checks arguments, keeps the queue of operations (endpoint.h).
class GroupCommunicator final : public Communicator {
 public:
  explicit GroupCommunicator(std::shared_ptr<Group> group);
  GroupCommunicator(const GroupCommunicator&) = delete;
  GroupCommunicator& operator=(const GroupCommunicator&) = delete;
  ~GroupCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return endpoint_->rank(); }
  [[nodiscard]] int size() const noexcept override { return endpoint_->group().size(); }
  [[nodiscard]] std::uint64_t generation() const noexcept override { return endpoint_->group().world().generation(); }

  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) override;
  [[nodiscard]] Work reduce_scatter(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                    const CommOptions& options) override;
  [[nodiscard]] Work all_gather(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                const CommOptions& options) override;
  [[nodiscard]] Work all_to_all(TensorView input, std::span<const std::int64_t> send_counts, TensorView output,
                                std::span<const std::int64_t> receive_counts, const CommOptions& options) override;
  [[nodiscard]] Work broadcast(TensorView data, int root, const CommOptions& options) override;
  [[nodiscard]] Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) override;
  [[nodiscard]] Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) override;
  void barrier() override;
  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override;
  void abort(std::string_view reason) noexcept override;
  void set_timeline(Timeline* timeline) noexcept override { endpoint_->set_timeline(timeline); }
  void set_memory(Memory* memory) override { endpoint_->set_memory(memory); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return endpoint_->bytes_sent(purpose); }

  /// Throws ContractError when an operation was dropped without having been waited for.
  void require_none_dropped() const { endpoint_->require_none_dropped(); }

 private:
  [[nodiscard]] Work post(TensorView data, int peer, MessageCall::Direction direction, const Envelope& envelope,
                          const CommOptions& options);

  std::shared_ptr<Endpoint> endpoint_;
};

}  // namespace tandem
