// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/rng.h"
#include "kernels/kernels.h"
#include "optimized/comm/adversary_test_support.h"

/// Operations on the memory of an emulated GPU, which issues the work of a lane as late as it may: what does not wait for the
/// lane that makes its input reads what was there before.
namespace tandem::comm_test {

/// "simt", or what TANDEM_TEST_BACKEND says.
inline std::string device_backend() {
  const char* const name = std::getenv("TANDEM_TEST_BACKEND");
  return name != nullptr && *name != '\0' ? name : "simt";
}

inline void skip_without_gpu() {
  if (const std::string why = why_no_gpu(device_backend()); !why.empty()) GTEST_SKIP() << why;
}

using Bytes = std::vector<std::byte>;

struct Device {
  std::unique_ptr<Kernels> kernels = make_cuda_kernels(device_backend(), {});
  Memory& memory = kernels->memory();
};

class Buffer {
 public:
  Buffer(Memory& memory, std::size_t size)
      : memory_(memory), size_(static_cast<std::int64_t>(size)), data_(memory.reserve(size_)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { memory_.give_back(data_, size_); }
  [[nodiscard]] void* data() const { return data_; }
  void write(const Bytes& bytes) { memory_.write(bytes.data(), data_, size_); }
  void copy_to(const Buffer& other) const { memory_.copy(data_, other.data_, size_); }
  void fill(std::uint8_t value) { memory_.set_bytes(data_, value, size_); }
  [[nodiscard]] Bytes read() const {
    Bytes bytes(static_cast<std::size_t>(size_));
    memory_.read(data_, bytes.data(), size_);
    return bytes;
  }

 private:
  Memory& memory_;
  std::int64_t size_;
  void* data_;
};

// An operation on one buffer, in elements: it reads [0, input) and writes `output` elements from `output_at` on.
struct Layout {
  std::int64_t input = 0, output_at = 0, output = 0;
  [[nodiscard]] std::int64_t size() const { return std::max(input, output_at + output); }
};
struct Case {
  std::string name;
  std::function<Layout(int ranks, int rank)> layout;
  std::function<std::vector<Work>(Communicator&, TensorView input, TensorView output, const CommOptions&)> start;
};

inline std::vector<Work> one(Work work) {
  std::vector<Work> works;
  works.push_back(std::move(work));
  return works;
}

inline std::int64_t of(const Counts& counts, int rank) { return counts[static_cast<std::size_t>(rank)]; }

inline std::vector<Work> ring(Communicator& comm, TensorView input, TensorView output, const CommOptions& options) {
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  std::vector<Work> works = one(comm.send(input, next, {3, 1, 2, 1}, options));
  works.push_back(comm.recv(output, previous, {3, 1, 2, 1}, options));
  return works;
}

inline std::vector<Work> across(Communicator& comm, TensorView input, TensorView output, const CommOptions& options) {
  std::vector<Work> works;
  if (input.num_elements() > 0) works.push_back(comm.send(input, comm.size() - 1, {}, options));
  if (output.num_elements() > 0) works.push_back(comm.recv(output, 0, {}, options));
  return works;
}

inline void add_parts_cases(std::vector<Case>& all) {
  const auto scatter = [](Communicator& comm, TensorView input, TensorView output, const CommOptions& options) {
    return one(comm.reduce_scatter(input, output, uneven(comm.size()), options));
  };
  all.push_back({"reduce_scatter",
                 [](int ranks, int rank) {
                   const Counts counts = uneven(ranks);
                   return Layout{total_of(counts), total_of(counts), of(counts, rank)};
                 },
                 scatter});
  all.push_back({"reduce_scatter in place",
                 [](int ranks, int rank) {
                   const Counts counts = uneven(ranks);
                   return Layout{total_of(counts), before(counts, rank), of(counts, rank)};
                 },
                 scatter});
  all.push_back({"all_gather",
                 [](int ranks, int rank) {
                   const Counts counts = uneven(ranks);
                   return Layout{of(counts, rank), of(counts, rank), total_of(counts)};
                 },
                 [](Communicator& comm, TensorView input, TensorView output, const CommOptions& options) {
                   return one(comm.all_gather(input, output, uneven(comm.size()), options));
                 }});
  all.push_back({"all_gather in place",
                 [](int ranks, int) {
                   return Layout{0, 0, total_of(uneven(ranks))};
                 },
                 [](Communicator& comm, TensorView, TensorView output, const CommOptions& options) {
                   const Counts counts = uneven(comm.size());
                   const TensorView own = output.flat(before(counts, comm.rank()), of(counts, comm.rank()));
                   return one(comm.all_gather(own, output, counts, options));
                 }});
}

inline std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({"all_reduce",
                 [](int, int) {
                   return Layout{517, 0, 517};
                 },
                 [](Communicator& comm, TensorView, TensorView data, const CommOptions& options) {
                   return one(comm.all_reduce(data, options));
                 }});
  add_parts_cases(all);
  all.push_back({"all_to_all",
                 [](int ranks, int rank) {
                   const Counts counts = uneven(ranks);
                   return Layout{total_of(counts), total_of(counts), ranks * of(counts, rank)};
                 },
                 [](Communicator& comm, TensorView input, TensorView output, const CommOptions& options) {
                   const Counts sent = uneven(comm.size());
                   return one(comm.all_to_all(input, sent, output, Counts(sent.size(), of(sent, comm.rank())), options));
                 }});
  all.push_back({"broadcast",
                 [](int, int) {
                   return Layout{300, 0, 300};
                 },
                 [](Communicator& comm, TensorView, TensorView data, const CommOptions& options) {
                   return one(comm.broadcast(data, comm.size() - 1, options));
                 }});
  all.push_back({"messages around the ring", [](int, int) { return Layout{129, 129, 129}; }, ring});
  all.push_back({"message from the first rank to the last",
                 [](int ranks, int rank) {
                   return Layout{rank == 0 ? 129 : 0, 129, rank == ranks - 1 ? 129 : 0};
                 },
                 across});
  return all;
}

// Numbers of which every order of addition has another sum.
inline Bytes numbers(DType dtype, std::int64_t count, int rank) {
  CounterRng rng(11, "device numbers", static_cast<std::uint64_t>(rank));
  Bytes bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(rng.next_unit() - 0.5);
    const auto* const begin = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), begin + (dtype == DType::bf16 ? 2 : 0), begin + 4);
  }
  return bytes;
}

