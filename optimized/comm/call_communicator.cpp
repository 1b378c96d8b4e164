// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/call_communicator.h"

#include <utility>

#include <fmt/format.h>

#include "optimized/comm/arguments.h"

namespace tandem {
namespace {

using Counts = std::span<const std::int64_t>;

std::byte* bytes_of(TensorView view) { return static_cast<std::byte*>(view.data()); }

}  // namespace

Work CallCommunicator::all_reduce(TensorView data, const CommOptions& options) {
  Call call{.kind = CallKind::all_reduce, .dtype = data.dtype(), .input = bytes_of(data), .output = bytes_of(data)};
  call.elements = data.num_elements();
  call.options = options;
  return Work(issue(std::move(call)));
}

Work CallCommunicator::reduce_scatter(TensorView input, TensorView output, Counts counts, const CommOptions& options) {
  check_reduce_scatter(input, output, counts, rank(), size());
  Call call{.kind = CallKind::reduce_scatter, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(counts.begin(), counts.end());
  call.options = options;
  return Work(issue(std::move(call)));
}

Work CallCommunicator::all_gather(TensorView input, TensorView output, Counts counts, const CommOptions& options) {
  check_all_gather(input, output, counts, rank(), size());
  Call call{.kind = CallKind::all_gather, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(counts.begin(), counts.end());
  call.options = options;
  return Work(issue(std::move(call)));
}

Work CallCommunicator::all_to_all(TensorView input, Counts send_counts, TensorView output, Counts receive_counts,
                                  const CommOptions& options) {
  check_all_to_all(input, send_counts, output, receive_counts, size());
  Call call{.kind = CallKind::all_to_all, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(send_counts.begin(), send_counts.end());
  call.receive_counts.assign(receive_counts.begin(), receive_counts.end());
  call.options = options;
  return Work(issue(std::move(call)));
}

Work CallCommunicator::broadcast(TensorView data, int root, const CommOptions& options) {
  check_root(root, size());
  Call call{.kind = CallKind::broadcast, .dtype = data.dtype(), .input = bytes_of(data), .output = bytes_of(data)};
  call.elements = data.num_elements();
  call.root = root;
  call.options = options;
  return Work(issue(std::move(call)));
}

Work CallCommunicator::send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) {
  return post(data, to, MessageCall::Direction::send, envelope, options);
}

Work CallCommunicator::recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) {
  return post(data, from, MessageCall::Direction::recv, expected, options);
}

Work CallCommunicator::post(TensorView data, int peer, MessageCall::Direction direction, const Envelope& envelope,
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
  return Work(issue(std::move(message)));
}

void CallCommunicator::abort(std::string_view reason) noexcept {
  const int rank = world_rank();
  world().fail({Failure::Kind::peer, rank, fmt::format("rank {} aborted: {}", rank, reason)});
}

}  // namespace tandem
