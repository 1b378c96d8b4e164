// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/shared_group.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/timeline.h"

namespace tandem {
namespace {

constexpr std::uint64_t kSpoiled = std::uint64_t{1} << 63;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

}  // namespace

SharedGroup::SharedGroup(std::shared_ptr<WorldState> world, std::vector<int> members)
    : world_(std::move(world)),
      members_(std::move(members)),
      id_(world_->next_group()),
      seats_(members_.size()),
      calls_(members_.size()),
      plan_(static_cast<int>(members_.size())),
      mailbox_(*world_, members_) {}

void SharedGroup::run(int rank, Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times) {
  if (times != nullptr) times->begin_ns = Timeline::now_ns();
  if (world_->failed()) world_->throw_failure(describe(call));
  Seat& seat = seats_[at(rank)];
  const std::uint64_t index = seat.arrived.load(std::memory_order_relaxed);
  const std::uint64_t everybody = (index + 1) * members_.size();
  seat.call = &call;
  seat.arrived.store(index + 1);
  const bool is_last = arrivals_.fetch_add(1) + 1 == everybody;
  if (!is_last) wait_until_open(index, rank, foreground, cancelled);
  if (times != nullptr) times->opened_ns = Timeline::now_ns();
  if (is_last) open(index, rank);
  if (completed_.load() <= index) {
    if (plan_.work(rank)) complete(index);
    // A failure does not end this wait: others work on this rank's buffers.
    (void)parking_.wait([&] { return completed_.load() > index; }, kNoDeadline, world_->patience(foreground));
  }
  if (broken_.load()) world_->throw_failure(describe(call));
  if (times != nullptr) times->end_ns = Timeline::now_ns();
}

void SharedGroup::wake() noexcept {
  parking_.wake();
  mailbox_.wake();
}

void SharedGroup::open(std::uint64_t index, int rank) {
  for (std::size_t i = 0; i < seats_.size(); ++i) calls_[i] = seats_[i].call;
  try {
    check_calls();
    make_groups();
  } catch (const std::exception& error) {
    arrivals_.fetch_or(kSpoiled);
    world_->fail({Failure::Kind::contract, members_[at(rank)], error.what()});
    parking_.wake();
    throw;
  }
  plan_.prepare({calls_.data(), calls_.size()});
  if (Memory* const lane = lane_for(rank)) return carry_out_on(*lane, index, rank);
  if (plan_.small()) {
    (void)plan_.work(rank);
    complete(index);
    return;
  }
  opened_.store(index + 1);
  parking_.wake();
}

// A rank without elements has none; until the operation is complete those of the others are not used for anything else.
Memory* SharedGroup::lane_for(int rank) const noexcept {
  if (const DeviceUse& own = calls_[at(rank)]->device) return own.lane.get();
  for (const Call* call : calls_) {
    if (call->device) return call->device.lane.get();
  }
  return nullptr;
}

void SharedGroup::carry_out_on(Memory& lane, std::uint64_t index, int rank) {
  opened_.store(index + 1);
  parking_.wake();
  try {
    plan_.work_in(lane);
  } catch (...) {
    world_->fail_by_device(members_[at(rank)]);
    broken_.store(true);
    complete(index);
    throw;
  }
  complete(index);
}

void SharedGroup::check_calls() {
  const std::vector<const Call*> calls(calls_.begin(), calls_.end());
  if (const auto mismatch = find_mismatch(calls, members_)) throw ContractError(*mismatch);
  if (const auto mixed = find_mixed_memory(calls, members_)) throw ContractError(*mixed);
}

void SharedGroup::make_groups() {
  if (calls_[0]->kind != CallKind::split) return;
  std::map<int, std::vector<int>> seats_of_colour;
  for (int seat = 0; seat < size(); ++seat) seats_of_colour[calls_[at(seat)]->colour].push_back(seat);
  for (auto& [colour, seats] : seats_of_colour) {
    std::stable_sort(seats.begin(), seats.end(), [&](int a, int b) { return calls_[at(a)]->key < calls_[at(b)]->key; });
    std::vector<int> members;
    for (const int seat : seats) members.push_back(members_[at(seat)]);
    const auto group = make_shared_group(world_, members);
    for (std::size_t i = 0; i < seats.size(); ++i) calls_[at(seats[i])]->new_group = group[i];
  }
}

void SharedGroup::complete(std::uint64_t index) noexcept {
  completed_.store(index + 1);
  parking_.wake();
}

void SharedGroup::wait_until_open(std::uint64_t index, int rank, bool foreground, const std::atomic<bool>& cancelled) {
  const auto ready = [&] {
    if (is_open(index) || world_->failed() || cancelled.load()) return true;
    return world_->any_ended() && ended_seat(index) >= 0;
  };
  const bool in_time = parking_.wait(ready, world_->deadline_from_now(), world_->patience(foreground));
  if (is_open(index)) return;
  if (!withdraw(index)) return;

  const std::string what = describe(*seats_[at(rank)].call);
  const int own = members_[at(rank)];
  if (cancelled.load()) {
    seats_[at(rank)].arrived.store(index);  // whoever waits for it must name this rank
    throw ContractError(fmt::format("rank {} cancelled {}", own, what));
  }
  if (const int seat = ended_seat(index); seat >= 0) {
    const int ended = members_[at(seat)];
    world_->fail({Failure::Kind::peer, ended, fmt::format("rank {} has ended without joining rank {} in {}", ended, own, what)});
  } else if (!in_time) {
    std::vector<int> missing = missing_seats(index);
    for (int& member : missing) member = members_[at(member)];
    world_->fail({Failure::Kind::timeout, own,
                  fmt::format("rank {} waited {} ms in {} for rank{} {}: {}", own, world_->deadline().count(), what,
                              missing.size() == 1 ? "" : "s", fmt::join(missing, ", "),
                              describe_last(world_->flights(), missing, world_->ranks()))});
  }
  world_->throw_failure(what);
}

// True: the operation will never open. False: it is open.
bool SharedGroup::withdraw(std::uint64_t index) {
  const std::uint64_t everybody = (index + 1) * members_.size();
  std::uint64_t arrivals = arrivals_.load();
  while ((arrivals & kSpoiled) == 0 && arrivals < everybody) {
    if (arrivals_.compare_exchange_weak(arrivals, arrivals | kSpoiled)) return true;
  }
  if ((arrivals & kSpoiled) != 0) return true;
  // The last rank is checking the calls: it will open the operation or spoil it.
  (void)parking_.wait([&] { return is_open(index) || (arrivals_.load() & kSpoiled) != 0; }, kNoDeadline, world_->patience(true));
  return !is_open(index);
}

std::vector<int> SharedGroup::missing_seats(std::uint64_t index) const {
  std::vector<int> missing;
  for (int seat = 0; seat < size(); ++seat) {
    if (seats_[at(seat)].arrived.load() <= index) missing.push_back(seat);
  }
  return missing;
}

int SharedGroup::ended_seat(std::uint64_t index) const noexcept {
  for (int seat = 0; seat < size(); ++seat) {
    // In this order: what a rank arrived at before it ended counts.
    if (world_->ended(members_[at(seat)]) && seats_[at(seat)].arrived.load() <= index) return seat;
  }
  return -1;
}

SharedSeat::SharedSeat(std::shared_ptr<SharedGroup> group, int rank)
    : Group(group->world(), group->id(), group->members(), rank), group_(std::move(group)) {}

std::int64_t SharedSeat::run(Call& call, bool foreground, const std::atomic<bool>& cancelled, PhaseTimes* times) {
  group_->run(rank(), call, foreground, cancelled, times);
  return wire_bytes(call, rank(), size());
}

Group::Posted SharedSeat::post(MessageCall call) {
  auto message = std::make_shared<MailboxMessage>(group_->mailbox(), std::move(call));
  const bool paired = group_->mailbox().post(message);
  return {std::move(message), paired};
}

std::vector<std::shared_ptr<Group>> make_shared_group(const std::shared_ptr<WorldState>& world, const std::vector<int>& members) {
  const auto group = std::make_shared<SharedGroup>(world, members);
  world->add_sleepers(group);
  std::vector<std::shared_ptr<Group>> seats;
  for (int rank = 0; rank < group->size(); ++rank) seats.push_back(std::make_shared<SharedSeat>(group, rank));
  return seats;
}

}  // namespace tandem