inline std::vector<Work> start(Communicator& comm, const Case& operation, DType dtype, void* data, const CommOptions& options) {
  const Layout layout = operation.layout(comm.size(), comm.rank());
  const TensorView whole(data, dtype, {layout.size()});
  return operation.start(comm, whole.flat(0, layout.input), whole.flat(layout.output_at, layout.output), options);
}

inline void wait_for(std::vector<Work>& works) {
  for (Work& work : works) work.wait_host();
}

inline Bytes on_host(Communicator& comm, const Case& operation, DType dtype, const CommOptions& options) {
  Bytes data = numbers(dtype, operation.layout(comm.size(), comm.rank()).size(), comm.rank());
  std::vector<Work> works = start(comm, operation, dtype, data.data(), options);
  wait_for(works);
  return data;
}

// An operation on a buffer that the lane is still writing when it is called, and that the lane reads for the last time just
// before.
class OnDevice {
 public:
  OnDevice(Communicator& comm, Memory& memory, const Case& operation, DType dtype)
      : comm_(comm),
        operation_(operation),
        dtype_(dtype),
        numbers_(numbers(dtype, operation.layout(comm.size(), comm.rank()).size(), comm.rank())),
        made_(memory, numbers_.size()),
        data_(memory, numbers_.size()),
        seen_(memory, numbers_.size()),
        result_(memory, numbers_.size()) {
    made_.write(numbers_);
    data_.fill(0x3F);
    memory.synchronize();
  }

  void begin(const CommOptions& options) {
    made_.copy_to(data_);
    data_.copy_to(seen_);
    works_ = start(comm_, operation_, dtype_, data_.data(), options);
  }
  [[nodiscard]] std::vector<Work>& works() { return works_; }
  // Overwritten at once: no rank may still be reading it.
  void end() {
    data_.copy_to(result_);
    data_.fill(0xFF);
  }
  void expect(const Bytes& expected, const std::string& what) const {
    EXPECT_EQ(result_.read(), expected) << what << " on rank " << comm_.rank();
    EXPECT_EQ(seen_.read(), numbers_) << what << " on rank " << comm_.rank() << ": written before it was read";
  }

 private:
  Communicator& comm_;
  const Case& operation_;
  DType dtype_;
  Bytes numbers_;
  Buffer made_, data_, seen_, result_;
  std::vector<Work> works_;
};

}  // namespace tandem::comm_test
