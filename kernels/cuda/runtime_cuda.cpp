// SPDX-License-Identifier: Apache-2.0
// gpu.h on CUDA's runtime.
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>

#include <cuda_runtime.h>
#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/gpu.h"

namespace tandem::cuda_gpu {
namespace {

/// The lowest architecture that this build has code for; later ones are compiled to from its PTX when the program starts.
#ifndef TANDEM_CUDA_LOWEST_ARCHITECTURE
#define TANDEM_CUDA_LOWEST_ARCHITECTURE 80
#endif
constexpr int kLowestArchitecture = TANDEM_CUDA_LOWEST_ARCHITECTURE;

std::string text_of(cudaError_t error) { return fmt::format("{} ({})", cudaGetErrorString(error), cudaGetErrorName(error)); }

// `call` is the runtime's function. The error is taken off the thread's record, where the check of the next launch would find it.
void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw GpuError(fmt::format("{}: {}", call, text_of(error)));
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string why_no_devices(cudaError_t error) {
  if (error != cudaErrorInsufficientDriver) return fmt::format("no CUDA device: {}", text_of(error));
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  if (driver == 0) return "no CUDA device: no NVIDIA driver is installed (cudaErrorInsufficientDriver)";
  return fmt::format(
      "no CUDA device: the driver is too old, it supports CUDA {} and this program needs {} (cudaErrorInsufficientDriver)",
      version_text(driver), version_text(CUDART_VERSION));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

/// Why the device cannot be used; empty where it can.
std::string why_not(const cudaDeviceProp& properties, int device) {
  const int architecture = properties.major * 10 + properties.minor;
  if (architecture < kLowestArchitecture) {
    return fmt::format("{} is sm_{}, this program was built for sm_{} and later", properties.name, architecture,
                       kLowestArchitecture);
  }
  if (attribute(cudaDevAttrMemoryPoolsSupported, device) == 0) {
    return fmt::format("{} has no memory pools here (cudaMallocAsync)", properties.name);
  }
  return {};
}

DeviceInfo info_of(const cudaDeviceProp& properties, int device) {
  DeviceInfo info;
  info.device = device;
  info.name = properties.name;
  info.architecture = fmt::format("sm_{}{}", properties.major, properties.minor);
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  info.l2_bytes = properties.l2CacheSize;
  info.shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin);
  info.bus_id = fmt::format("{:08X}:{:02X}:{:02X}.0", properties.pciDomainID, properties.pciBusID, properties.pciDeviceID);
  return info;
}

// The device's pool keeps what is freed: a step's temporaries are those of the step before. What one stream has freed another
// gets once the first has come there; before, only where there is no other memory left, and then it waits.
void set_up_pool(int device) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  std::uint64_t keep = std::numeric_limits<std::uint64_t>::max();
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
}

cudaMemcpyKind kind_of(Direction direction) {
  switch (direction) {
    case Direction::on_device: return cudaMemcpyDeviceToDevice;
    case Direction::to_device: return cudaMemcpyHostToDevice;
    case Direction::to_host: return cudaMemcpyDeviceToHost;
  }
  return cudaMemcpyDefault;
}

std::size_t size_of(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

struct Found {
  std::vector<DeviceInfo> devices;
  std::string why_none;
};

Found find_devices() {
  Found found;
  // Streams that share one of the driver's queues, eight by default, wait for each other: lanes of NCCL, which wait for other
  // ranks, must not. The driver reads this with the first call.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    found.why_none = why_no_devices(error);
    return found;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    if (std::string reason = why_not(properties, device); reason.empty()) {
      found.devices.push_back(info_of(properties, device));
    } else {
      found.why_none = "no CUDA device: " + reason;
    }
  }
  if (count == 0) found.why_none = "no CUDA device";
  if (!found.devices.empty()) found.why_none.clear();
  return found;
}

}  // namespace

std::vector<DeviceInfo> devices(std::string* why_none) {
  static const Found found = find_devices();  // they do not change, and asking takes milliseconds
  if (why_none != nullptr) *why_none = found.why_none;
  return found.devices;
}

