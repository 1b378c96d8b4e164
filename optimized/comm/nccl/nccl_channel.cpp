// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/nccl/nccl_rank.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

// NCCL says "remote error" where a peer is gone or has aborted. What became of it is heard a little later, from itself or from
// the connection that its end closes.
constexpr std::chrono::milliseconds kRemoteErrorGrace{1000};
constexpr std::chrono::milliseconds kFirstLook{50};
constexpr std::chrono::milliseconds kLookInterval{100};

ncclConfig_t config() {
  ncclConfig_t result = NCCL_CONFIG_INITIALIZER;
  result.blocking = 0;
  return result;
}

}  // namespace

NcclChannel::NcclChannel(NcclRank& rank, std::string subject, std::vector<int> members, int index)
    : rank_(rank), subject_(std::move(subject)), members_(std::move(members)), index_(index), lane_(rank.device().new_lane()) {
  if (index_ != 0) return;
  require(rank_.nccl().get_unique_id(&id_), "ncclGetUniqueId");
  for (std::size_t i = 1; i < members_.size(); ++i) rank_.tell(members_[i], subject_, {id_.internal, sizeof(id_.internal)});
}

NcclChannel::NcclChannel(NcclRank& rank, std::vector<int> members, int index)
    : rank_(rank), members_(std::move(members)), index_(index), lane_(rank.device().new_lane()) {}

NcclChannel::~NcclChannel() { abort(); }

void NcclChannel::require(ncclResult_t result, const std::string& what) const { require_nccl(rank_.nccl(), result, what, comm_); }

void NcclChannel::adopt() {
  const Lock lock(mutex_);
  if (state_ == State::connecting) state_ = State::settling;
}

void NcclChannel::issue(const std::shared_ptr<NcclOperation>& operation, std::shared_ptr<Memory::Mark> after,
                        Memory::Timed timed) {
  {
    const Lock lock(mutex_);
    operation->after_ = std::move(after);
    operation->timed_ = timed;
    queue_.push_back(operation);
  }
  static_cast<void>(advance());
}

bool NcclChannel::advance() noexcept {
  const Lock lock(mutex_);
  try {
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      switch (state_) {
        case State::aborted: return false;
        case State::connecting:
          connect();
          goes_on = state_ == State::settling;
          break;
        case State::settling: goes_on = has_settled(); break;
        case State::ready:
          register_pending();
          goes_on = begin_next();
          break;
      }
    }
    retire();
  } catch (const std::exception& error) {
    rank_.fail(current_ ? fmt::format("{} (during {})", error.what(), current_->what()) : error.what());
  }
  return !queue_.empty() || current_ || !issued_.empty() || (state_ != State::ready && state_ != State::aborted);
}

void NcclChannel::connect() {
  if (subject_.empty()) return;
  if (index_ != 0) {
    const std::optional<std::string> letter = rank_.take(members_[0], subject_);
    if (!letter) return;
    TANDEM_CHECK(letter->size() == sizeof(id_.internal), fmt::format("an id of {} bytes", letter->size()));
    std::memcpy(id_.internal, letter->data(), sizeof(id_.internal));
  }
  static_cast<void>(rank_.device().native_stream(*lane_));  // the device is the calling thread's from here on
  ncclConfig_t wanted = config();
  const auto result = rank_.nccl().init_rank(&comm_, static_cast<int>(members_.size()), id_, index_, &wanted);
  require(result, "ncclCommInitRankConfig");
  state_ = State::settling;
}

// Whether NCCL has taken the last call.
bool NcclChannel::has_settled() {
  if (comm_ == nullptr) return false;  // of a split that is not done
  ncclResult_t result = ncclSuccess;
  require(rank_.nccl().async_error(comm_, &result), "ncclCommGetAsyncError");
  if (result == ncclInProgress) return false;
  if (result == ncclRemoteError) {
    const Clock::time_point now = Clock::now();
    if (remote_error_since_ == Clock::time_point{}) remote_error_since_ = now;
    if (now - remote_error_since_ < kRemoteErrorGrace) return false;
  }
  require(result, "an operation");
  state_ = State::ready;
  return true;
}

bool NcclChannel::begin_next() {
  if (!current_) {
    if (queue_.empty()) return false;
    const std::shared_ptr<NcclOperation>& front = queue_.front();
    if (!front->waits_since_) front->waits_since_ = Clock::now();
    if (!front->may_begin()) return false;
    current_ = front;
    queue_.pop_front();
    // What the rank's own lane had when the operation was called comes first.
    if (current_->after_) lane_->begin_after(*current_->after_);
    current_->begin_ = lane_->mark(current_->timed_);
    current_->waits_since_.reset();
  }
  issue_step();
  return true;
}

void NcclChannel::issue_step() {
  auto* const stream = static_cast<cudaStream_t>(rank_.device().native_stream(*lane_));
  if (current_->issue(current_->next_step_, {comm_, stream, *lane_})) {
    ++current_->next_step_;
    state_ = State::settling;
    return;
  }
  current_->end_ = lane_->mark(current_->timed_);
  issued_.push_back(std::exchange(current_, nullptr));
}

