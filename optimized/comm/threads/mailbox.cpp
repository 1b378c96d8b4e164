// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"

namespace tandem {
namespace {

using Phase = Message::Phase;

std::string describe(const Envelope& envelope) {
  return fmt::format("step {}, micro-batch {}, chunk {}, {}", envelope.step, envelope.micro_batch, envelope.chunk,
                     envelope.direction == 0 ? "forward" : "backward");
}

}  // namespace

std::string describe(const Message& message, const std::vector<int>& members) {
  const bool sends = message.direction == Message::Direction::send;
  const int own = members[static_cast<std::size_t>(message.rank)];
  const int peer = members[static_cast<std::size_t>(message.peer)];
  return fmt::format("{}{} of {} {} from rank {} to rank {} ({})", sends ? "send" : "recv",
                     message.options.name.empty() ? "" : fmt::format(" '{}'", message.options.name), message.elements,
                     name(message.dtype), sends ? own : peer, sends ? peer : own, describe(message.envelope));
}

Mailbox::Mailbox(ThreadsWorld& world, const std::vector<int>& members)
    : world_(world), members_(members), channels_(members.size() * members.size()) {}

Mailbox::Channel& Mailbox::channel(const Message& message) noexcept {
  const bool sends = message.direction == Message::Direction::send;
  const auto from = static_cast<std::size_t>(sends ? message.rank : message.peer);
  const auto to = static_cast<std::size_t>(sends ? message.peer : message.rank);
  return channels_[from * members_.size() + to];
}

bool Mailbox::post(const std::shared_ptr<Message>& message) {
  {
    const std::scoped_lock lock(mutex_);
    Channel& pair = channel(*message);
    const bool sends = message->direction == Message::Direction::send;
    auto& own = sends ? pair.sends : pair.receives;
    auto& others = sends ? pair.receives : pair.sends;
    if (others.empty()) {
      own.push_back(message);
      return false;
    }
    message->other = std::move(others.front());
    others.pop_front();
    message->other->other = message;
    check_pair(sends ? *message : *message->other, sends ? *message->other : *message);
  }
  parking_.wake();
  return true;
}

void Mailbox::check_pair(Message& send, Message& recv) {
  const bool agree = send.envelope == recv.envelope && send.elements == recv.elements && send.dtype == recv.dtype;
  if (!agree) {
    send.mismatch = recv.mismatch =
        fmt::format("message is not the expected one: {} meets {}", describe(send, members_), describe(recv, members_));
    send.other.reset();
    recv.other.reset();
  }
  send.phase.store(agree ? Phase::matched : Phase::done);
  recv.phase.store(agree ? Phase::matched : Phase::done);
}

bool Mailbox::try_copy(const std::shared_ptr<Message>& message) {
  std::shared_ptr<Message> other;
  {
    const std::scoped_lock lock(mutex_);
    if (message->phase.load() != Phase::matched) return false;
    other = message->other;
    message->phase.store(Phase::copying);
    other->phase.store(Phase::copying);
  }
  Message& send = message->direction == Message::Direction::send ? *message : *other;
  Message& recv = message->direction == Message::Direction::send ? *other : *message;
  const std::int64_t begin_ns = Timeline::now_ns();
  if (send.elements > 0) std::memcpy(recv.data, send.data, static_cast<std::size_t>(send.elements) * size_bytes(send.dtype));
  const std::int64_t end_ns = Timeline::now_ns();
  {
    const std::scoped_lock lock(mutex_);
    for (Message* end : {&send, &recv}) {
      end->copy_begin_ns = begin_ns;
      end->copy_end_ns = end_ns;
      end->other.reset();
      end->phase.store(Phase::done);
    }
  }
  parking_.wake();
  return true;
}

bool Mailbox::wait(const std::shared_ptr<Message>& message) {
  const auto peer = members_[static_cast<std::size_t>(message->peer)];
  const auto ready = [&] { return message->phase.load() != Phase::posted || world_.failed() || world_.ended(peer); };
  const bool in_time = parking_.wait(ready, world_.deadline_from_now(), world_.patience(true));
  if (message->phase.load() == Phase::posted && withdraw(message)) give_up(*message, in_time);

  const bool copied = try_copy(message);
  if (!copied) wait_until_copied(*message);
  if (!message->mismatch.empty()) {
    world_.fail({Failure::Kind::contract, members_[static_cast<std::size_t>(message->rank)], message->mismatch});
    throw ContractError(message->mismatch);
  }
  return copied;
}

void Mailbox::wait_until_copied(const Message& message) {
  (void)parking_.wait([&] { return message.phase.load() == Phase::done; }, kNoDeadline, world_.patience(true));
}

bool Mailbox::withdraw(const std::shared_ptr<Message>& message) {
  const std::scoped_lock lock(mutex_);
  Channel& pair = channel(*message);
  auto& own = message->direction == Message::Direction::send ? pair.sends : pair.receives;
  return std::erase(own, message) > 0;
}

void Mailbox::give_up(const Message& message, bool in_time) {
  const int own = members_[static_cast<std::size_t>(message.rank)];
  const int peer = members_[static_cast<std::size_t>(message.peer)];
  const std::string what = describe(message, members_);
  if (!in_time) {
    world_.fail({Failure::Kind::timeout, own,
                 fmt::format("rank {} waited {} ms in {} for rank {}", own, world_.deadline().count(), what, peer)});
  } else if (!world_.failed()) {
    world_.fail({Failure::Kind::peer, peer, fmt::format("rank {} has ended without joining rank {} in {}", peer, own, what)});
  }
  world_.throw_failure(what);
}

void Mailbox::cancel(const std::shared_ptr<Message>& message) noexcept {
  if (withdraw(message)) return;
  if (!try_copy(message)) wait_until_copied(*message);
}

void Mailbox::wake() noexcept { parking_.wake(); }

}  // namespace tandem
