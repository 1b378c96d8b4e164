// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_rank.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kBusyInterval{1};
constexpr std::chrono::milliseconds kIdleInterval{20};
constexpr std::int64_t kSmallestScratch = 4096;

}  // namespace

NcclRank::NcclRank(std::shared_ptr<WorldState> world, int rank, NcclDevice device, Post post)
    : world_(std::move(world)),
      world_rank_(rank),
      device_(std::move(device)),
      post_(std::move(post)),
      lane_(device_.new_lane()) {}

NcclRank::~NcclRank() {
  watchdog_.request_stop();
  wake();
  if (watchdog_.joinable()) watchdog_.join();
  abort_all();
  channels_.clear();
  for (const Scratch& scratch : all_) lane_->give_back(scratch.data, scratch.size_bytes);
}

void NcclRank::start() {
  world_->add_sleepers(weak_from_this());
  watchdog_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

void NcclRank::watch(const std::stop_token& stop) {
  bool is_busy = false;
  while (!stop.stop_requested()) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, is_busy ? kBusyInterval : kIdleInterval, [&] { return is_woken_ || stop.stop_requested(); });
      is_woken_ = false;
    }
    if (world_->failed()) {
      abort_all();
      is_busy = false;
      continue;
    }
    is_busy = false;
    for (const auto& channel : channels()) {
      is_busy = channel->advance() || is_busy;
      channel->look();
    }
  }
}

void NcclRank::wake() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    is_woken_ = true;
  }
  changed_.notify_all();
}

void NcclRank::heard(int from, const std::string& letter) {
  const std::size_t end = letter.find('\n');
  TANDEM_CHECK(end != std::string::npos, "a letter without a subject");
  {
    const std::scoped_lock lock(mutex_);
    letters_[{from, letter.substr(0, end)}].push_back(letter.substr(end + 1));
  }
  wake();
}

void NcclRank::tell(int to, const std::string& subject, const std::string& text) {
  const std::string letter = subject + '\n' + text;
  if (to == world_rank_) return heard(to, letter);
  post_(to, letter);
}

std::optional<std::string> NcclRank::take(int from, const std::string& subject) {
  const std::scoped_lock lock(mutex_);
  const auto found = letters_.find({from, subject});
  if (found == letters_.end()) return std::nullopt;
  std::string text = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) letters_.erase(found);
  return text;
}

std::shared_ptr<NcclChannel> NcclRank::add(std::shared_ptr<NcclChannel> channel) {
  {
    const std::scoped_lock lock(channels_mutex_);
    for (const auto& [address, size_bytes] : regions_) channel->register_buffer(address, size_bytes);
    channels_.push_back(channel);
  }
  wake();
  return channel;
}

std::vector<std::shared_ptr<NcclChannel>> NcclRank::channels() const {
  const std::scoped_lock lock(channels_mutex_);
  return channels_;
}

void NcclRank::fail(const std::string& reason) noexcept {
  world_->fail({Failure::Kind::peer, world_rank_, fmt::format("rank {} failed: {}", world_rank_, reason)});
}

void NcclRank::drain() {
  for (const auto& channel : channels()) {
    while (!channel->is_idle()) {
      if (world_->failed()) world_->throw_failure("the end of its body");
      static_cast<void>(channel->advance());
      std::this_thread::yield();
    }
    while (!channel->is_settled() && !world_->failed()) {
      static_cast<void>(channel->advance());
      std::this_thread::yield();
    }
  }
}

void NcclRank::abort_all() noexcept {
  for (const auto& channel : channels()) channel->abort();
}

void NcclRank::close_all() {
  const auto all = channels();
  for (const auto& channel : all) channel->begin_closing();
  const Clock::time_point deadline = world_->deadline_from_now();
  for (const auto& channel : all) {
    while (!channel->close()) {
      if (Clock::now() > deadline) {
        abort_all();
        throw TimeoutError(fmt::format("rank {} waited {} ms for the others to close NCCL's communicators", world_rank_,
                                       world_->deadline().count()));
      }
      std::this_thread::sleep_for(kBusyInterval);
    }
  }
}

void NcclRank::register_buffer(void* address, std::int64_t size_bytes) {
  const std::scoped_lock lock(channels_mutex_);
  regions_[address] = size_bytes;
  for (const auto& channel : channels_) channel->register_buffer(address, size_bytes);
}

void NcclRank::deregister_buffer(void* address) noexcept {
  {
    const std::scoped_lock lock(channels_mutex_);
    regions_.erase(address);
  }
  for (const auto& channel : channels()) channel->deregister_buffer(address);
}

NcclRank::Scratch NcclRank::take_scratch(std::int64_t size_bytes) {
  if (size_bytes <= 0) return {};
  const std::scoped_lock lock(lane_mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->size_bytes >= size_bytes && (best == free_.end() || it->size_bytes < best->size_bytes)) best = it;
  }
  if (best != free_.end()) {
    const Scratch found = *best;
    free_.erase(best);
    return found;
  }
  Scratch made;
  made.size_bytes = std::max(size_bytes, kSmallestScratch);
  made.data = static_cast<std::byte*>(lane_->reserve(made.size_bytes));
  all_.push_back(made);
  return made;
}

void NcclRank::give_back(const Scratch& scratch) {
  if (scratch.data == nullptr) return;
  const std::scoped_lock lock(lane_mutex_);
  free_.push_back(scratch);
}

void NcclRank::read_behind(Memory::Mark& mark, const void* from, void* to_host, std::int64_t size_bytes) {
  const std::scoped_lock lock(lane_mutex_);
  lane_->begin_after(mark);
  lane_->read(from, to_host, size_bytes);
}

}  // namespace tandem
