// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/gpu.h"
#include "kernels/simt/heap.h"
#include "kernels/simt/queue.h"

namespace tandem::simt_gpu {
namespace {

constexpr int kDevices = 8;  // labels: their memory is one

/// Host memory that allocate_pinned() gave out, address -> size.
class PinnedMemory {
 public:
  void add(const std::byte* address, std::int64_t size_bytes) {
    const std::lock_guard lock(mutex_);
    blocks_.emplace(address, size_bytes);
  }
  void remove(const std::byte* address) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(address);
  }
  [[nodiscard]] bool holds_all(const void* address, std::int64_t size_bytes) const {
    const auto* const at = static_cast<const std::byte*>(address);
    const std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(at);
    if (block == blocks_.begin()) return false;
    --block;
    return at + size_bytes <= block->first + block->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::int64_t> blocks_;
};
PinnedMemory& pinned_memory() {
  static auto* const value = new PinnedMemory;
  return *value;
}

void check_on_device(const char* call, const void* address, std::int64_t size_bytes) {
  if (heap().holds_all(address, size_bytes)) return;
  throw GpuError(
      fmt::format("emulated GPU: {}: {} bytes at {} are not in one block of the device's memory", call, size_bytes, address));
}

void check_on_host(const char* call, const void* address, std::int64_t size_bytes) {
  if (pinned_memory().holds_all(address, size_bytes)) return;
  throw GpuError(fmt::format("emulated GPU: {}: {} bytes at {} are not pinned host memory", call, size_bytes, address));
}

void check_ends(const char* call, const void* to, std::int64_t to_bytes, const void* from, std::int64_t from_bytes,
                Direction direction) {
  direction == Direction::to_host ? check_on_host(call, to, to_bytes) : check_on_device(call, to, to_bytes);
  direction == Direction::to_device ? check_on_host(call, from, from_bytes) : check_on_device(call, from, from_bytes);
}

Queue& queue_of(const char* call, StreamHandle stream) {
  if (stream == nullptr) throw GpuError(fmt::format("emulated GPU: {}: no stream (the default one is not used here)", call));
  return *stream;
}

}  // namespace

std::vector<DeviceInfo> devices(std::string* why_none) {
  if (why_none != nullptr) why_none->clear();
  std::vector<DeviceInfo> all(kDevices);
  for (int i = 0; i < kDevices; ++i) {
    all[static_cast<std::size_t>(i)] = {.device = i,
                                        .name = "emulated GPU",
                                        .architecture = "emulated",
                                        .multiprocessors = 8,
                                        .memory_bytes = std::int64_t{16} << 30,
                                        .l2_bytes = std::int64_t{50} << 20,
                                        .shared_bytes_per_block = 227 * 1024,
                                        .bus_id = ""};
  }
  return all;
}

void use_device(int device) {
  if (device < 0 || device >= kDevices) throw GpuError(fmt::format("emulated GPU: use_device: there is no device {}", device));
}

StreamHandle make_stream() {
  auto queue = std::make_shared<Queue>();
  queue->self = queue;
  return queue.get();
}

void destroy_stream(StreamHandle stream) noexcept {
  if (stream == nullptr) return;
  const bool known = stream->has_thrown();
  try {
    stream->run_until(stream->added());
  } catch (const std::exception& error) {
    if (!known) fmt::print(stderr, "work that nobody waited for failed: {}\n", error.what());
  }
  const std::shared_ptr<Queue> last = std::move(stream->self);
}

void synchronize(StreamHandle stream) { queue_of("synchronize", stream).synchronize(); }

EventHandle make_event(Timing timing) { return new QueueEvent(timing == Timing::on); }
void destroy_event(EventHandle event) noexcept { delete event; }
void record(EventHandle event, StreamHandle stream) { event->record(queue_of("record", stream)); }
void wait_for(StreamHandle stream, EventHandle event) { event->make_wait(queue_of("wait_for", stream)); }
void synchronize(EventHandle event) { event->synchronize(); }
bool is_reached(EventHandle event) { return event->is_reached(); }
double seconds_between(EventHandle begin, EventHandle end) {
  return static_cast<double>(end->time_ns() - begin->time_ns()) * 1e-9;
}

void* allocate(std::int64_t size_bytes, StreamHandle stream) {
  if (size_bytes <= 0) throw GpuError(fmt::format("emulated GPU: allocate: {} bytes", size_bytes));
  return queue_of("allocate", stream).allocate(size_bytes);
}

void release(void* address, StreamHandle stream) noexcept {
  if (address != nullptr) stream->release(static_cast<std::byte*>(address));
}

void* allocate_pinned(std::int64_t size_bytes) {
  if (size_bytes <= 0) throw GpuError(fmt::format("emulated GPU: allocate_pinned: {} bytes", size_bytes));
  const auto rounded = static_cast<std::size_t>((size_bytes + 255) / 256 * 256);
  void* const address = std::aligned_alloc(256, rounded);
  if (address == nullptr) throw GpuError(fmt::format("emulated GPU: allocate_pinned: no memory for {} bytes", size_bytes));
  std::memset(address, 0xFF, rounded);
  pinned_memory().add(static_cast<std::byte*>(address), size_bytes);
  return address;
}

void release_pinned(void* address) noexcept {
  pinned_memory().remove(static_cast<std::byte*>(address));
  std::free(address);
}

bool is_device_address(const void* address) noexcept { return heap().holds(address); }

void copy(void* to, const void* from, std::int64_t size_bytes, Direction direction, StreamHandle stream) {
  copy_rows(to, size_bytes, from, size_bytes, size_bytes, 1, direction, stream);
}

void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t row_bytes,
               std::int64_t rows, Direction direction, StreamHandle stream) {
  Queue& queue = queue_of("copy", stream);
  if (rows <= 0 || row_bytes <= 0) return;
  const std::int64_t to_bytes = (rows - 1) * to_stride + row_bytes, from_bytes = (rows - 1) * from_stride + row_bytes;
  check_ends("copy", to, to_bytes, from, from_bytes, direction);
  queue.add([=] {
    // Pinned memory may be gone by now.
    check_ends("copy", to, to_bytes, from, from_bytes, direction);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_stride, static_cast<const std::byte*>(from) + row * from_stride,
                  static_cast<std::size_t>(row_bytes));
    }
  });
}

void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes, StreamHandle stream) {
  Queue& queue = queue_of("set_bytes", stream);
  if (size_bytes <= 0) return;
  check_on_device("set_bytes", to, size_bytes);
  queue.add([=] { std::memset(to, value, static_cast<std::size_t>(size_bytes)); });
}

void begin_capture(StreamHandle stream) { queue_of("begin_capture", stream).begin_recording(); }

GraphHandle end_capture(StreamHandle stream, GraphHandle graph) {
  const std::shared_ptr<RecordedGraph> recorded = queue_of("end_capture", stream).end_recording();
  if (graph == nullptr) graph = new RecordedGraph;
  graph->nodes = recorded->nodes;
  return graph;
}

void launch(GraphHandle graph, StreamHandle stream) {
  Queue& queue = queue_of("launch", stream);
  queue.check_not_recording("launch of a graph");
  queue.add([nodes = graph->nodes] {
    for (const Queue::Work& work : nodes->work) work();
  });
}

void destroy_graph(GraphHandle graph) noexcept { delete graph; }

void set_thread_order(StreamHandle stream, std::uint64_t seed) { queue_of("set_thread_order", stream).set_seed(seed); }
void set_memory_protection(bool on) { heap().set_protected(on); }

}  // namespace tandem::simt_gpu
