// SPDX-License-Identifier: Apache-2.0
#include "kernels/memory.h"

#include <cstring>
#include <new>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "kernels/cpu/sum_in_order.h"

namespace tandem {
namespace {

// Everything is done when the call that asks for it returns.
class HostMark final : public Memory::Mark {
 public:
  void wait() override {}
  [[nodiscard]] bool reached() override { return true; }
  [[nodiscard]] std::int64_t time_ns() override { return time_ns_; }

 private:
  std::int64_t time_ns_ = Timeline::now_ns();
};

class HostMemory final : public Memory {
 public:
  [[nodiscard]] bool on_host() const noexcept override { return true; }
  [[nodiscard]] std::string_view description() const noexcept override { return "host"; }
  [[nodiscard]] bool holds(const void*) const noexcept override { return true; }

  [[nodiscard]] void* reserve(std::int64_t size_bytes) override {
    void* const address = ::operator new(static_cast<std::size_t>(size_bytes), kAlignment, std::nothrow);
    if (address == nullptr) throw IoError(fmt::format("no memory for {} more bytes", size_bytes));
    return address;
  }
  void give_back(void* address, std::int64_t) noexcept override { ::operator delete(address, kAlignment); }

  void copy(const void* from, void* to, std::int64_t size_bytes) override {
    if (size_bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(size_bytes));
  }
  void copy_rows(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride, std::int64_t row_bytes,
                 std::int64_t rows) override {
    for (std::int64_t row = 0; row < rows; ++row) {
      copy(static_cast<const std::byte*>(from) + row * from_stride, static_cast<std::byte*>(to) + row * to_stride, row_bytes);
    }
  }
  void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) override {
    if (size_bytes > 0) std::memset(to, value, static_cast<std::size_t>(size_bytes));
  }
  void write(const void* from_host, void* to, std::int64_t size_bytes) override { copy(from_host, to, size_bytes); }
  void read(const void* from, void* to_host, std::int64_t size_bytes) override { copy(from, to_host, size_bytes); }
  void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                    std::int64_t count) override {
    tandem::sum_in_order(dtype, sources, destinations, count);
  }
  void synchronize() override {}
  [[nodiscard]] std::shared_ptr<Mark> mark(Timed) override { return std::make_shared<HostMark>(); }
  void begin_after(Mark&) override {}
  [[nodiscard]] std::unique_ptr<Memory> new_lane() override { return std::make_unique<HostMemory>(); }

 private:
  static constexpr std::align_val_t kAlignment{256};
};

}  // namespace

Memory& host_memory() noexcept {
  static HostMemory memory;  // without state
  return memory;
}

void copy(Memory& memory, const TensorView& from, const TensorView& to) {
  TANDEM_CHECK(from.size_bytes() == to.size_bytes(), fmt::format("{} bytes to {}", from.size_bytes(), to.size_bytes()));
  memory.copy(from.data(), to.data(), from.size_bytes());
}

void read_tensor(Memory& memory, const TensorView& from, void* to_host) {
  Memory& own = memory.holds(from.data()) ? memory : host_memory();
  own.read(from.data(), to_host, from.size_bytes());
}

void write_tensor(Memory& memory, const void* from_host, const TensorView& to) {
  Memory& own = memory.holds(to.data()) ? memory : host_memory();
  own.write(from_host, to.data(), to.size_bytes());
}

HostView::HostView(Memory& memory, TensorView tensor, Access access)
    : memory_(memory), tensor_(tensor), view_(tensor), access_(access) {
  if (memory.on_host() || !tensor || !memory.holds(tensor.data())) return;
  const auto size = static_cast<std::size_t>(tensor.size_bytes());
  copy_ = std::make_unique<std::byte[]>(size);
  view_ = TensorView(copy_.get(), tensor.dtype(), tensor.shape());
  if (access != Access::write) memory.read(tensor.data(), copy_.get(), tensor.size_bytes());
}

HostView::~HostView() {
  try {
    finish();
  } catch (const std::exception&) {
    // The lane is broken: its next synchronize() says so.
  }
}

void HostView::finish() {
  if (copy_ == nullptr || access_ == Access::read) return;
  access_ = Access::read;
  memory_.write(copy_.get(), tensor_.data(), tensor_.size_bytes());
}

}  // namespace tandem
