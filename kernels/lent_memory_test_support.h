// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>

#include "kernels/memory.h"

namespace tandem {

/// For tests on a machine without a GPU: memory that says it is a device's and is the host's, so that all copies to and from a
/// device are made. All lanes know the same reservations.
class LentMemory : public Memory {
 public:
  LentMemory() = default;
  explicit LentMemory(std::span<const std::byte> also_held) { regions_->add(also_held.data(), std::ssize(also_held)); }

  [[nodiscard]] bool on_host() const noexcept override { return false; }
  [[nodiscard]] std::string_view description() const noexcept override { return "lent memory"; }
  [[nodiscard]] bool holds(const void* address) const noexcept override { return regions_->hold(address); }
  [[nodiscard]] void* reserve(std::int64_t size_bytes) override {
    void* const address = host_memory().reserve(size_bytes);
    regions_->add(address, size_bytes);
    return address;
  }
  void give_back(void* address, std::int64_t size_bytes) noexcept override {
    regions_->remove(address);
    host_memory().give_back(address, size_bytes);
  }
  void copy(const void* from, void* to, std::int64_t size_bytes) override { host_memory().copy(from, to, size_bytes); }
  void copy_rows(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride, std::int64_t row_bytes,
                 std::int64_t rows) override {
    host_memory().copy_rows(from, from_stride, to, to_stride, row_bytes, rows);
  }
  void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) override {
    host_memory().set_bytes(to, value, size_bytes);
  }
  void write(const void* from_host, void* to, std::int64_t size_bytes) override { copy(from_host, to, size_bytes); }
  void read(const void* from, void* to_host, std::int64_t size_bytes) override { copy(from, to_host, size_bytes); }
  void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                    std::int64_t count) override {
    host_memory().sum_in_order(dtype, sources, destinations, count);
  }
  void synchronize() override {}
  [[nodiscard]] std::shared_ptr<Mark> mark(Timed timed) override { return host_memory().mark(timed); }
  void begin_after(Mark&) override {}
  [[nodiscard]] std::unique_ptr<Memory> new_lane() override { return std::make_unique<LentMemory>(*this); }

 private:
  class Regions {
   public:
    void add(const void* begin, std::int64_t size_bytes) {
      const std::scoped_lock lock(mutex_);
      ends_[static_cast<const std::byte*>(begin)] = static_cast<const std::byte*>(begin) + size_bytes;
    }
    void remove(const void* begin) noexcept {
      const std::scoped_lock lock(mutex_);
      ends_.erase(static_cast<const std::byte*>(begin));
    }
    [[nodiscard]] bool hold(const void* address) const noexcept {
      const std::scoped_lock lock(mutex_);
      return std::ranges::any_of(ends_, [&](const auto& region) {
        return std::greater_equal<>()(address, region.first) && std::less<>()(address, region.second);
      });
    }

   private:
    mutable std::mutex mutex_;
    std::map<const std::byte*, const std::byte*> ends_;  // by beginning
  };

  std::shared_ptr<Regions> regions_ = std::make_shared<Regions>();
};

}  // namespace tandem
