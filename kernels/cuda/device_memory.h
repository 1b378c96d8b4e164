// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/gpu.h"
#include "kernels/memory.h"

namespace tandem::TANDEM_GPU {

/// Memory of one device, as one lane: a stream of its own. Reservations come from the device's stream-ordered pool. write() goes
/// through pinned staging memory, which is used again when the stream has passed the copy.
class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(const DeviceInfo& device);
  ~DeviceMemory() override;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] bool on_host() const noexcept override { return false; }
  [[nodiscard]] std::string_view description() const noexcept override { return description_; }
  [[nodiscard]] bool holds(const void* address) const noexcept override { return is_device_address(address); }
  [[nodiscard]] void* reserve(std::int64_t size_bytes) override;
  void give_back(void* address, std::int64_t size_bytes) noexcept override;
  void copy(const void* from, void* to, std::int64_t size_bytes) override;
  void copy_rows(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride, std::int64_t row_bytes,
                 std::int64_t rows) override;
  void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) override;
  void write(const void* from_host, void* to, std::int64_t size_bytes) override;
  void read(const void* from, void* to_host, std::int64_t size_bytes) override;
  void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                    std::int64_t count) override;  // in cuda_sum.cpp
  void synchronize() override;
  [[nodiscard]] std::shared_ptr<Mark> mark(Timed timed) override;
  void begin_after(Mark& mark) override;
  [[nodiscard]] std::unique_ptr<Memory> new_lane() override;

  /// Makes the device the calling thread's, so that what is issued next goes there.
  [[nodiscard]] StreamHandle stream() const;
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_; }
  /// Pinned memory for what is issued before the next call of this; of a ring, which is used again when the stream has passed it.
  /// While a graph is recorded nothing of the ring is used twice.
  [[nodiscard]] void* staging(std::int64_t size_bytes);
  /// Between begin_capture() and end_capture() of this lane's stream; set to false when the graph has been launched.
  void set_recording(bool recording);
  [[nodiscard]] bool recording() const noexcept { return recording_; }
  /// For Temporary.
  [[nodiscard]] void* allocate_temporary(std::int64_t size_bytes);
  void release_temporary(void* address) noexcept;

  /// One moment as both clocks saw it; marks hold the one that their time counts from.
  struct TimeBase;

 private:
  class Staging;
  class Scratch;
  struct ReadPiece {
    Pinned data;
    Event arrived;
  };

  void set_time_base();

  DeviceInfo device_;
  std::string description_;
  Stream stream_, allocations_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<Scratch> scratch_;
  ReadPiece read_pieces_[2];
  std::shared_ptr<const TimeBase> time_base_;
  bool recording_ = false;
};

/// Device memory in the order of a lane, given back at the end of its life (after the work issued until then).
class Temporary {
 public:
  Temporary(DeviceMemory& memory, std::int64_t size_bytes)
      : memory_(memory), data_(size_bytes > 0 ? memory.allocate_temporary(size_bytes) : nullptr) {}
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (data_ != nullptr) memory_.release_temporary(data_);
  }
  [[nodiscard]] void* data() const noexcept { return data_; }
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(data_);
  }

 private:
  DeviceMemory& memory_;
  void* data_;
};

}  // namespace tandem::TANDEM_GPU
