// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_endpoint.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <thread>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/nccl/nccl_work.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

// How long a stream may take to come free once NCCL has been told to end.
constexpr std::chrono::milliseconds kAbortPatience{3000};
constexpr int kSpins = 200;
constexpr std::chrono::microseconds kNap{20};

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// FNV-1a of 64 bits.
void add_to_digest(std::uint64_t& digest, std::int64_t value) {
  for (int shift = 0; shift < 64; shift += 8) {
    digest = (digest ^ (static_cast<std::uint64_t>(value) >> shift & 0xFF)) * 0x100000001B3U;
  }
}

// Of what must be the same in the calls of all ranks.
void add_to_digest(std::uint64_t& digest, const Call& call) {
  add_to_digest(digest, static_cast<std::int64_t>(call.kind));
  add_to_digest(digest, static_cast<std::int64_t>(call.dtype));
  add_to_digest(digest, call.options.algorithm ? 1 + static_cast<std::int64_t>(*call.options.algorithm) : 0);
  add_to_digest(digest, call.elements);
  add_to_digest(digest, call.root);
  if (call.kind == CallKind::all_to_all) return;
  for (const std::int64_t count : call.counts) add_to_digest(digest, count);
}

void pause(int& spins) {
  if (++spins < kSpins) return std::this_thread::yield();
  std::this_thread::sleep_for(kNap);
}

}  // namespace

std::shared_ptr<NcclEndpoint> make_nccl_endpoint(const std::shared_ptr<NcclRank>& rank) {
  std::vector<int> members(at(rank->world().ranks()));
  std::iota(members.begin(), members.end(), 0);
  const auto channel = rank->add(std::make_shared<NcclChannel>(*rank, "group 0", members, rank->rank()));
  return std::make_shared<NcclEndpoint>(rank, 0, members, rank->rank(), channel);
}

NcclEndpoint::NcclEndpoint(std::shared_ptr<NcclRank> rank, std::uint64_t id, std::vector<int> members, int index,
                           std::shared_ptr<NcclChannel> channel)
    : rank_(std::move(rank)),
      id_(id),
      members_(std::move(members)),
      index_(index),
      channel_(std::move(channel)),
      log_(members_.size() == 1 ? nullptr : rank_->world().recorder().open(members_[at(index)], id_, members_)) {}

NcclEndpoint::~NcclEndpoint() = default;

bool NcclEndpoint::is_timed() const { return timeline_ != nullptr && timeline_->enabled() && size() > 1; }

// Whether the buffers lie on the device; of none at all the answer is of no importance.
bool NcclEndpoint::on_device(std::span<const std::byte> first, std::span<const std::byte> second, const std::string& what) const {
  const auto lies_there = [&](std::span<const std::byte> bytes) {
    return memory_ != nullptr && !memory_->on_host() && memory_->holds(bytes.data());
  };
  if (first.empty()) return !second.empty() && lies_there(second);
  const bool there = lies_there(first);
  TANDEM_CHECK(second.empty() || lies_there(second) == there,
               fmt::format("{}: one buffer is the host's, one the device's", what));
  return there;
}

std::shared_ptr<NcclWork> NcclEndpoint::issue(Call call) {
  require_none_dropped();
  require_possible(call);
  Call carried = call;
  return issue_collective(std::move(call), std::move(carried));
}

