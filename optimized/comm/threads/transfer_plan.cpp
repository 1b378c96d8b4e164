// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/threads/transfer_plan.h"

#include <algorithm>
#include <cstring>

#include "core/batch.h"
#include "kernels/cpu/sum_in_order.h"

namespace tandem {
namespace {

constexpr std::int64_t kUnitBytes = std::int64_t{64} * 1024;   // per stream; a few of them fit into a second-level cache
constexpr std::int64_t kSmallBytes = std::int64_t{32} * 1024;  // of all streams: moved in less time than a wake-up takes

std::size_t at(int index) { return static_cast<std::size_t>(index); }

std::int64_t sum_before(const std::vector<std::int64_t>& counts, int index) {
  std::int64_t sum = 0;
  for (int i = 0; i < index; ++i) sum += counts[at(i)];
  return sum;
}

bool splits_by_counts(CallKind kind) { return kind == CallKind::reduce_scatter || kind == CallKind::all_gather; }

}  // namespace

TransferPlan::TransferPlan(int ranks) : ranks_(ranks), parts_(at(ranks)), calls_(at(ranks)), streams_(at(ranks)) {
  for (Streams& streams : streams_) {
    streams.sources.reserve(at(ranks));
    streams.destinations.reserve(at(ranks));
  }
}

void TransferPlan::prepare(std::span<const Call* const> calls) {
  std::copy(calls.begin(), calls.end(), calls_.begin());
  const Call& call = *calls[0];
  kind_ = call.kind;
  dtype_ = call.dtype;
  width_ = static_cast<std::int64_t>(size_bytes(dtype_));
  unit_elements_ = kUnitBytes / width_;
  root_ = call.root;
  on_device_ = std::ranges::any_of(calls, [](const Call* one) { return one->device.lane != nullptr; });
  std::int64_t first = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    Part& part = parts_[at(rank)];
    part.first = first;
    if (splits_by_counts(kind_)) {
      part.elements = call.counts[at(rank)];
    } else if (kind_ == CallKind::all_to_all) {
      part.elements = sum_before(calls[at(rank)]->receive_counts, ranks_);
    } else if (on_device_) {
      part.elements = rank == 0 ? call.elements : 0;
    } else {
      part.elements = balanced_part(call.elements, ranks_, rank).size();
    }
    first += part.elements;
  }
  cut_into_units();
}

void TransferPlan::cut_into_units() noexcept {
  units_ = 0;
  std::int64_t elements = 0;
  for (Part& part : parts_) {
    part.next.store(0, std::memory_order_relaxed);
    part.units = (part.elements + unit_elements_ - 1) / unit_elements_;
    if (kind_ == CallKind::all_to_all && part.elements > 0) part.units = ranks_;  // one for each sender
    if (on_device_) part.units = 0;
    units_ += part.units;
    elements += part.elements;
  }
  const std::int64_t streams = kind_ == CallKind::all_to_all ? 1 : ranks_;
  small_ = elements * width_ * streams <= kSmallBytes;
  units_done_.store(0, std::memory_order_relaxed);
}

bool TransferPlan::work(int rank) noexcept {
  bool finished = false;
  for (int i = 0; i < ranks_; ++i) {
    const std::int64_t done = work_on((rank + i) % ranks_, streams_[at(rank)]);
    if (done == 0) continue;
    finished = units_done_.fetch_add(done) + done == units_;
  }
  return finished;
}

std::int64_t TransferPlan::work_on(int owner, Streams& streams) noexcept {
  Part& part = parts_[at(owner)];
  std::int64_t done = 0;
  while (part.next.load(std::memory_order_relaxed) < part.units) {
    const std::int64_t unit = part.next.fetch_add(1, std::memory_order_relaxed);
    if (unit >= part.units) break;
    run_unit(owner, unit, streams);
    ++done;
  }
  return done;
}

// Addresses of elements [first, first + count) of the part.
void TransferPlan::find_streams(int owner, std::int64_t first, Streams& streams) const {
  const std::int64_t in_whole = (parts_[at(owner)].first + first) * width_;
  streams.sources.clear();
  streams.destinations.clear();
  for (int rank = 0; rank < ranks_; ++rank) {
    const Call& call = *calls_[at(rank)];
    const bool is_source = kind_ == CallKind::broadcast ? rank == root_ : kind_ != CallKind::all_gather || rank == owner;
    const bool is_destination = kind_ == CallKind::broadcast ? rank != root_ : kind_ != CallKind::reduce_scatter || rank == owner;
    if (is_source) streams.sources.push_back(call.input + (kind_ == CallKind::all_gather ? first * width_ : in_whole));
    if (is_destination)
      streams.destinations.push_back(call.output + (kind_ == CallKind::reduce_scatter ? first * width_ : in_whole));
  }
}

void TransferPlan::run_unit(int owner, std::int64_t unit, Streams& streams) noexcept {
  if (kind_ == CallKind::all_to_all) {
    const Run run = exchanged(owner, static_cast<int>((owner + unit) % ranks_));
    if (run.bytes > 0) std::memcpy(run.to, run.from, static_cast<std::size_t>(run.bytes));
    return;
  }
  const std::int64_t first = unit * unit_elements_;  // in the part
  const std::int64_t count = std::min(unit_elements_, parts_[at(owner)].elements - first);
  find_streams(owner, first, streams);
  if (sums()) {
    sum_in_order(dtype_, streams.sources, streams.destinations, count);
    return;
  }
  for (std::byte* destination : streams.destinations) {
    if (destination == streams.sources[0]) continue;  // all_gather with the input at its place in the output
    std::memcpy(destination, streams.sources[0], static_cast<std::size_t>(count * width_));
  }
}

TransferPlan::Run TransferPlan::exchanged(int receiver, int sender) const noexcept {
  const Call& from = *calls_[at(sender)];
  const Call& to = *calls_[at(receiver)];
  return {from.input + sum_before(from.counts, receiver) * width_, to.output + sum_before(to.receive_counts, sender) * width_,
          from.counts[at(receiver)] * width_};
}

void TransferPlan::work_in(Memory& lane) {
  bool is_alone = true;
  for (const Call* call : calls_) {
    if (!call->device.ready) continue;
    lane.begin_after(*call->device.ready);
    is_alone = false;
  }
  for (int owner = 0; owner < ranks_; ++owner) {
    if (parts_[at(owner)].elements > 0) issue_part(owner, lane);
  }
  if (!is_alone) lane.synchronize();
}

void TransferPlan::issue_part(int owner, Memory& lane) {
  if (kind_ == CallKind::all_to_all) {
    for (int sender = 0; sender < ranks_; ++sender) {
      const Run run = exchanged(owner, sender);
      if (run.bytes > 0) lane.copy(run.from, run.to, run.bytes);
    }
    return;
  }
  Streams& streams = streams_[at(owner)];
  const std::int64_t count = parts_[at(owner)].elements;
  find_streams(owner, 0, streams);
  if (sums() && ranks_ > 1) return lane.sum_in_order(dtype_, streams.sources, streams.destinations, count);
  for (std::byte* destination : streams.destinations) {
    if (destination != streams.sources[0]) lane.copy(streams.sources[0], destination, count * width_);
  }
}

}  // namespace tandem