void use_device(int device) {
  thread_local int current = -1;
  if (device == current) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  current = device;
  static std::array<std::atomic_flag, 64> is_set_up;
  if (!is_set_up[static_cast<std::size_t>(device) % is_set_up.size()].test_and_set()) set_up_pool(device);
}

StreamHandle make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

void destroy_stream(StreamHandle stream) noexcept { static_cast<void>(cudaStreamDestroy(stream)); }

void synchronize(StreamHandle stream) { check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

void set_thread_order(StreamHandle, std::uint64_t) {}

EventHandle make_event(Timing timing) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timing == Timing::on ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
  return event;
}

void destroy_event(EventHandle event) noexcept { static_cast<void>(cudaEventDestroy(event)); }

void record(EventHandle event, StreamHandle stream) { check(cudaEventRecord(event, stream), "cudaEventRecord"); }

void wait_for(StreamHandle stream, EventHandle event) { check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent"); }

void synchronize(EventHandle event) { check(cudaEventSynchronize(event), "cudaEventSynchronize"); }

bool is_reached(EventHandle event) {
  const cudaError_t error = cudaEventQuery(event);
  if (error == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  check(error, "cudaEventQuery");
  return true;
}

double seconds_between(EventHandle begin, EventHandle end) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

void* allocate(std::int64_t size_bytes, StreamHandle stream) {
  void* address = nullptr;
  const cudaError_t error = cudaMallocAsync(&address, size_of(size_bytes), stream);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free_bytes = 0, total_bytes = 0;
    static_cast<void>(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw IoError(fmt::format("no GPU memory for {} more bytes: {} of {} are free", size_bytes, free_bytes, total_bytes));
  }
  check(error, "cudaMallocAsync");
  return address;
}

void release(void* address, StreamHandle stream) noexcept { static_cast<void>(cudaFreeAsync(address, stream)); }

void* allocate_pinned(std::int64_t size_bytes) {
  void* address = nullptr;
  check(cudaHostAlloc(&address, size_of(size_bytes), cudaHostAllocPortable), "cudaHostAlloc");
  return address;
}

void release_pinned(void* address) noexcept { static_cast<void>(cudaFreeHost(address)); }

bool is_device_address(const void* address) noexcept {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return attributes.type == cudaMemoryTypeDevice;
}

void copy(void* to, const void* from, std::int64_t size_bytes, Direction direction, StreamHandle stream) {
  check(cudaMemcpyAsync(to, from, size_of(size_bytes), kind_of(direction), stream), "cudaMemcpyAsync");
}

void copy_rows(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride, std::int64_t row_bytes,
               std::int64_t rows, Direction direction, StreamHandle stream) {
  check(cudaMemcpy2DAsync(to, size_of(to_stride), from, size_of(from_stride), size_of(row_bytes), size_of(rows),
                          kind_of(direction), stream),
        "cudaMemcpy2DAsync");
}

void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes, StreamHandle stream) {
  check(cudaMemsetAsync(to, value, size_of(size_bytes), stream), "cudaMemsetAsync");
}

void begin_capture(StreamHandle stream) {
  // Relaxed: staging memory may be allocated, and marks of other lanes waited for, meanwhile.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
}

GraphHandle end_capture(StreamHandle stream, GraphHandle graph) {
  Graph owned(graph);
  cudaGraph_t recorded = nullptr;
  check(cudaStreamEndCapture(stream, &recorded), "cudaStreamEndCapture");
  if (owned) {
    cudaGraphExecUpdateResultInfo info{};
    if (cudaGraphExecUpdate(owned.get(), recorded, &info) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      owned.reset();
    }
  }
  if (!owned) {
    cudaGraphExec_t made = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&made, recorded, 0);
    if (error != cudaSuccess) static_cast<void>(cudaGraphDestroy(recorded));
    check(error, "cudaGraphInstantiate");
    owned.reset(made);
  }
  static_cast<void>(cudaGraphDestroy(recorded));
  return owned.give_up();
}

void launch(GraphHandle graph, StreamHandle stream) { check(cudaGraphLaunch(graph, stream), "cudaGraphLaunch"); }

void destroy_graph(GraphHandle graph) noexcept { static_cast<void>(cudaGraphExecDestroy(graph)); }

}  // namespace tandem::cuda_gpu
