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

using Phase = MailboxMessage::Phase;

void move_bytes(const MessageCall& send, const MessageCall& recv) {
  const std::int64_t bytes = send.size_bytes();
  if (bytes == 0) return;
  if (!recv.device) {
    std::memcpy(recv.data, send.data, static_cast<std::size_t>(bytes));
    return;
  }
  Memory& lane = *recv.device.lane;
  for (const auto& ready : {send.device.ready, recv.device.ready}) {
    if (ready) lane.begin_after(*ready);
  }
  lane.copy(send.data, recv.data, bytes);
  if (recv.device.ready) lane.synchronize();
}

}  // namespace

void MailboxMessage::advance() noexcept { (void)mailbox_.try_copy(shared_from_this()); }

MessageTimes MailboxMessage::wait() {
  const bool copied_here = mailbox_.wait(shared_from_this());
  return {copied_here, copy_begin_ns_, copy_end_ns_};
}

void MailboxMessage::cancel() noexcept { mailbox_.cancel(shared_from_this()); }

Mailbox::Mailbox(WorldState& world, const std::vector<int>& members)
    : world_(world), members_(members), channels_(members.size() * members.size()) {}

Mailbox::Channel& Mailbox::channel(const MessageCall& call) noexcept {
  const auto from = static_cast<std::size_t>(call.sends() ? call.rank : call.peer);
  const auto to = static_cast<std::size_t>(call.sends() ? call.peer : call.rank);
  return channels_[from * members_.size() + to];
}

bool Mailbox::post(const Entry& message) {
  {
    const std::scoped_lock lock(mutex_);
    Channel& pair = channel(message->call());
    const bool sends = message->call().sends();
    auto& own = sends ? pair.sends : pair.receives;
    auto& others = sends ? pair.receives : pair.sends;
    if (others.empty()) {
      own.push_back(message);
      return false;
    }
    message->other_ = std::move(others.front());
    others.pop_front();
    message->other_->other_ = message;
    check_pair(sends ? *message : *message->other_, sends ? *message->other_ : *message);
  }
  parking_.wake();
  return true;
}

void Mailbox::check_pair(MailboxMessage& send, MailboxMessage& recv) {
  const MessageCall& sent = send.call();
  const MessageCall& expected = recv.call();
  const bool agree = sent.envelope == expected.envelope && sent.elements == expected.elements && sent.dtype == expected.dtype;
  const bool apart = sent.size_bytes() > 0 && sent.device.place() != expected.device.place();
  if (!agree || apart) {
    send.mismatch_ = recv.mismatch_ = agree ? fmt::format("buffers of {} lie apart: the sender's in {}, the receiver's in {}",
                                                          describe(sent, members_), sent.device.place(), expected.device.place())
                                            : describe_mismatch(sent, expected, members_);
    send.other_.reset();
    recv.other_.reset();
  }
  const Phase phase = send.mismatch_.empty() ? Phase::matched : Phase::done;
  send.phase_.store(phase);
  recv.phase_.store(phase);
}

bool Mailbox::try_copy(const Entry& message) {
  Entry other;
  {
    const std::scoped_lock lock(mutex_);
    if (message->phase_.load() != Phase::matched) return false;
    other = message->other_;
    message->phase_.store(Phase::copying);
    other->phase_.store(Phase::copying);
  }
  MailboxMessage& send = message->call().sends() ? *message : *other;
  MailboxMessage& recv = message->call().sends() ? *other : *message;
  const std::int64_t begin_ns = Timeline::now_ns();
  std::exception_ptr error;
  try {
    move_bytes(send.call(), recv.call());
  } catch (...) {
    world_.fail_by_device(members_[static_cast<std::size_t>(recv.call().rank)]);
    error = std::current_exception();
  }
  const std::int64_t end_ns = Timeline::now_ns();
  {
    const std::scoped_lock lock(mutex_);
    for (MailboxMessage* end : {&send, &recv}) {
      end->error_ = error;
      end->copy_begin_ns_ = begin_ns;
      end->copy_end_ns_ = end_ns;
      end->other_.reset();
      end->phase_.store(Phase::done);
    }
  }
  parking_.wake();
  return true;
}

bool Mailbox::wait(const Entry& message) {
  const auto peer = members_[static_cast<std::size_t>(message->call().peer)];
  const auto ready = [&] { return message->phase_.load() != Phase::posted || world_.failed() || world_.ended(peer); };
  // Not for ever, so that what plants it ends.
  const int deadlines = world_.pitfalls().on(Pitfall::messages_without_deadline) ? 24 : 1;
  const bool in_time = parking_.wait(ready, Clock::now() + deadlines * world_.deadline(), world_.patience(true));
  if (message->phase_.load() == Phase::posted && withdraw(message)) give_up(*message, in_time);

  const bool copied = try_copy(message);
  if (!copied) wait_until_copied(*message);
  if (!message->mismatch_.empty()) {
    world_.fail({Failure::Kind::contract, members_[static_cast<std::size_t>(message->call().rank)], message->mismatch_});
    throw ContractError(message->mismatch_);
  }
  if (message->error_) std::rethrow_exception(message->error_);
  return copied;
}

void Mailbox::wait_until_copied(const MailboxMessage& message) {
  (void)parking_.wait([&] { return message.phase_.load() == Phase::done; }, kNoDeadline, world_.patience(true));
}

bool Mailbox::withdraw(const Entry& message) {
  const std::scoped_lock lock(mutex_);
  Channel& pair = channel(message->call());
  auto& own = message->call().sends() ? pair.sends : pair.receives;
  return std::erase(own, message) > 0;
}

void Mailbox::give_up(const MailboxMessage& message, bool in_time) {
  const int own = members_[static_cast<std::size_t>(message.call().rank)];
  const int peer = members_[static_cast<std::size_t>(message.call().peer)];
  const std::string what = describe(message.call(), members_);
  if (!in_time) {
    world_.fail({Failure::Kind::timeout, own,
                 fmt::format("rank {} waited {} ms in {} for rank {}: {}", own, world_.deadline().count(), what, peer,
                             describe_last(world_.flights(), {peer}, world_.ranks()))});
  } else if (!world_.failed()) {
    world_.fail({Failure::Kind::peer, peer, fmt::format("rank {} has ended without joining rank {} in {}", peer, own, what)});
  }
  world_.throw_failure(what);
}

void Mailbox::cancel(const Entry& message) noexcept {
  if (withdraw(message)) return;
  if (!try_copy(message)) wait_until_copied(*message);
}

void Mailbox::wake() noexcept { parking_.wake(); }

}  // namespace tandem
