// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/group_communicator.h"

#include <utility>

namespace tandem {

GroupCommunicator::GroupCommunicator(std::shared_ptr<Group> group) : endpoint_(std::make_shared<Endpoint>(std::move(group))) {}

GroupCommunicator::~GroupCommunicator() { endpoint_->close(); }

void GroupCommunicator::barrier() {
  Call call{.kind = CallKind::barrier};
  call.options.progress = Progress::on_wait;
  Work(endpoint_->issue(std::move(call))).wait_host();
}

std::unique_ptr<Communicator> GroupCommunicator::split(int colour, int key) {
  Call call{.kind = CallKind::split, .colour = colour, .key = key};
  call.options.progress = Progress::on_wait;
  const std::shared_ptr<CollectiveState> state = endpoint_->issue(std::move(call));
  Work(state).wait_host();
  auto part = std::make_unique<GroupCommunicator>(std::move(state->call().new_group));
  part->set_timeline(endpoint_->timeline());
  part->set_memory(endpoint_->memory());
  return part;
}

}  // namespace tandem
