// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/threads_communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

using Counts = std::span<const std::int64_t>;

std::byte* bytes_of(TensorView view) { return static_cast<std::byte*>(view.data()); }

std::int64_t total(Counts counts, int ranks, std::string_view what) {
  TANDEM_CHECK(std::ssize(counts) == ranks, fmt::format("{} has {} entries for {} ranks", what, counts.size(), ranks));
  TANDEM_CHECK(std::ranges::all_of(counts, [](std::int64_t count) { return count >= 0; }), fmt::format("{} below 0", what));
  return std::reduce(counts.begin(), counts.end(), std::int64_t{0});
}

void require_elements(TensorView view, std::int64_t elements, std::string_view what) {
  TANDEM_CHECK(view.num_elements() == elements, fmt::format("{} has {} elements, not {}", what, view.num_elements(), elements));
}

void require_one_dtype(TensorView input, TensorView output) {
  TANDEM_CHECK(input.dtype() == output.dtype(), fmt::format("input is {}, output {}", name(input.dtype()), name(output.dtype())));
}

// `inner` may lie at `place` bytes into `outer`, and otherwise may not touch it.
void require_apart_or_in_place(TensorView inner, TensorView outer, std::int64_t place) {
  if (inner.size_bytes() == 0 || outer.size_bytes() == 0) return;
  const std::byte* const outer_begin = bytes_of(outer);
  const std::byte* const inner_begin = bytes_of(inner);
  const bool apart = inner_begin + inner.size_bytes() <= outer_begin || outer_begin + outer.size_bytes() <= inner_begin;
  TANDEM_CHECK(apart || (place >= 0 && inner_begin == outer_begin + place), "input and output overlap");
}

std::int64_t place_of(int rank, Counts counts, DType dtype) {
  return std::reduce(counts.begin(), counts.begin() + rank, std::int64_t{0}) * static_cast<std::int64_t>(size_bytes(dtype));
}

}  // namespace

ThreadsCommunicator::ThreadsCommunicator(std::shared_ptr<Group> group, int rank)
    : endpoint_(std::make_shared<Endpoint>(std::move(group), rank)) {}

ThreadsCommunicator::~ThreadsCommunicator() { endpoint_->close(); }

Work ThreadsCommunicator::all_reduce(TensorView data, const CommOptions& options) {
  Call call{.kind = CallKind::all_reduce, .dtype = data.dtype(), .input = bytes_of(data), .output = bytes_of(data)};
  call.elements = data.num_elements();
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work ThreadsCommunicator::reduce_scatter(TensorView input, TensorView output, Counts counts, const CommOptions& options) {
  require_one_dtype(input, output);
  require_elements(input, total(counts, size(), "counts"), "input");
  require_elements(output, counts[static_cast<std::size_t>(rank())], "output");
  require_apart_or_in_place(output, input, place_of(rank(), counts, input.dtype()));
  Call call{.kind = CallKind::reduce_scatter, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(counts.begin(), counts.end());
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work ThreadsCommunicator::all_gather(TensorView input, TensorView output, Counts counts, const CommOptions& options) {
  require_one_dtype(input, output);
  require_elements(output, total(counts, size(), "counts"), "output");
  require_elements(input, counts[static_cast<std::size_t>(rank())], "input");
  require_apart_or_in_place(input, output, place_of(rank(), counts, input.dtype()));
  Call call{.kind = CallKind::all_gather, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(counts.begin(), counts.end());
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work ThreadsCommunicator::all_to_all(TensorView input, Counts send_counts, TensorView output, Counts receive_counts,
                                     const CommOptions& options) {
  require_one_dtype(input, output);
  require_elements(input, total(send_counts, size(), "send_counts"), "input");
  require_elements(output, total(receive_counts, size(), "receive_counts"), "output");
  require_apart_or_in_place(input, output, -1);
  Call call{.kind = CallKind::all_to_all, .dtype = input.dtype(), .input = bytes_of(input), .output = bytes_of(output)};
  call.counts.assign(send_counts.begin(), send_counts.end());
  call.receive_counts.assign(receive_counts.begin(), receive_counts.end());
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work ThreadsCommunicator::broadcast(TensorView data, int root, const CommOptions& options) {
  TANDEM_CHECK(root >= 0 && root < size(), fmt::format("root {} of {} ranks", root, size()));
  Call call{.kind = CallKind::broadcast, .dtype = data.dtype(), .input = bytes_of(data), .output = bytes_of(data)};
  call.elements = data.num_elements();
  call.root = root;
  call.options = options;
  return Work(endpoint_->issue(std::move(call)));
}

Work ThreadsCommunicator::send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) {
  return post(data, to, Message::Direction::send, envelope, options);
}

Work ThreadsCommunicator::recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) {
  return post(data, from, Message::Direction::recv, expected, options);
}

Work ThreadsCommunicator::post(TensorView data, int peer, Message::Direction direction, const Envelope& envelope,
                               const CommOptions& options) {
  TANDEM_CHECK(peer >= 0 && peer < size(), fmt::format("rank {} of {} ranks", peer, size()));
  auto message = std::make_shared<Message>();
  message->direction = direction;
  message->rank = rank();
  message->peer = peer;
  message->data = bytes_of(data);
  message->elements = data.num_elements();
  message->dtype = data.dtype();
  message->envelope = envelope;
  message->options = options;
  return Work(endpoint_->issue(std::move(message)));
}

void ThreadsCommunicator::barrier() {
  Call call{.kind = CallKind::barrier};
  call.options.progress = Progress::on_wait;
  Work(endpoint_->issue(std::move(call))).wait_host();
}

std::unique_ptr<Communicator> ThreadsCommunicator::split(int colour, int key) {
  Call call{.kind = CallKind::split, .colour = colour, .key = key};
  call.options.progress = Progress::on_wait;
  const std::shared_ptr<CollectiveState> state = endpoint_->issue(std::move(call));
  Work(state).wait_host();
  auto part = std::make_unique<ThreadsCommunicator>(std::move(state->call().new_group), state->call().new_rank);
  part->set_timeline(endpoint_->timeline());
  return part;
}

void ThreadsCommunicator::abort(std::string_view reason) noexcept {
  Group& group = endpoint_->group();
  const int world_rank = group.members()[static_cast<std::size_t>(rank())];
  group.world().fail({Failure::Kind::peer, world_rank, fmt::format("rank {} aborted: {}", world_rank, reason)});
}

}  // namespace tandem
