// SPDX-License-Identifier: Apache-2.0
#include "optimized/zero/host_offload.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t kStagingBuffers = 2;

// One of the two is the host's, of a device that is none.
void copy_between(Memory& device, TensorView from, TensorView to) {
  if (device.on_host()) {
    device.copy(from.data(), to.data(), from.size_bytes());
  } else if (device.holds(to.data())) {
    device.write(from.data(), to.data(), from.size_bytes());
  } else {
    device.read(from.data(), to.data(), from.size_bytes());
  }
}

}  // namespace

// One way through the state: its chunks, the staging buffers, and which copies are under way. Chunk i lies in buffer i % 2.
class HostOffload::Pass {
 public:
  Pass(HostOffload& owner, std::span<const Interval> segments, Timeline* timeline, int step)
      : owner_(owner), chunks_(owner.chunks_of(segments)), timeline_(timeline), step_(step) {
    const std::int64_t elements = owner_.staging_elements(chunks_);
    const std::size_t blocks = std::min(kStagingBuffers, chunks_.size()) * tensors();
    for (std::size_t i = 0; i < blocks; ++i) {
      staging_.push_back(owner.device_.allocate(owner.options_.dtype, {elements}, MemoryCategory::workspace));
    }
    to_device_.resize(chunks_.size());
    to_host_.resize(chunks_.size());
    arrived_.resize(chunks_.size());
  }
  // The staging buffers belong to the transfer thread until it rests.
  ~Pass() {
    owner_.thread_.drain();
    try {
      owner_.lane_->synchronize();
    } catch (const std::exception&) {
      // The lane is broken: the rank's own says so.
    }
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void run(const Update& update) {
    // The fault is made as bad as it can get, and the same in every run: the copy of a chunk arrives after its update.
    const bool late = owner_.options_.pitfalls.on(Pitfall::offload_read_too_early);
    if (!late && !chunks_.empty()) copy_to_device(0);
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      // Queued behind the copy of chunk i - 1 to the host, from the same buffer.
      if (!late && i + 1 < chunks_.size()) copy_to_device(i + 1);
      if (!late) wait_for(to_device_[i]);
      if (!late) rank_lane().begin_after(*arrived_[i]);
      if (late && i >= kStagingBuffers) wait_for(to_host_[i - kStagingBuffers]);
      update_chunk(i, update);
      if (late) copy_to_device(i);
      copy_to_host(i);
    }
    if (!chunks_.empty()) wait_for(to_host_.back());
  }

 private:
  [[nodiscard]] std::size_t tensors() const { return owner_.host_.size(); }

  [[nodiscard]] TensorView on_device(std::size_t chunk, const Part& part, std::size_t tensor) const {
    const std::size_t block = chunk % kStagingBuffers * tensors() + tensor;
    const std::int64_t size = part.elements.size();
    return staging_[block].view(owner_.options_.dtype, {part.offset + size}).flat(part.offset, size);
  }
  [[nodiscard]] TensorView on_host(const Part& part, std::size_t tensor) const {
    return owner_.host(static_cast<int>(tensor)).flat(part.elements.begin, part.elements.size());
  }

  [[nodiscard]] Memory& rank_lane() const { return owner_.device_.memory(); }

  void copy_to_device(std::size_t chunk) {
    to_device_[chunk] = owner_.thread_.submit([this, chunk, free = rank_lane().mark()] {
      owner_.lane_->begin_after(*free);
      transfer("offload to device", chunk, owner_.traffic_.bytes_to_device, [&](const Part& part, std::size_t tensor) {
        return std::pair(on_host(part, tensor), on_device(chunk, part, tensor));
      });
      arrived_[chunk] = owner_.lane_->mark();
    });
  }
  void copy_to_host(std::size_t chunk) {
    to_host_[chunk] = owner_.thread_.submit([this, chunk, updated = rank_lane().mark()] {
      owner_.lane_->begin_after(*updated);
      transfer("offload to host", chunk, owner_.traffic_.bytes_to_host, [&](const Part& part, std::size_t tensor) {
        return std::pair(on_device(chunk, part, tensor), on_host(part, tensor));
      });
    });
  }

  // On the transfer thread. `ends` gives from and to.
  template <class Ends>
  void transfer(const char* name, std::size_t chunk, std::int64_t& bytes, const Ends& ends) {
    const ObservedRange range(timeline_, name, Activity::transfer);
    const std::int64_t begin_ns = Timeline::now_ns();
    for (const Part& part : chunks_[chunk]) {
      for (std::size_t tensor = 0; tensor < tensors(); ++tensor) {
        const auto [from, to] = ends(part, tensor);
        owner_.options_.copy(from, to);
        bytes += from.size_bytes();
      }
    }
    owner_.traffic_.transfer_ns += record(name, Activity::transfer, Lane::communication, begin_ns);
  }