void NcclChannel::retire() {
  while (!issued_.empty()) {
    NcclOperation& front = *issued_.front();
    if (!front.is_begun_) {
      if (!front.begin_->reached()) return;
      front.is_begun_ = true;
      front.waits_since_ = Clock::now();
      front.begun();
    }
    if (!front.end_->reached()) break;
    front.is_done_ = true;
    front.finished(front.timed_ == Memory::Timed::yes ? front.begin_ : nullptr, front.end_);
    issued_.pop_front();
  }
  // Errors of what runs on the device are seen only by who asks.
  ncclResult_t result = ncclSuccess;
  if (!issued_.empty() && state_ == State::ready) {
    require(rank_.nccl().async_error(comm_, &result), "ncclCommGetAsyncError");
    if (result == ncclInProgress) return;
    if (result == ncclRemoteError) {
      if (remote_error_since_ == Clock::time_point{}) remote_error_since_ = Clock::now();
      if (Clock::now() - remote_error_since_ < kRemoteErrorGrace) return;
    }
    require(result, issued_.front()->what());
  }
}

std::shared_ptr<NcclOperation> NcclChannel::waiting() const {
  if (!issued_.empty()) return issued_.front()->is_begun_ ? issued_.front() : nullptr;
  if (current_) return current_;
  return queue_.empty() ? nullptr : queue_.front();
}

void NcclChannel::look() {
  std::shared_ptr<NcclOperation> operation;
  std::chrono::nanoseconds waited{};
  {
    const Lock lock(mutex_);
    if (state_ == State::aborted) return;
    operation = waiting();
    if (!operation) return;
    const Clock::time_point now = Clock::now();
    if (!operation->waits_since_) operation->waits_since_ = now;
    waited = now - *operation->waits_since_;
    if (waited < kFirstLook || now < operation->next_look_) return;
    operation->next_look_ = now + kLookInterval;
  }
  operation->look(waited);
}

NcclChannel::Progress NcclChannel::progress(const NcclOperation& operation) const {
  const Lock lock(mutex_);
  return {operation.end_, operation.is_done_};
}

bool NcclChannel::is_idle() const {
  const Lock lock(mutex_);
  return queue_.empty() && !current_ && issued_.empty();
}

bool NcclChannel::is_settled() const {
  const Lock lock(mutex_);
  return state_ == State::ready || state_ == State::aborted;
}

bool NcclChannel::take_back(const NcclOperation& operation) {
  const Lock lock(mutex_);
  return std::erase_if(queue_, [&](const auto& queued) { return queued.get() == &operation; }) > 0;
}

void NcclChannel::register_buffer(void* address, std::int64_t size_bytes) {
  const Lock lock(mutex_);
  regions_[address] = {size_bytes, nullptr, true};
}

// A buffer that cannot be registered is used as any other.
void NcclChannel::register_pending() {
  if (rank_.nccl().register_buffer == nullptr || comm_ == nullptr) return;
  for (auto& [address, region] : regions_) {
    if (!std::exchange(region.is_pending, false)) continue;
    static_cast<void>(rank_.device().native_stream(*lane_));  // NCCL asks the driver about the address, in the thread's context
    const auto size = static_cast<std::size_t>(region.size_bytes);
    if (rank_.nccl().register_buffer(comm_, address, size, &region.handle) != ncclSuccess) region.handle = nullptr;
  }
}

void NcclChannel::deregister_buffer(void* address) noexcept {
  const Lock lock(mutex_);
  const auto found = regions_.find(address);
  if (found == regions_.end()) return;
  const bool is_registered = found->second.handle != nullptr && comm_ != nullptr;
  if (is_registered && rank_.nccl().deregister_buffer != nullptr) {
    static_cast<void>(rank_.nccl().deregister_buffer(comm_, found->second.handle));
  }
  regions_.erase(found);
}

void NcclChannel::abort() noexcept {
  const Lock lock(mutex_);
  if (state_ == State::aborted) return;
  state_ = State::aborted;
  queue_.clear();
  current_.reset();
  // Its work may hang in the stream for good unless NCCL is told.
  if (comm_ != nullptr) static_cast<void>(rank_.nccl().abort(std::exchange(comm_, nullptr)));
  issued_.clear();
}

void NcclChannel::begin_closing() {
  const Lock lock(mutex_);
  if (comm_ == nullptr || state_ == State::aborted) return;
  const std::map<void*, Region> regions = std::exchange(regions_, {});
  for (const auto& [address, region] : regions) {
    if (region.handle != nullptr) static_cast<void>(rank_.nccl().deregister_buffer(comm_, region.handle));
  }
  require(rank_.nccl().finalize(comm_), "ncclCommFinalize");
}

bool NcclChannel::close() {
  const Lock lock(mutex_);
  if (comm_ == nullptr || state_ == State::aborted) return true;
  ncclResult_t result = ncclSuccess;
  require(rank_.nccl().async_error(comm_, &result), "ncclCommGetAsyncError");
  if (result == ncclInProgress) return false;
  state_ = State::aborted;
  require(rank_.nccl().destroy(std::exchange(comm_, nullptr)), "ncclCommDestroy");
  return true;
}

}  // namespace tandem
