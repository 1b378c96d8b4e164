// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/message_group.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/io/hash.h"
#include "core/timeline.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/threads/shared_group.h"

namespace tandem {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

std::optional<CollectiveKind> collective_kind(CallKind kind) {
  switch (kind) {
    case CallKind::all_reduce: return CollectiveKind::all_reduce;
    case CallKind::reduce_scatter: return CollectiveKind::reduce_scatter;
    case CallKind::all_gather: return CollectiveKind::all_gather;
    case CallKind::all_to_all: return CollectiveKind::all_to_all;
    case CallKind::broadcast: return CollectiveKind::broadcast;
    case CallKind::barrier:
    case CallKind::split: break;
  }
  return std::nullopt;
}

std::int64_t sum(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::span<std::byte> bytes_at(std::byte* begin, std::int64_t elements, DType dtype) {
  return {begin, static_cast<std::size_t>(elements) * size_bytes(dtype)};
}

// The whole tensor of a call, as expected_seconds() counts it.
std::int64_t whole_bytes(const Call& call) {
  const std::int64_t elements = call.counts.empty() ? call.elements : sum(call.counts);
  return elements * static_cast<std::int64_t>(size_bytes(call.dtype));
}

// Groups of different colours may have the same number, but no member in common.
std::uint64_t id_of(std::uint32_t number, const std::vector<int>& members) {
  return (std::uint64_t{number} << 32) | static_cast<std::uint64_t>(members.front());
}

int ranks_per_node(const WorldSettings& settings) { return settings.link ? settings.link->ranks_per_node : 1; }

// A message between two ranks, on a wire. The mutex: its rank waits while its progress thread looks.
class WireMessage final : public PostedMessage {
 public:
  WireMessage(std::shared_ptr<MessageGroup> group, MessageCall call, std::unique_ptr<Transfer> transfer)
      : PostedMessage(std::move(call)), group_(std::move(group)), transfer_(std::move(transfer)) {}

  [[nodiscard]] bool done() const noexcept override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && is_complete();
  }
  void advance() noexcept override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) (void)is_complete();
  }
  MessageTimes wait() override {
    const std::scoped_lock lock(mutex_);
    const std::int64_t begin_ns = Timeline::now_ns();
    try {
      group_->wait_for(*transfer_, {.peer = call_.peer, .message = &call_});
    } catch (...) {
      transfer_->cancel();
      throw;
    }
    return {true, begin_ns, Timeline::now_ns()};
  }
  void cancel() noexcept override {
    const std::scoped_lock lock(mutex_);
    transfer_->cancel();
  }

 private:
  [[nodiscard]] bool is_complete() const noexcept {
    try {
      return transfer_->test();
    } catch (...) {
      return true;  // wait() will say what it is
    }
  }

  mutable std::mutex mutex_;
  const std::shared_ptr<MessageGroup> group_;
  const std::unique_ptr<Transfer> transfer_;
};

}  // namespace

MessageGroup::MessageGroup(std::shared_ptr<MessageRank> here, std::uint32_t number, const std::vector<int>& members, int rank)
    : Group(here->world, id_of(number, members), members, rank),
      here_(std::move(here)),
      channel_(2 * number),
      peers_(*this, *here_->wire, channel_, ranks_per_node(here_->settings)) {}

std::int64_t MessageGroup::run(Call& call, bool, const std::atomic<bool>& cancelled, PhaseTimes* times) {
  const std::int64_t begin_ns = Timeline::now_ns();
  if (world().failed()) world().throw_failure(tandem::describe(call));
  ++number_;
  here_->wire->begin_collective(channel_, call.issued_ns != 0 ? call.issued_ns : begin_ns);
  peers_.begin(call, mark_of(call), cancelled);
  try {
    carry_out(call);
  } catch (...) {
    (void)peers_.end();
    throw;
  }
  const std::int64_t bytes = peers_.end();
  if (times != nullptr) {
    const std::int64_t end_ns = Timeline::now_ns();
    const std::int64_t opened_ns = world().recorder().last_arrival_ns(id(), number_);
    *times = {begin_ns, std::clamp(opened_ns, begin_ns, end_ns), end_ns};
  }
  return bytes;
}