  // Ends a span now and returns how long it was, so that spans and traffic tell the same.
  std::int64_t record(const char* name, Activity activity, Lane lane, std::int64_t begin_ns) {
    Span span;
    span.name = name;
    span.activity = activity;
    span.lane = lane;
    span.step = step_;
    span.begin_ns = begin_ns;
    span.end_ns = Timeline::now_ns();
    const std::int64_t length_ns = span.end_ns - span.begin_ns;
    if (timeline_ != nullptr) timeline_->record(std::move(span));
    return length_ns;
  }

  void wait_for(TransferThread::Ticket ticket) {
    const std::int64_t begin_ns = Timeline::now_ns();
    owner_.thread_.wait(ticket);
    owner_.traffic_.exposed_ns += record("wait for offload", Activity::wait, Lane::compute, begin_ns);
  }

  void update_chunk(std::size_t chunk, const Update& update) {
    const SpanScope span(timeline_, "update", Activity::optimizer, step_);
    std::vector<TensorView> views(tensors());
    for (const Part& part : chunks_[chunk]) {
      for (std::size_t tensor = 0; tensor < tensors(); ++tensor) views[tensor] = on_device(chunk, part, tensor);
      update({part.segment, part.elements, views});
    }
  }

  HostOffload& owner_;
  std::vector<Chunk> chunks_;
  Timeline* timeline_;
  int step_;
  std::vector<Arena::Buffer> staging_;  // [buffers, tensors]
  std::vector<TransferThread::Ticket> to_device_, to_host_;
  std::vector<std::shared_ptr<Memory::Mark>> arrived_;  // of the transfer thread, until a chunk has been waited for
};

HostOffload::HostOffload(Arena& device, Arena& host, const HostOffloadOptions& options)
    : device_(device), lane_(device.memory().new_lane()), options_(options) {
  TANDEM_CHECK(
      options.tensors >= 0 && options.elements >= 0 && options.chunk_elements >= 1,
      fmt::format("{} tensors of {} elements in chunks of {}", options.tensors, options.elements, options.chunk_elements));
  if (!options_.copy) options_.copy = [this](TensorView from, TensorView to) { copy_between(*lane_, from, to); };
  for (int tensor = 0; tensor < options.tensors; ++tensor) {
    host_.push_back(host.allocate(options.dtype, {options.elements}, MemoryCategory::optimizer));
  }
}

TensorView HostOffload::host(int tensor) const {
  TANDEM_CHECK(tensor >= 0 && tensor < options_.tensors, fmt::format("tensor {} of {}", tensor, options_.tensors));
  return host_[static_cast<std::size_t>(tensor)].view(options_.dtype, {options_.elements});
}

void HostOffload::for_each_chunk(std::span<const Interval> segments, const Update& update, Timeline* timeline, int step) {
  Pass(*this, segments, timeline, step).run(update);
}

std::vector<HostOffload::Chunk> HostOffload::chunks_of(std::span<const Interval> segments) const {
  std::vector<Chunk> chunks;
  std::int64_t after = 0;
  std::int64_t free = 0;  // elements left in the last chunk
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Interval& segment = segments[i];
    TANDEM_CHECK(segment.begin >= after && segment.end >= segment.begin && segment.end <= options_.elements,
                 fmt::format("segment {} is [{}, {}) of {} elements, and the one before ends at {}", i, segment.begin,
                             segment.end, options_.elements, after));
    after = segment.end;
    for (std::int64_t begin = segment.begin; begin < segment.end;) {
      if (free == 0) {
        chunks.emplace_back();
        free = options_.chunk_elements;
      }
      const std::int64_t size = std::min(free, segment.end - begin);
      chunks.back().push_back({i, {begin, begin + size}, options_.chunk_elements - free});
      begin += size;
      free -= size;
    }
  }
  return chunks;
}

std::int64_t HostOffload::staging_elements(const std::vector<Chunk>& chunks) const {
  if (chunks.size() != 1) return chunks.empty() ? 0 : options_.chunk_elements;
  const Part& last = chunks.front().back();
  return last.offset + last.elements.size();
}

std::int64_t HostOffload::staging_bytes(std::span<const Interval> segments) const {
  constexpr std::int64_t kUnit = 64;
  const std::vector<Chunk> chunks = chunks_of(segments);
  const std::int64_t bytes = staging_elements(chunks) * static_cast<std::int64_t>(size_bytes(options_.dtype));
  const auto buffers = static_cast<std::int64_t>(std::min(kStagingBuffers, chunks.size()));
  return buffers * options_.tensors * ((bytes + kUnit - 1) / kUnit * kUnit);
}

}  // namespace tandem
