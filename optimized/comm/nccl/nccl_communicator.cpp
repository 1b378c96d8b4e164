// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_communicator.h"

#include <utility>

#include "optimized/comm/nccl/nccl_work.h"

namespace tandem {

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclEndpoint> endpoint) : endpoint_(std::move(endpoint)) {}

NcclCommunicator::~NcclCommunicator() = default;

std::shared_ptr<Work::State> NcclCommunicator::issue(Call call) { return endpoint_->issue(std::move(call)); }

std::shared_ptr<Work::State> NcclCommunicator::issue(MessageCall call) { return endpoint_->issue(std::move(call)); }

std::unique_ptr<Communicator> NcclCommunicator::split(int colour, int key) {
  return std::make_unique<NcclCommunicator>(endpoint_->split(colour, key));
}

std::exception_ptr run_nccl_rank(const std::shared_ptr<NcclRank>& rank, const std::function<void(Communicator&)>& body) noexcept {
  WorldState& world = rank->world();
  try {
    rank->start();
    NcclCommunicator communicator(make_nccl_endpoint(rank));
    body(communicator);
    communicator.require_none_dropped();
    rank->drain();
    world.mark_ended(rank->rank());
    return nullptr;
  } catch (const std::exception& error) {
    std::exception_ptr thrown = std::current_exception();
    rank->fail(error.what());
    return thrown;
  } catch (...) {
    std::exception_ptr thrown = std::current_exception();
    rank->fail("an exception of unknown type");
    return thrown;
  }
}

}  // namespace tandem
