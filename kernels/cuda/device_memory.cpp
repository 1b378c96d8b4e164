// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"

namespace tandem::TANDEM_GPU {
namespace {

constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kStagingBlock = 4 << 20;  // as much as one asynchronous copy needs to reach the bus's rate
constexpr std::int64_t kStagingMost = 64 << 20;  // pinned bytes of a lane beyond which it waits rather than takes more
constexpr std::int64_t kTemporaryBlock = 64 << 20;
constexpr std::int64_t kBaseAge = 4'000'000'000;  // ns; the device's elapsed times are floats: half a microsecond at 4 s

std::int64_t aligned(std::int64_t size_bytes) { return (size_bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// One moment as both clocks saw it.
struct DeviceMemory::TimeBase {
  Event event;
  std::int64_t host_ns = 0;
};

namespace {

class DeviceMark final : public Memory::Mark {
 public:
  DeviceMark(Event event, std::shared_ptr<const DeviceMemory::TimeBase> base)
      : event_(std::move(event)), base_(std::move(base)) {}
  void wait() override { TANDEM_GPU::synchronize(event_.get()); }
  [[nodiscard]] bool reached() override { return is_reached(event_.get()); }
  [[nodiscard]] std::int64_t time_ns() override {
    TANDEM_CHECK(base_ != nullptr, "the mark was not made with Timed::yes");
    wait();
    return base_->host_ns + static_cast<std::int64_t>(seconds_between(base_->event.get(), event_.get()) * 1e9);
  }
  [[nodiscard]] EventHandle event() const noexcept { return event_.get(); }

 private:
  Event event_;
  std::shared_ptr<const DeviceMemory::TimeBase> base_;  // null: not timed
};

}  // namespace

// Pinned blocks that are filled one after the other. A full one is used again when the stream has passed what was issued while it
// was filled.
class DeviceMemory::Staging {
 public:
  [[nodiscard]] void* take(std::int64_t size_bytes, StreamHandle stream, bool recording) {
    size_bytes = aligned(size_bytes);
    if (current_.data.get() == nullptr || used_ + size_bytes > current_.size_bytes) {
      retire(stream, recording);
      current_ = next(size_bytes);
      used_ = 0;
    }
    void* const place = static_cast<std::byte*>(current_.data.get()) + used_;
    used_ += size_bytes;
    return place;
  }
  // What was recorded has been issued.
  void issued(StreamHandle stream) {
    for (Block& block : recorded_) {
      record(block.passed.get(), stream);
      in_flight_.push_back(std::move(block));
    }
    recorded_.clear();
  }

 private:
  struct Block {
    Pinned data;
    std::int64_t size_bytes = 0;
    Event passed;
  };

  void retire(StreamHandle stream, bool recording) {
    if (current_.data.get() == nullptr) return;
    if (!recording) record(current_.passed.get(), stream);
    (recording ? recorded_ : in_flight_).push_back(std::move(current_));
    current_ = Block();
  }

  [[nodiscard]] Block next(std::int64_t size_bytes) {
    const auto fits = [&](const Block& block) { return block.size_bytes >= size_bytes; };
    auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                              [&](const Block& block) { return fits(block) && is_reached(block.passed.get()); });
    if (found == in_flight_.end() && total_bytes_ + size_bytes > kStagingMost) {
      found = std::find_if(in_flight_.begin(), in_flight_.end(), fits);
      if (found != in_flight_.end()) TANDEM_GPU::synchronize(found->passed.get());
    }
    if (found != in_flight_.end()) {
      Block block = std::move(*found);
      in_flight_.erase(found);
      return block;
    }
    const std::int64_t size = std::max(size_bytes, kStagingBlock);
    total_bytes_ += size;
    return {Pinned(allocate_pinned(size)), size, Event(make_event(Timing::off))};
  }

  Block current_;
  std::int64_t used_ = 0, total_bytes_ = 0;
  std::vector<Block> in_flight_, recorded_;
};

// While a graph is recorded, temporaries are not the stream-ordered pool's: allocations would become nodes, and graphs with such
// nodes cannot be updated. They are taken from blocks that every graph of the lane uses, one after the other, as a stack.
class DeviceMemory::Scratch {
 public:
  [[nodiscard]] void* take(DeviceMemory& memory, std::int64_t size_bytes) {
    size_bytes = aligned(size_bytes);
    if (blocks_.empty() || top_ + size_bytes > blocks_.back().size_bytes) {
      // Earlier blocks stay until the lane ends: graphs know their addresses. Each is twice as large as the one before.
      const std::int64_t last = blocks_.empty() ? kTemporaryBlock / 2 : blocks_.back().size_bytes;
      const std::int64_t size = std::max(2 * last, 2 * size_bytes);
      blocks_.push_back({memory.reserve(size), size});
      top_ = 0;
      live_.clear();
    }
    const std::int64_t place = top_;
    top_ += size_bytes;
    live_.push_back({place, true});
    return static_cast<std::byte*>(blocks_.back().address) + place;
  }
  // Whether it was one of these.
  bool give_back(const void* address) noexcept {
    for (const Block& block : blocks_) {
      const std::int64_t place = static_cast<const std::byte*>(address) - static_cast<const std::byte*>(block.address);
      if (place < 0 || place >= block.size_bytes) continue;
      if (&block == &blocks_.back()) pop(place);
      return true;
    }
    return false;
  }
  void release_all(DeviceMemory& memory) noexcept {
    for (const Block& block : blocks_) memory.give_back(block.address, block.size_bytes);
    blocks_.clear();
  }

 private:
  struct Block {
    void* address;
    std::int64_t size_bytes;
  };
  struct Piece {
    std::int64_t place;
    bool live;
  };

  void pop(std::int64_t place) noexcept {
    for (Piece& piece : live_) {
      if (piece.place == place) piece.live = false;
    }
    while (!live_.empty() && !live_.back().live) {
      top_ = live_.back().place;
      live_.pop_back();
    }
  }

  std::vector<Block> blocks_;
  std::int64_t top_ = 0;
  std::vector<Piece> live_;  // of the last block, in order of place
};

DeviceMemory::DeviceMemory(const DeviceInfo& device)
    : device_(device),
      description_(device.bus_id.empty() ? device.name : fmt::format("{} (device {})", device.name, device.device)),
      staging_(std::make_unique<Staging>()),
      scratch_(std::make_unique<Scratch>()) {
  use_device(device.device);
  stream_ = Stream(make_stream());
  allocations_ = Stream(make_stream());
}

DeviceMemory::~DeviceMemory() {
  try {
    TANDEM_GPU::synchronize(stream());
  } catch (const std::exception&) {
    // What went wrong in the lane has been thrown by whoever waited for it, or nobody wanted to know.
  }
  scratch_->release_all(*this);
}

StreamHandle DeviceMemory::stream() const {
  use_device(device_.device);
  return stream_.get();
}

void* DeviceMemory::reserve(std::int64_t size_bytes) {
  // In a stream of its own, so that it is there for every lane at once, without waiting for this one.
  use_device(device_.device);
  void* const address = allocate(std::max(size_bytes, kAlignment), allocations_.get());
  TANDEM_GPU::synchronize(allocations_.get());
  return address;
}

void DeviceMemory::give_back(void* address, std::int64_t) noexcept { release(address, stream_.get()); }

void* DeviceMemory::allocate_temporary(std::int64_t size_bytes) {
  return recording_ ? scratch_->take(*this, size_bytes) : allocate(size_bytes, stream());
}

void DeviceMemory::release_temporary(void* address) noexcept {
  if (!scratch_->give_back(address)) release(address, stream_.get());
}

void DeviceMemory::copy(const void* from, void* to, std::int64_t size_bytes) {
  if (size_bytes > 0) TANDEM_GPU::copy(to, from, size_bytes, Direction::on_device, stream());
}

void DeviceMemory::copy_rows(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride, std::int64_t row_bytes,
                             std::int64_t rows) {
  if (row_bytes <= 0 || rows <= 0) return;
  if (rows == 1 || (from_stride == row_bytes && to_stride == row_bytes)) return copy(from, to, row_bytes * rows);
  TANDEM_GPU::copy_rows(to, to_stride, from, from_stride, row_bytes, rows, Direction::on_device, stream());
}

void DeviceMemory::set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) {
  if (size_bytes > 0) TANDEM_GPU::set_bytes(to, value, size_bytes, stream());
}

void DeviceMemory::write(const void* from_host, void* to, std::int64_t size_bytes) {
  for (std::int64_t done = 0; done < size_bytes; done += kStagingBlock) {
    const std::int64_t size = std::min(kStagingBlock, size_bytes - done);
    void* const place = staging(size);
    std::memcpy(place, static_cast<const std::byte*>(from_host) + done, static_cast<std::size_t>(size));
    TANDEM_GPU::copy(static_cast<std::byte*>(to) + done, place, size, Direction::to_device, stream());
  }
}

void DeviceMemory::read(const void* from, void* to_host, std::int64_t size_bytes) {
  TANDEM_CHECK(!recording_, "reading while a graph is recorded");
  const std::int64_t count = (size_bytes + kStagingBlock - 1) / kStagingBlock;
  const auto piece_bytes = [&](std::int64_t index) { return std::min(kStagingBlock, size_bytes - index * kStagingBlock); };
  // Two pieces in turn: one is copied out while the next arrives.
  const auto take_out = [&](std::int64_t index) {
    const ReadPiece& piece = read_pieces_[index % 2];
    TANDEM_GPU::synchronize(piece.arrived.get());
    std::memcpy(static_cast<std::byte*>(to_host) + index * kStagingBlock, piece.data.get(),
                static_cast<std::size_t>(piece_bytes(index)));
  };
  const StreamHandle lane = stream();
  for (std::int64_t index = 0; index < count; ++index) {
    ReadPiece& piece = read_pieces_[index % 2];
    if (!piece.arrived) {
      // At once as large as any: pinned memory that is freed makes the host wait for all that the device does.
      piece.data = Pinned(allocate_pinned(kStagingBlock));
      piece.arrived = Event(make_event(Timing::off));
    }
    TANDEM_GPU::copy(piece.data.get(), static_cast<const std::byte*>(from) + index * kStagingBlock, piece_bytes(index),
                     Direction::to_host, lane);
    record(piece.arrived.get(), lane);
    if (index > 0) take_out(index - 1);
  }
  if (count > 0) take_out(count - 1);
}

void DeviceMemory::synchronize() {
  TANDEM_CHECK(!recording_, "synchronizing while a graph is recorded");
  TANDEM_GPU::synchronize(stream());
  if (time_base_ != nullptr && Timeline::now_ns() - time_base_->host_ns > kBaseAge) set_time_base();
}

std::shared_ptr<Memory::Mark> DeviceMemory::mark(Timed timed) {
  TANDEM_CHECK(!recording_, "a mark while a graph is recorded");
  const StreamHandle lane = stream();
  if (timed == Timed::yes && time_base_ == nullptr) set_time_base();
  Event event(make_event(timed == Timed::yes ? Timing::on : Timing::off));
  record(event.get(), lane);
  return std::make_shared<DeviceMark>(std::move(event), timed == Timed::yes ? time_base_ : nullptr);
}

void DeviceMemory::begin_after(Mark& mark) {
  TANDEM_CHECK(!recording_, "waiting for a mark while a graph is recorded");
  if (const auto* const other = dynamic_cast<const DeviceMark*>(&mark)) return wait_for(stream(), other->event());
  mark.wait();  // of another kind of memory
}

std::unique_ptr<Memory> DeviceMemory::new_lane() { return std::make_unique<DeviceMemory>(device_); }

void* DeviceMemory::staging(std::int64_t size_bytes) { return staging_->take(size_bytes, stream(), recording_); }

void DeviceMemory::set_recording(bool recording) {
  recording_ = recording;
  if (!recording) staging_->issued(stream());
}

void DeviceMemory::set_time_base() {
  // In a stream without other work; of a few tries the one that both clocks agree on best.
  std::int64_t shortest = 0;
  for (int attempt = 0; attempt < 5; ++attempt) {
    auto base = std::make_shared<TimeBase>();
    base->event = Event(make_event(Timing::on));
    const std::int64_t before = Timeline::now_ns();
    record(base->event.get(), allocations_.get());
    TANDEM_GPU::synchronize(base->event.get());
    const std::int64_t after = Timeline::now_ns();
    base->host_ns = before + (after - before) / 2;
    if (attempt > 0 && after - before >= shortest) continue;
    shortest = after - before;
    time_base_ = std::move(base);
  }
}

}  // namespace tandem::TANDEM_GPU
