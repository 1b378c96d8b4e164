// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_work.h"

#include <sstream>

#include <fmt/format.h>

namespace tandem {
namespace {

Span span_of(const CommOptions& options, std::string name, std::int64_t bytes) {
  Span span;
  span.name = std::move(name);
  span.activity = Activity::transfer;
  span.purpose = options.purpose;
  span.lane = Lane::communication;
  span.bytes = bytes;
  span.step = options.step;
  return span;
}

void write_copy(const NcclBuffer& buffer, Memory& lane) {
  if (!buffer.host.empty()) lane.write(buffer.host.data(), buffer.device, std::ssize(buffer.host));
}

// What the receiver must expect, in one line; the name last.
std::string to_text(const MessageCall& call) {
  const Envelope& envelope = call.envelope;
  return fmt::format("{} {} {} {} {} {} {}", envelope.step, envelope.micro_batch, envelope.chunk, envelope.direction,
                     call.elements, static_cast<int>(call.dtype), call.options.name);
}

// The same message as its sender sees it, from the receiver's point of view.
MessageCall sent_by(const MessageCall& received, const std::string& text) {
  MessageCall sent;
  sent.direction = MessageCall::Direction::send;
  sent.rank = received.peer;
  sent.peer = received.rank;
  std::istringstream words(text);
  int dtype = 0;
  Envelope& envelope = sent.envelope;
  words >> envelope.step >> envelope.micro_batch >> envelope.chunk >> envelope.direction >> sent.elements >> dtype;
  words.get();
  sent.dtype = static_cast<DType>(dtype);
  std::getline(words, sent.options.name, '\0');
  return sent;
}

}  // namespace

NcclCollective::NcclCollective(std::shared_ptr<NcclEndpoint> endpoint, std::shared_ptr<FlightLog> log, std::uint64_t number,
                               Call call, Call carried, NcclBuffer input, NcclBuffer output)
    : endpoint_(std::move(endpoint)),
      log_(std::move(log)),
      number_(number),
      call_(std::move(call)),
      carried_(std::move(carried)),
      input_(input),
      output_(output),
      parts_(endpoint_->here().take_scratch(parts_bytes(carried_, endpoint_->rank(), endpoint_->size()))) {}

bool NcclCollective::issue(int step, const NcclUse& use) {
  if (step == 0) write_copy(input_, use.lane);
  const NcclBuffers buffers{input_.device, output_.device, parts_.data};
  return issue_collective(endpoint_->here().nccl(), carried_, endpoint_->rank(), endpoint_->size(), buffers, use, step);
}

void NcclCollective::begun() {
  if (log_) log_->collective_arrived(call_, false);
}

void NcclCollective::finished(const std::shared_ptr<Memory::Mark>& begin, const std::shared_ptr<Memory::Mark>& end) {
  if (log_) log_->collective_finished(FlightState::done);
  endpoint_->here().give_back(std::exchange(parts_, {}));
  if (endpoint_->size() == 1) return;
  endpoint_->keep_span(span_of(call_.options, describe(call_), wire_bytes(call_, endpoint_->rank(), endpoint_->size())), begin,
                       end);
}

NcclMessage::NcclMessage(std::shared_ptr<NcclEndpoint> endpoint, std::shared_ptr<FlightLog> log, std::uint64_t number,
                         std::uint64_t group, MessageCall call, NcclBuffer buffer)
    : endpoint_(std::move(endpoint)),
      log_(std::move(log)),
      number_(number),
      subject_(fmt::format("header {}", group)),
      call_(std::move(call)),
      buffer_(buffer) {}

void NcclMessage::announce() const { endpoint_->here().tell(peer(), subject_, to_text(call_)); }

void NcclMessage::wait_begins() {
  waits_since_ns_ = Timeline::now_ns();
  if (log_) log_->message_changed(number_, FlightState::arrived);
}

std::optional<Clock::duration> NcclMessage::waited() const {
  const std::int64_t since_ns = waits_since_ns_.load();
  if (since_ns == 0) return std::nullopt;
  return std::chrono::nanoseconds(Timeline::now_ns() - since_ns);
}

bool NcclMessage::may_begin() {
  if (call_.sends()) return true;
  const std::optional<std::string> text = endpoint_->here().take(peer(), subject_);
  if (!text) return false;
  const MessageCall sent = sent_by(call_, *text);
  if (sent.envelope == call_.envelope && sent.elements == call_.elements && sent.dtype == call_.dtype) return true;
  endpoint_->fail_contract(describe_mismatch(sent, call_, endpoint_->members()));
  return false;
}

bool NcclMessage::issue(int step, const NcclUse& use) {
  if (step > 0 || call_.elements == 0) return false;
  const NcclFunctions& nccl = endpoint_->here().nccl();
  const auto size = static_cast<std::size_t>(call_.size_bytes());
  // Of the two members of the channel the sender is the first.
  if (call_.sends()) {
    write_copy(buffer_, use.lane);
    require_nccl(nccl, nccl.send(buffer_.device, size, ncclUint8, 1, use.comm, use.stream), "ncclSend", use.comm);
  } else {
    require_nccl(nccl, nccl.recv(buffer_.device, size, ncclUint8, 0, use.comm, use.stream), "ncclRecv", use.comm);
  }
  return true;
}

void NcclMessage::finished(const std::shared_ptr<Memory::Mark>& begin, const std::shared_ptr<Memory::Mark>& end) {
  if (log_) log_->message_changed(number_, FlightState::done);
  endpoint_->keep_span(span_of(call_.options, what(), call_.sends() ? call_.size_bytes() : 0), begin, end);
}

bool NcclSplit::issue(int step, const NcclUse& use) {
  if (step > 0) {
    part_.adopt();
    return false;
  }
  const NcclFunctions& nccl = endpoint_->here().nccl();
  require_nccl(nccl, nccl.split(use.comm, colour_, key_, part_.place_for_split(), nullptr), "ncclCommSplit", use.comm);
  return true;
}

void NcclSplit::look(std::chrono::nanoseconds waited) {
  WorldState& world = endpoint_->world();
  if (waited < world.deadline() || world.failed()) return;
  world.fail({Failure::Kind::timeout, endpoint_->world_rank(),
              fmt::format("rank {} waited {} ms for NCCL to split a communicator of {} ranks", endpoint_->world_rank(),
                          world.deadline().count(), endpoint_->size())});
}

}  // namespace tandem
