// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/gpu.h"
#include "kernels/simt/queue.h"

namespace tandem::simt_gpu {

/// Elements in device memory, used in one stream.
template <class T>
class DeviceArray {
 public:
  DeviceArray(StreamHandle stream, std::size_t count) : stream_(stream), count_(count) {
    data_ = static_cast<T*>(allocate(size_bytes(), stream));
  }
  DeviceArray(StreamHandle stream, const std::vector<T>& values) : DeviceArray(stream, values.size()) {
    const Pinned pinned(allocate_pinned(size_bytes()));
    std::memcpy(pinned.get(), values.data(), values.size() * sizeof(T));
    copy(data_, pinned.get(), size_bytes(), Direction::to_device, stream);
    synchronize(stream);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { release(data_, stream_); }

  [[nodiscard]] T* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t size_bytes() const noexcept { return static_cast<std::int64_t>(count_ * sizeof(T)); }
  /// What is there when the stream's work so far is done; blocks.
  [[nodiscard]] std::vector<T> read() const {
    const Pinned pinned(allocate_pinned(size_bytes()));
    copy(pinned.get(), data_, size_bytes(), Direction::to_host, stream_);
    synchronize(stream_);
    std::vector<T> values(count_);
    std::memcpy(values.data(), pinned.get(), count_ * sizeof(T));
    return values;
  }

 private:
  StreamHandle stream_;
  std::size_t count_;
  T* data_ = nullptr;
};

/// What the stream's error says; empty where there is none.
inline std::string error_of(StreamHandle stream) {
  try {
    synchronize(stream);
  } catch (const GpuError& error) {
    return error.what();
  }
  return {};
}

}  // namespace tandem::simt_gpu