void MessageGroup::carry_out(Call& call) {
  const CollectiveAlgorithm algorithm = algorithm_of(call);
  const std::int64_t own = call.counts.empty() ? 0 : call.counts[at(rank())];
  switch (call.kind) {
    case CallKind::all_reduce:
      return tandem::all_reduce(peers_, algorithm, call.dtype, bytes_at(call.input, call.elements, call.dtype));
    case CallKind::reduce_scatter:
      return tandem::reduce_scatter(peers_, algorithm, call.dtype, bytes_at(call.input, sum(call.counts), call.dtype),
                                    bytes_at(call.output, own, call.dtype), call.counts);
    case CallKind::all_gather:
      return tandem::all_gather(peers_, algorithm, call.dtype, bytes_at(call.input, own, call.dtype),
                                bytes_at(call.output, sum(call.counts), call.dtype), call.counts);
    case CallKind::all_to_all:
      return tandem::all_to_all(peers_, algorithm, call.dtype, bytes_at(call.input, sum(call.counts), call.dtype), call.counts,
                                bytes_at(call.output, sum(call.receive_counts), call.dtype), call.receive_counts);
    case CallKind::broadcast:
      return tandem::broadcast(peers_, algorithm, bytes_at(call.input, call.elements, call.dtype), call.root);
    case CallKind::barrier: return tandem::barrier(peers_);
    case CallKind::split: return split(call);
  }
}

// Every rank of the new groups gets one number, larger than that of any group that a member belongs to. Groups of different
// colours have no rank in common and may have the same.
void MessageGroup::split(Call& call) {
  struct Wish {
    std::int64_t colour, key, next_group;
  };
  std::vector<Wish> wishes(static_cast<std::size_t>(size()));
  Wish own = {call.colour, call.key, here_->next_group.load()};
  const std::vector<std::int64_t> counts(wishes.size(), 3);
  tandem::all_gather(peers_, CollectiveAlgorithm::direct, DType::i64, std::as_writable_bytes(std::span(&own, 1)),
                     std::as_writable_bytes(std::span(wishes)), counts);

  const std::int64_t number = std::ranges::max(wishes, {}, &Wish::next_group).next_group;
  here_->next_group.store(static_cast<std::uint32_t>(number + 1));
  std::vector<int> places;
  for (int rank = 0; rank < size(); ++rank) {
    if (wishes[at(rank)].colour == call.colour) places.push_back(rank);
  }
  std::ranges::stable_sort(places, {}, [&](int rank) { return wishes[at(rank)].key; });
  std::vector<int> new_members;
  for (const int place : places) new_members.push_back(members()[at(place)]);
  if (new_members.size() == 1) {
    call.new_group = make_shared_group(here_->world, new_members).front();
    return;
  }
  const auto own_place = static_cast<int>(std::ranges::find(places, rank()) - places.begin());
  call.new_group = std::make_shared<MessageGroup>(here_, static_cast<std::uint32_t>(number), new_members, own_place);
}

CollectiveAlgorithm MessageGroup::algorithm_of(const Call& call) const {
  const CollectiveAlgorithm algorithm = call.options.algorithm.value_or(here_->settings.algorithm);
  const auto kind = collective_kind(call.kind);
  if (algorithm != CollectiveAlgorithm::automatic || !kind) return algorithm;
  return choose_algorithm(*kind, whole_bytes(call), size(), here_->link);
}

// Counts of an all_to_all differ by rank; the wire compares them pair by pair.
std::uint64_t MessageGroup::mark_of(const Call& call) const {
  std::vector<std::int64_t> words = {static_cast<std::int64_t>(number_), static_cast<std::int64_t>(call.kind),
                                     call.options.algorithm ? static_cast<std::int64_t>(*call.options.algorithm) : -1};
  if (call.kind != CallKind::barrier && call.kind != CallKind::split) {
    words.insert(words.end(), {static_cast<std::int64_t>(call.dtype), call.elements, call.root});
    if (call.kind != CallKind::all_to_all) words.insert(words.end(), call.counts.begin(), call.counts.end());
  }
  return hash64(std::as_bytes(std::span(words)));
}

Group::Posted MessageGroup::post(MessageCall call) {
  const std::span<std::byte> bytes = bytes_at(call.data, call.elements, call.dtype);
  const int peer = members()[at(call.peer)];
  const int from = call.sends() ? call.rank : call.peer;
  const Envelope& envelope = call.envelope;
  const auto words = std::to_array<std::int64_t>(
      {from, call.sends() ? call.peer : call.rank, static_cast<std::int64_t>(call.ordinal), static_cast<std::int64_t>(call.dtype),
       call.elements, envelope.step, envelope.micro_batch, envelope.chunk, envelope.direction});
  const std::uint64_t mark = hash64(std::as_bytes(std::span(words)));
  auto transfer =
      call.sends() ? here_->wire->send(peer, channel_ + 1, mark, bytes) : here_->wire->receive(peer, channel_ + 1, mark, bytes);
  return {std::make_shared<WireMessage>(shared_from_this(), std::move(call), std::move(transfer)), true};
}