std::shared_ptr<NcclWork> NcclEndpoint::issue_collective(Call call, Call carried) {
  if (world().failed()) world().throw_failure(describe(call));
  record_spans();
  const CallBuffers buffers = buffers_of(carried, index_);
  const bool device = on_device(buffers.read, buffers.written, describe(call));
  NcclBuffer input{{}, {}, carried.input}, output{{}, {}, carried.output};
  std::vector<NcclRank::Scratch> copies;
  const auto make_copy = [&](NcclBuffer& buffer, std::span<std::byte> bytes) {
    buffer.host = bytes;
    buffer.copy = rank_->take_scratch(std::ssize(bytes));
    buffer.device = buffer.copy.data;
    copies.push_back(buffer.copy);
  };
  if (!device) {
    make_copy(input, buffers.read);
    make_copy(output, buffers.written);
  }
  // Whoever only sends, or only receives, has one buffer; NCCL is told the other one's address all the same.
  if (carried.kind == CallKind::broadcast && !device) {
    if (index_ == carried.root)
      output.device = input.device;
    else
      input.device = output.device;
  }
  const std::uint64_t number = ++number_;
  add_to_digest(digest_, call);
  if (log_) log_->collective_posted(number, call);
  bytes_sent_[static_cast<std::size_t>(call.options.purpose)] += wire_bytes(call, index_, size());
  const CommOptions options = call.options;
  auto operation =
      std::make_shared<NcclCollective>(shared_from_this(), log_, number, std::move(call), std::move(carried), input, output);
  auto work = std::make_shared<NcclWork>(shared_from_this(), *channel_, operation, options);
  work->is_on_host_ = !device;
  work->copies_ = std::move(copies);
  if (!device) work->result_ = output;
  channel_->issue(operation, device ? memory_->mark() : nullptr, is_timed() ? Memory::Timed::yes : Memory::Timed::no);
  return work;
}

std::shared_ptr<NcclWork> NcclEndpoint::issue(MessageCall call) {
  require_none_dropped();
  TANDEM_CHECK(call.peer != call.rank, fmt::format("{}: NCCL sends no messages to oneself", describe(call, members_)));
  if (world().failed()) world().throw_failure(describe(call, members_));
  record_spans();
  const std::span<std::byte> bytes(call.data, static_cast<std::size_t>(call.size_bytes()));
  const bool device = on_device(bytes, {}, {});
  NcclBuffer buffer{{}, {}, call.data};
  if (!device) {
    buffer.copy = rank_->take_scratch(std::ssize(bytes));
    buffer.host = bytes;
    buffer.device = buffer.copy.data;
  }
  const std::uint64_t number = log_->message_posted(call);
  const bool sends = call.sends();
  if (sends) bytes_sent_[static_cast<std::size_t>(call.options.purpose)] += call.size_bytes();
  NcclChannel& channel = sends ? message_channel(index_, call.peer) : message_channel(call.peer, index_);
  const CommOptions options = call.options;
  auto operation = std::make_shared<NcclMessage>(shared_from_this(), log_, number, id_, std::move(call), buffer);
  auto work = std::make_shared<NcclWork>(shared_from_this(), channel, operation, options);
  work->message_ = operation.get();
  work->is_on_host_ = !device;
  if (!device) work->copies_ = {buffer.copy};
  if (!device && !sends) work->result_ = buffer;
  if (sends) operation->announce();
  channel.issue(operation, device ? memory_->mark() : nullptr, is_timed() ? Memory::Timed::yes : Memory::Timed::no);
  return work;
}

NcclChannel& NcclEndpoint::message_channel(int from, int to) {
  std::shared_ptr<NcclChannel>& channel = message_channels_[{from, to}];
  if (!channel) {
    channel =
        rank_->add(std::make_shared<NcclChannel>(*rank_, fmt::format("messages {} {} {}", id_, from, to),
                                                 std::vector<int>{members_[at(from)], members_[at(to)]}, index_ == from ? 0 : 1));
  }
  return *channel;
}

// What every rank has to tell all others, equally many numbers each; logged as a call of this kind.
std::vector<std::int64_t> NcclEndpoint::gather(CallKind kind, std::vector<std::int64_t> own) {
  require_none_dropped();
  std::vector<std::int64_t> all(own.size() * at(size()));
  Call carried{.kind = CallKind::all_gather, .dtype = DType::i64};
  carried.input = reinterpret_cast<std::byte*>(own.data());
  carried.output = reinterpret_cast<std::byte*>(all.data());
  carried.counts.assign(at(size()), std::ssize(own));
  Call call{.kind = kind};
  Work(issue_collective(std::move(call), std::move(carried))).wait_host();
  return all;
}

