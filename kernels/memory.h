// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/tensor.h"

namespace tandem {

/// Where the tensors lie that a rank computes with, and how bytes get in, out and about. On a GPU its addresses mean nothing to
/// the host: what reads or writes a tensor's elements is a Kernels call, a call of this class, or a HostView.
///
/// Calls take effect in the order of issue, together with those of the Kernels that this is the memory of: a Memory is a *lane*,
/// one stream of a device. Only read(), synchronize() and Mark::wait() block; the others return at once. One thread at a time.
class Memory {
 public:
  virtual ~Memory() = default;

  /// Host code may read and write it through pointers, at once.
  [[nodiscard]] virtual bool on_host() const noexcept = 0;
  /// "host", "NVIDIA H200 (device 0)", "emulated GPU": for texts.
  [[nodiscard]] virtual std::string_view description() const noexcept = 0;
  /// Whether `address` lies in memory that reserve() of a lane of this kind gave out. Host: true for any address.
  [[nodiscard]] virtual bool holds(const void* address) const noexcept = 0;

  /// Large reservations, for Arena; 256-byte aligned, contents undefined. Throws IoError where there is none left.
  [[nodiscard]] virtual void* reserve(std::int64_t size_bytes) = 0;
  /// After the lane's work so far.
  virtual void give_back(void* address, std::int64_t size_bytes) noexcept = 0;

  /// to <- from, within this memory; they do not overlap.
  virtual void copy(const void* from, void* to, std::int64_t size_bytes) = 0;
  /// `rows` runs of `row_bytes`, `from_stride` and `to_stride` bytes apart.
  virtual void copy_rows(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride, std::int64_t row_bytes,
                         std::int64_t rows) = 0;
  virtual void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) = 0;
  /// to <- host memory. What is at `from_host` may change as soon as the call returns.
  virtual void write(const void* from_host, void* to, std::int64_t size_bytes) = 0;
  /// host memory <- from, after the lane's work so far. Blocks.
  virtual void read(const void* from, void* to_host, std::int64_t size_bytes) = 0;
  /// destinations[d][i] = ((sources[0][i] + sources[1][i]) + ...) for i < count and every d, in `dtype`; 16-bit floats are added
  /// in fp32 and rounded once. A destination may be one of the sources. The definition of kernels/cpu/sum_in_order.h, with the
  /// same bits but for NaN, of which a GPU may give another one. On a device: at most 64 sources and 64 destinations, addresses
  /// multiples of the element's size.
  virtual void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                            std::int64_t count) = 0;
  /// Blocks until the lane's work so far is done. Throws what went wrong in it.
  virtual void synchronize() = 0;

  /// A point in a lane's work. May outlive the lane.
  class Mark {
   public:
    virtual ~Mark() = default;
    /// Blocks until the work before the mark is done. Any thread.
    virtual void wait() = 0;
    [[nodiscard]] virtual bool reached() = 0;
    /// When it was reached, on the clock of Timeline::now_ns(), as near as the device's own clock can be set to it
    /// (docs/measuring.md); blocks until then. Only of marks that were made timed.
    [[nodiscard]] virtual std::int64_t time_ns() = 0;
  };
  enum class Timed : std::uint8_t { no, yes };
  [[nodiscard]] virtual std::shared_ptr<Mark> mark(Timed timed = Timed::no) = 0;
  /// The lane's later work begins after the mark, which may be of another lane. Does not block.
  virtual void begin_after(Mark& mark) = 0;
  /// A further lane of the same memory, with an order of its own, to be used by another thread.
  [[nodiscard]] virtual std::unique_ptr<Memory> new_lane() = 0;
};

/// Plain memory of this process; one object for all, used by any thread.
[[nodiscard]] Memory& host_memory() noexcept;

/// to <- from, equally many bytes of tensors in `memory`.
void copy(Memory& memory, const TensorView& from, const TensorView& to);

// Between a tensor, which is in `memory` or, where memory does not hold it, the host's own, and host memory of its size.
// read_tensor() blocks.
void read_tensor(Memory& memory, const TensorView& from, void* to_host);
void write_tensor(Memory& memory, const void* from_host, const TensorView& to);

enum class Access : std::uint8_t { read, write, update };

/// A tensor as host code may touch it: the tensor itself where its memory is the host's, or `memory` does not hold it (state that
/// was left with the host); else a copy that is read when this is made (unless Access::write) and written back at the end of its
/// life or by finish() (unless Access::read).
///
///   HostView logits(memory, tensor, Access::update);
///   for (float& x : logits.view().as<float>()) x *= 2;
class HostView {
 public:
  HostView(Memory& memory, TensorView tensor, Access access);
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;
  ~HostView();

  [[nodiscard]] const TensorView& view() const noexcept { return view_; }
  /// Writes back now, and no more later; for whoever wants to know of errors.
  void finish();

 private:
  Memory& memory_;
  TensorView tensor_, view_;
  Access access_;
  std::unique_ptr<std::byte[]> copy_;  // null: view_ is the tensor itself
};

}  // namespace tandem
