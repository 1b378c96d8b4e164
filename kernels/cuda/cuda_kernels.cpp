// SPDX-License-Identifier: Apache-2.0
// What the members of the families share: memory for one call, sums put off, graphs; and the two functions of backends.h.
#include "kernels/cuda/cuda_kernels.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/backends.h"

namespace tandem::TANDEM_GPU {
namespace {

constexpr std::int64_t kUploadAlignment = 256;
constexpr std::int64_t kFirstUploadRing = 1 << 20;
constexpr std::int64_t kUploadShare = 16;
constexpr std::size_t kDeferredBlock = 512;  // doubles

}  // namespace

CudaKernels::CudaKernels(const CudaKernelsOptions& options, const DeviceInfo& device)
    : CommonKernels(options.pitfalls),
      device_(device),
      products_(options.products),
      use_graphs_(options.graphs),
      fuse_gelu_(options.fuse_gelu),
      memory_(device),
      products_library_(make_matrix_products(device)) {
  set_thread_order(stream(), options.thread_order_seed);
}

CudaKernels::~CudaKernels() {
  try {
    // What the stream is still doing reads memory that other streams give back, the workspace of products for one.
    TANDEM_GPU::synchronize(stream());
  } catch (const std::exception&) {
    // Whoever waited for the work has been told.
  }
  for (const UploadRing& ring : upload_rings_) memory_.give_back(ring.address, ring.size_bytes);
}

KernelsInfo CudaKernels::info() const {
  KernelsInfo info;
#ifdef TANDEM_SIMT
  info.backend = "simt";
  info.bf16_products = "converted to fp32";
#else
  info.backend = "cuda";
  info.bf16_products = fmt::format("{}, bf16 instructions", products_library_->name());
#endif
  info.instruction_set = device_.architecture;
  info.matrix_library = products_library_->name();
  return info;
}

void CudaKernels::synchronize() {
  memory_.synchronize();
  add_deferred();
}

void CudaKernels::add_deferred() {
  for (const Deferred& deferred : deferred_) *deferred.sum += *deferred.pinned;
  deferred_.clear();
}

// The stream orders a later upload to the same bytes behind what read the earlier one, so nothing is ever waited for. An
// operation's own uploads do not overlap as long as they are half the ring at most together: each is a sixteenth at most, and
// none has more than eight.
const void* CudaKernels::upload_bytes(const void* values, std::int64_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  const std::int64_t size = (size_bytes + kUploadAlignment - 1) / kUploadAlignment * kUploadAlignment;
  if (upload_rings_.empty() || size * kUploadShare > upload_rings_.back().size_bytes) {
    // Smaller rings stay: uploads of this operation may lie in them, and graphs know their addresses.
    const std::int64_t ring = std::max(kFirstUploadRing, 2 * kUploadShare * size);
    upload_rings_.push_back({memory_.reserve(ring), ring});
    upload_position_ = 0;
  }
  const UploadRing& ring = upload_rings_.back();
  if (upload_position_ + size > ring.size_bytes) upload_position_ = 0;
  void* const place = static_cast<std::byte*>(ring.address) + upload_position_;
  upload_position_ += size;
  memory_.write(values, place, size_bytes);
  return place;
}

double CudaKernels::read_double(const void* from) {
  double value = 0;
  memory_.read(from, &value, sizeof(value));
  return value;
}

void CudaKernels::add_later(const double* from, double& sum) {
  const std::size_t block = deferred_.size() / kDeferredBlock, place = deferred_.size() % kDeferredBlock;
  if (block == deferred_blocks_.size()) deferred_blocks_.emplace_back(allocate_pinned(kDeferredBlock * sizeof(double)));
  auto* const pinned = static_cast<double*>(deferred_blocks_[block].get()) + place;
  copy(pinned, from, sizeof(double), Direction::to_host, stream());
  deferred_.push_back({pinned, &sum});
}

void CudaKernels::begin_graph(std::uint64_t key) {
  if (!use_graphs_) return;
  TANDEM_CHECK(!graph_key_.has_value(), "a graph is being recorded already");
  graph_key_ = key;
  // The first calls of a key are issued as they come: kernels are loaded and products choose their algorithms, which nothing that
  // is recorded should have to wait for.
  const bool is_known = !graphs_.try_emplace(key).second;
  if (!is_known) return;
  begin_capture(stream());
  memory_.set_recording(true);
}

void CudaKernels::end_graph() {
  if (!use_graphs_) return;
  TANDEM_CHECK(graph_key_.has_value(), "no graph is being recorded");
  Graph& graph = graphs_.at(*graph_key_);
  graph_key_.reset();
  if (!memory_.recording()) return;
  try {
    graph = Graph(end_capture(stream(), graph.give_up()));
    launch(graph.get(), stream());
  } catch (...) {
    memory_.set_recording(false);
    throw;
  }
  memory_.set_recording(false);
}

std::string why_none() {
  std::string why;
  static_cast<void>(devices(&why));
  return why;
}

GpuDevice describe(int device) {
  const std::vector<DeviceInfo> found = devices();
  TANDEM_CHECK(device >= 0 && device < static_cast<int>(found.size()), fmt::format("GPU {} of {}", device, found.size()));
  const DeviceInfo& info = found[static_cast<std::size_t>(device)];
  return {info.name, info.multiprocessors, info.memory_bytes, info.l2_bytes};
}

std::unique_ptr<Kernels> make_kernels(const CudaKernelsOptions& options) {
  std::string why;
  const std::vector<DeviceInfo> found = devices(&why);
  if (found.empty()) throw InputError(why);
  if (options.device < 0 || options.device >= static_cast<int>(found.size())) {
    throw InputError(fmt::format("there is no GPU {}; there are {}, counted from 0", options.device, found.size()));
  }
  return std::make_unique<CudaKernels>(options, found[static_cast<std::size_t>(options.device)]);
}

}  // namespace tandem::TANDEM_GPU