void NcclEndpoint::barrier() {
  const auto digest = static_cast<std::int64_t>(digest_);
  compare_digests(gather(CallKind::barrier, {digest}));
}

// NCCL itself may carry out calls that do not match.
void NcclEndpoint::compare_digests(const std::vector<std::int64_t>& digests) {
  const auto other = std::find_if(digests.begin(), digests.end(), [&](std::int64_t digest) { return digest != digests[0]; });
  if (other == digests.end()) return;
  const Flights flights = world().flights();
  std::optional<std::string> text;
  for (std::uint64_t number = number_; number > 0 && number_ - number < FlightLog::kKept && !text; --number) {
    text = find_disagreement(flights, number);
  }
  fail_contract(text.value_or(
      fmt::format("calls of the ranks do not match: ranks {} and {} have issued different collectives before a barrier",
                  members_[0], members_[static_cast<std::size_t>(other - digests.begin())])));
  world().throw_failure("barrier");
}

std::shared_ptr<NcclEndpoint> NcclEndpoint::split(int colour, int key) {
  struct Entry {
    std::int64_t colour, key;
    int rank;
  };
  const auto own_next = static_cast<std::int64_t>(rank_->next_group.load());
  const std::vector<std::int64_t> all = gather(CallKind::split, {colour, key, own_next});
  std::vector<Entry> part;
  std::vector<std::int64_t> colours;
  std::int64_t first_group = 0;
  for (int rank = 0; rank < size(); ++rank) {
    const std::int64_t* const said = all.data() + 3 * at(rank);
    colours.push_back(said[0]);
    first_group = std::max(first_group, said[2]);
    if (said[0] == colour) part.push_back({said[0], said[1], rank});
  }
  std::sort(colours.begin(), colours.end());
  colours.erase(std::unique(colours.begin(), colours.end()), colours.end());
  std::stable_sort(part.begin(), part.end(), [](const Entry& a, const Entry& b) { return a.key < b.key; });
  // NCCL's own colours are never negative.
  const int place_of_colour = static_cast<int>(std::find(colours.begin(), colours.end(), colour) - colours.begin());
  rank_->next_group = static_cast<std::uint64_t>(first_group + std::ssize(colours));
  std::vector<int> members;
  int index = 0;
  for (const Entry& entry : part) {
    if (entry.rank == index_) index = static_cast<int>(members.size());
    members.push_back(members_[at(entry.rank)]);
  }
  // Added first: where the world fails meanwhile, NCCL still knows its address.
  auto child = rank_->add(std::make_shared<NcclChannel>(*rank_, members, index));
  auto operation = std::make_shared<NcclSplit>(shared_from_this(), *child, place_of_colour, index);
  NcclWork work(shared_from_this(), *channel_, operation, {});
  channel_->issue(operation, nullptr, Memory::Timed::no);
  static_cast<void>(await_taken(work));
  const auto group = static_cast<std::uint64_t>(first_group + place_of_colour);
  auto result = std::make_shared<NcclEndpoint>(rank_, group, std::move(members), index, std::move(child));
  result->timeline_ = timeline_;
  result->memory_ = memory_;
  return result;
}

void NcclEndpoint::wait(NcclWork& work) {
  if (work.message_ != nullptr) work.message_->wait_begins();
  const std::int64_t begin_ns = Timeline::now_ns();
  const std::shared_ptr<Memory::Mark> end = await_taken(work);
  if (!work.is_on_host_) {
    memory_->begin_after(*end);
  } else {
    await_device(work, *end);
    const NcclBuffer& result = work.result_;
    if (!result.host.empty()) rank_->read_behind(*end, result.device, result.host.data(), std::ssize(result.host));
    for (const NcclRank::Scratch& copy : work.copies_) rank_->give_back(copy);
    if (is_timed()) {
      timeline_->record({.name = work.operation_->what(),
                         .activity = Activity::wait,
                         .purpose = work.options_.purpose,
                         .step = work.options_.step,
                         .begin_ns = begin_ns,
                         .end_ns = Timeline::now_ns()});
    }
  }
  record_spans();
  require_none_dropped();
}

