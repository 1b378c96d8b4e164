// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <functional>
#include <memory>

#include "optimized/comm/call_communicator.h"
#include "optimized/comm/nccl/nccl_endpoint.h"

namespace tandem {

/// The communicator over NCCL: one rank per process, tensors in the memory of a GPU (Communicator::set_memory()) or in the
/// host's, which are copied to the GPU and back and are meant for small control values.
///
/// wait_host() of an operation on the GPU's tensors does not block until it is done: it makes the rank's lane wait for it, so
/// that what the lane does next sees the result. It blocks until NCCL has taken the operation, which takes a meeting of the ranks
/// the first time that two of them exchange anything, and a receive until the sender has come to its send. An operation that
/// fails on the device later is thrown by the next call. Sums have NCCL's own order, unless CommOptions::algorithm is direct
/// (nccl_steps.h).
class NcclCommunicator final : public CallCommunicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclEndpoint> endpoint);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return endpoint_->rank(); }
  [[nodiscard]] int size() const noexcept override { return endpoint_->size(); }

  void barrier() override { endpoint_->barrier(); }
  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override;
  void set_timeline(Timeline* timeline) noexcept override { endpoint_->set_timeline(timeline); }
  void set_memory(Memory* memory) override { endpoint_->set_memory(memory); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return endpoint_->bytes_sent(purpose); }
  void register_memory(void* address, std::int64_t size_bytes) override {
    endpoint_->here().register_buffer(address, size_bytes);
  }
  void deregister_memory(void* address) noexcept override { endpoint_->here().deregister_buffer(address); }

  /// Throws ContractError when an operation was dropped without having been waited for.
  void require_none_dropped() const { endpoint_->require_none_dropped(); }

 private:
  [[nodiscard]] std::shared_ptr<Work::State> issue(Call call) override;
  [[nodiscard]] std::shared_ptr<Work::State> issue(MessageCall call) override;
  [[nodiscard]] WorldState& world() const noexcept override { return endpoint_->world(); }
  [[nodiscard]] int world_rank() const noexcept override { return endpoint_->world_rank(); }

  const std::shared_ptr<NcclEndpoint> endpoint_;
};

/// Runs the body of one rank with a communicator of all ranks. Afterwards the world knows that the rank has ended, or that it
/// failed and of what. Returns what the body threw; null: nothing. The caller ends the rank: close_all() where the world went
/// well for all ranks, else abort_all().
[[nodiscard]] std::exception_ptr run_nccl_rank(const std::shared_ptr<NcclRank>& rank,
                                               const std::function<void(Communicator&)>& body) noexcept;

}  // namespace tandem