std::string MessageGroup::describe(const Waiting& waiting) const {
  return waiting.call != nullptr ? tandem::describe(*waiting.call) : tandem::describe(*waiting.message, members());
}

void MessageGroup::wait_for(Transfer& transfer, const Waiting& waiting) {
  const Clock::time_point deadline = world().deadline_from_now();
  std::optional<Clock::time_point> ended_since;
  for (int looks = 0;; ++looks) {
    try {
      if (transfer.wait(std::min(deadline, Clock::now() + kLook))) return;
    } catch (const ContractError& error) {
      fail_contract(waiting, error.what());
    }
    look(waiting, ended_since);
    // Less often: it reads what all ranks do.
    if (looks % 4 == 0 && world().sees_all_flights() && find_disagreement(world().flights(), waiting)) fail_contract(waiting, "");
    if (Clock::now() >= deadline) time_out(waiting);
  }
}

// Throws where waiting on is of no use.
void MessageGroup::look(const Waiting& waiting, std::optional<Clock::time_point>& ended_since) {
  if (world().failed()) world().throw_failure(describe(waiting));
  if (waiting.cancelled != nullptr && waiting.cancelled->load()) {
    throw ContractError(fmt::format("rank {} cancelled {}", world_rank(), describe(waiting)));
  }
  const int peer = members()[at(waiting.peer)];
  if (!world().ended(peer)) return;
  const Clock::time_point now = Clock::now();
  if (!ended_since) ended_since = now;
  if (now - *ended_since < kGrace) return;
  world().fail({Failure::Kind::peer, peer,
                fmt::format("rank {} has ended without joining rank {} in {}", peer, world_rank(), describe(waiting))});
  world().throw_failure(describe(waiting));
}

std::optional<std::string> MessageGroup::find_disagreement(const Flights& flights, const Waiting& waiting) const {
  if (waiting.message != nullptr) {
    const Flight* const other = find_other_end(flights, id(), *waiting.message, members()[at(waiting.peer)]);
    if (other == nullptr) return std::nullopt;
    const MessageCall& one = *waiting.message;
    const bool agree =
        one.envelope == other->message.envelope && one.elements == other->message.elements && one.dtype == other->message.dtype;
    return agree ? std::nullopt : std::optional(describe_mismatch(one, other->message, members()));
  }
  std::vector<std::pair<int, const Call*>> calls;
  for (int rank = 0; rank < size(); ++rank) {
    const Flight* const flight = find_flight(flights, members()[at(rank)], id(), false, number_);
    if (flight != nullptr && flight->state != FlightState::posted) calls.emplace_back(rank, &flight->call);
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    for (std::size_t j = i + 1; j < calls.size(); ++j) {
      if (auto mismatch = find_mismatch(*calls[i].second, calls[i].first, *calls[j].second, calls[j].first, members())) {
        return mismatch;
      }
    }
  }
  return std::nullopt;
}

void MessageGroup::fail_contract(const Waiting& waiting, const std::string& of_wire) {
  std::optional<std::string> text = find_disagreement(world().flights(), waiting);
  if (!text && world().failed()) world().throw_failure(describe(waiting));
  if (!text) text = fmt::format("calls of the ranks do not match: {} (during {})", of_wire, describe(waiting));
  world().fail({Failure::Kind::contract, world_rank(), *text});
  throw ContractError(*text);
}

void MessageGroup::time_out(const Waiting& waiting) {
  const Flights flights = world().flights();
  if (find_disagreement(flights, waiting)) fail_contract(waiting, "");
  std::vector<int> missing;
  if (waiting.call != nullptr) {
    for (const int rank : missing_ranks(flights, id(), number_)) missing.push_back(rank);
  }
  if (missing.empty()) missing.push_back(members()[at(waiting.peer)]);
  world().fail(
      {Failure::Kind::timeout, world_rank(),
       fmt::format("rank {} waited {} ms in {} for rank{} {}: {}", world_rank(), world().deadline().count(), describe(waiting),
                   missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), describe_last(flights, missing, world().ranks()))});
  world().throw_failure(describe(waiting));
}

std::shared_ptr<Group> make_message_group(const std::shared_ptr<WorldState>& world, std::unique_ptr<Wire> wire,
                                          const WorldSettings& settings) {
  const int rank = wire->rank();
  std::vector<int> members(static_cast<std::size_t>(world->ranks()));
  std::iota(members.begin(), members.end(), 0);
  auto here = std::make_shared<MessageRank>();
  here->world = world;
  here->wire = std::move(wire);
  here->settings = settings;
  here->link = settings.link && settings.link->is_shaped() ? *settings.link : read_link_profile("laptop");
  return std::make_shared<MessageGroup>(std::move(here), 0, members, rank);
}

}  // namespace tandem