// Until NCCL has the whole operation: only then is there a point in the stream behind it.
std::shared_ptr<Memory::Mark> NcclEndpoint::await_taken(const NcclWork& work) {
  for (int spins = 0;;) {
    static_cast<void>(work.channel_.advance());
    const NcclChannel::Progress progress = work.channel_.progress(*work.operation_);
    if (progress.is_done) return progress.end;
    if (world().failed()) fail_out(work);
    if (progress.end) return progress.end;
    pause(spins);
  }
}

void NcclEndpoint::await_device(const NcclWork& work, Memory::Mark& end) {
  for (int spins = 0; !work.channel_.progress(*work.operation_).is_done;) {
    static_cast<void>(work.channel_.advance());
    if (world().failed()) fail_out(work);
    if (!end.reached()) pause(spins);
  }
}

void NcclEndpoint::fail_out(const NcclWork& work) {
  // On return nobody touches the buffers any more.
  static_cast<void>(work.channel_.take_back(*work.operation_));
  rank_->abort_all();
  const std::shared_ptr<Memory::Mark> end = work.channel_.progress(*work.operation_).end;
  for (const Clock::time_point patience = Clock::now() + kAbortPatience; end && !end->reached() && Clock::now() < patience;) {
    std::this_thread::sleep_for(kNap);
  }
  world().throw_failure(work.operation_->what());
}

bool NcclEndpoint::done(const NcclWork& work) const noexcept {
  const NcclChannel::Progress progress = work.channel_.progress(*work.operation_);
  return progress.is_done || world().failed() || (progress.end && progress.end->reached());
}

void NcclEndpoint::drop(NcclWork& work) noexcept {
  const bool is_unwinding = std::uncaught_exceptions() > 0;
  if (work.channel_.progress(*work.operation_).is_done) {
    if (!is_unwinding) note_dropped(work.operation_->what());
    return;
  }
  // Without it the ranks would be out of step, so what comes later is of no use either.
  note_dropped(work.operation_->what());
  if (work.channel_.take_back(*work.operation_)) return;
  rank_->abort_all();
  const std::shared_ptr<Memory::Mark> end = work.channel_.progress(*work.operation_).end;
  for (const Clock::time_point patience = Clock::now() + kAbortPatience; end && !end->reached() && Clock::now() < patience;) {
    std::this_thread::sleep_for(kNap);
  }
}

void NcclEndpoint::note_dropped(const std::string& what) noexcept {
  if (dropped_.empty()) dropped_ = fmt::format("rank {} dropped {} without waiting for it", world_rank(), what);
}

void NcclEndpoint::require_none_dropped() const {
  if (!dropped_.empty()) throw ContractError(dropped_);
}

void NcclEndpoint::set_timeline(Timeline* timeline) {
  record_spans();
  timeline_ = timeline;
}

void NcclEndpoint::keep_span(Span span, std::shared_ptr<Memory::Mark> begin, std::shared_ptr<Memory::Mark> end) {
  if (begin == nullptr) return;
  const std::scoped_lock lock(spans_mutex_);
  spans_.push_back({std::move(span), std::move(begin), std::move(end)});
}

void NcclEndpoint::record_spans() {
  std::vector<KeptSpan> kept;
  {
    const std::scoped_lock lock(spans_mutex_);
    kept.swap(spans_);
  }
  if (timeline_ == nullptr) return;
  for (KeptSpan& entry : kept) {
    entry.span.begin_ns = entry.begin->time_ns();
    entry.span.end_ns = entry.end->time_ns();
    timeline_->record(std::move(entry.span));
  }
}

}  // namespace tandem
