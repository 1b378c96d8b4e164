// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Everything below kernels/cuda is compiled twice: by nvcc and against CUDA's runtime (TANDEM_GPU = cuda_gpu), and by the C++
// compiler against the emulator in kernels/simt (TANDEM_GPU = simt_gpu, TANDEM_SIMT defined). One program may hold both.
#ifdef TANDEM_SIMT
#define TANDEM_GPU simt_gpu
namespace tandem::simt_gpu {
class Queue;
class QueueEvent;
struct RecordedGraph;
using StreamHandle = Queue*;
using EventHandle = QueueEvent*;
using GraphHandle = RecordedGraph*;
}  // namespace tandem::simt_gpu
#else
#define TANDEM_GPU cuda_gpu
struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;
namespace tandem::cuda_gpu {
using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using GraphHandle = CUgraphExec_st*;
}  // namespace tandem::cuda_gpu
#endif

/// What of a GPU's runtime is used: a few functions with two implementations, runtime_cuda.cpp and simt/runtime_simt.cpp. All
/// throw GpuError (core/error.h) naming the call and what the runtime said. Nothing here uses a default stream.
namespace tandem::TANDEM_GPU {

struct DeviceInfo {
  int device = 0;
  std::string name;          ///< "NVIDIA H200"
  std::string architecture;  ///< "sm_90"; "emulated"
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0, l2_bytes = 0;
  int shared_bytes_per_block = 0;  ///< with opt-in
  std::string bus_id;              ///< as NVML knows it: "00000000:18:00.0"; empty: emulated
};
/// Devices that can be used here; where there are none, `why_none` says why in one line.
[[nodiscard]] std::vector<DeviceInfo> devices(std::string* why_none = nullptr);
/// Of the calling thread, for what has no stream argument (allocations, creations). Cheap.
void use_device(int device);

[[nodiscard]] StreamHandle make_stream();  ///< does not synchronise with the default stream
void destroy_stream(StreamHandle stream) noexcept;
void synchronize(StreamHandle stream);
/// Of the emulator: the order in which the threads of later launches' blocks take turns (0: ascending). Nothing on a GPU.
void set_thread_order(StreamHandle stream, std::uint64_t seed);

enum class Timing : std::uint8_t { off, on };
[[nodiscard]] EventHandle make_event(Timing timing);
void destroy_event(EventHandle event) noexcept;
void record(EventHandle event, StreamHandle stream);
void wait_for(StreamHandle stream, EventHandle event);  ///< `stream`'s later work
void synchronize(EventHandle event);
[[nodiscard]] bool is_reached(EventHandle event);
[[nodiscard]] double seconds_between(EventHandle begin, EventHandle end);  ///< both reached, both timed

/// From the device's pool, in the order of `stream`: what is freed is there again for later calls of the same stream without
/// waiting. Throws IoError where there is none left.
[[nodiscard]] void* allocate(std::int64_t size_bytes, StreamHandle stream);
void release(void* address, StreamHandle stream) noexcept;
/// Host memory that the device reads and writes without a detour.
[[nodiscard]] void* allocate_pinned(std::int64_t size_bytes);
void release_pinned(void* address) noexcept;
/// In memory of allocate() of any device.
[[nodiscard]] bool is_device_address(const void* address) noexcept;

enum class Direction : std::uint8_t { on_device, to_device, to_host };
/// Asynchronous; host memory must be pinned and stay as it is until the stream has come there.
void copy(void* to, const void* from, std::int64_t size_bytes, Direction direction, StreamHandle stream);
void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t row_bytes,
               std::int64_t rows, Direction direction, StreamHandle stream);
void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes, StreamHandle stream);

// Graphs: calls on `stream` between the two are recorded instead of issued; the thread may go on using other streams, and
// allocate in them. end_capture() takes `graph` (null: none yet), updates it where it has the same calls, else destroys it and
// makes another, and returns the one that launch() issues.
void begin_capture(StreamHandle stream);
[[nodiscard]] GraphHandle end_capture(StreamHandle stream, GraphHandle graph);
void launch(GraphHandle graph, StreamHandle stream);
void destroy_graph(GraphHandle graph) noexcept;

/// Owner of one handle. `destroy` is called with it at the end.
template <class Handle, void (*destroy)(Handle) noexcept>
class Owner {
 public:
  Owner() = default;
  explicit Owner(Handle handle) noexcept : handle_(handle) {}
  Owner(Owner&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owner& operator=(Owner&& other) noexcept {
    if (this != &other) reset(std::exchange(other.handle_, nullptr));
    return *this;
  }
  ~Owner() { reset(); }
  [[nodiscard]] Handle get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  /// The handle, to be destroyed by whoever gets it.
  [[nodiscard]] Handle give_up() noexcept { return std::exchange(handle_, nullptr); }
  void reset(Handle handle = nullptr) noexcept {
    if (handle_ != nullptr) destroy(handle_);
    handle_ = handle;
  }

 private:
  Handle handle_ = nullptr;
};
using Stream = Owner<StreamHandle, destroy_stream>;
using Event = Owner<EventHandle, destroy_event>;
using Graph = Owner<GraphHandle, destroy_graph>;
using Pinned = Owner<void*, release_pinned>;

}  // namespace tandem::TANDEM_GPU
