// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/group_communicator.h"

#include <utility>

#include <fmt/format.h>

#include "optimized/comm/arguments.h"

namespace tandem {
namespace {

using Counts = std::span<const std::int64_t>;

std::byte* bytes_of(TensorView view) { return static_cast<std::byte*>(view.data()); }

}  // namespace

GroupCommunicator::GroupCommunicator(std::shared_ptr<Group> group) : endpoint_(std::make_shared<Endpoint>(std::move(group))) {}

GroupCommunicator::~GroupCommunicator() { endpoint_->close(); }

Work GroupCommunicator::all_reduce(TensorView data, const CommOptions& options) {
  Call call{.kind = CallKind::all_reduce, .dtype = data.dtype(), .input = bytes_of(data), .output = bytes_of(data)};
  call.elements = data.num_elements();
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work GroupCommunicator::reduce_scatter(TensorView input, TensorView output, Counts counts, const CommOptions& options) {
  check_reduce_scatter(input, output, counts, rank(), size());
  Call call{.kind = CallKind::reduce_scatter, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(counts.begin(), counts.end());
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work GroupCommunicator::all_gather(TensorView input, TensorView output, Counts counts, const CommOptions& options) {
  check_all_gather(input, output, counts, rank(), size());
  Call call{.kind = CallKind::all_gather, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(counts.begin(), counts.end());
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work GroupCommunicator::all_to_all(TensorView input, Counts send_counts, TensorView output, Counts receive_counts,
                                   const CommOptions& options) {
  check_all_to_all(input, send_counts, output, receive_counts, size());
  Call call{.kind = CallKind::all_to_all, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(send_counts.begin(), send_counts.end());
  call.receive_counts.assign(receive_counts.begin(), receive_counts.end());
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work GroupCommunicator::broadcast(TensorView data, int root, const CommOptions& options) {
  check_root(root, size());
  Call call{.kind = CallKind::broadcast, .dtype = data.dtype(), .input = bytes_of(data), .output = bytes_of(data)};
  call.elements = data.num_elements();
  call.root = root;
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work GroupCommunicator::send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) {
  return post(data, to, MessageCall::Direction::send, envelope, options);
}

Work GroupCommunicator::recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) {
  return post(data, from, MessageCall::Direction::recv, expected, options);
}

Work GroupCommunicator::post(TensorView data, int peer, MessageCall::Direction direction, const Envelope& envelope,
                             const CommOptions& options) {
  check_peer(peer, size());
  MessageCall message;
  message.direction = direction;
  message.rank = rank();
  message.peer = peer;
  message.data = bytes_of(data);
  message.elements = data.num_elements();
  message.dtype = data.dtype();
  message.envelope = envelope;
  message.options = options;
  return Work(endpoint_->issue(std::move(message)));
}

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

void GroupCommunicator::abort(std::string_view reason) noexcept {
  Group& group = endpoint_->group();
  const int world_rank = group.world_rank();
  group.world().fail({Failure::Kind::peer, world_rank, fmt::format("rank {} aborted: {}", world_rank, reason)});
}

}  // namespace tandem
