// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "kernels/kernels.h"

namespace tandem {

/// Seconds that one of `calls` calls of `body` takes on the clock of what runs them, issued together after one that is not
/// counted; the best of `rounds`. What is measured is the lane's time: it has no gaps as long as the calls are issued faster than
/// they run.
template <class Body>
[[nodiscard]] double seconds_per_call(Memory& memory, int rounds, int calls, const Body& body) {
  double best = 0;
  for (int round = 0; round < rounds; ++round) {
    body();
    const std::shared_ptr<Memory::Mark> begin = memory.mark(Memory::Timed::yes);
    for (int call = 0; call < calls; ++call) body();
    const std::shared_ptr<Memory::Mark> end = memory.mark(Memory::Timed::yes);
    const double seconds = static_cast<double>(end->time_ns() - begin->time_ns()) * 1e-9 / calls;
    best = round == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

/// A tensor in a memory, given back at the end of its life.
class OwnedTensor {
 public:
  OwnedTensor(Memory& memory, DType dtype, const Shape& shape)
      : memory_(memory), size_bytes_(tandem::num_elements(shape) * static_cast<std::int64_t>(tandem::size_bytes(dtype))) {
    view_ = TensorView(memory.reserve(size_bytes_), dtype, shape);
  }
  OwnedTensor(const OwnedTensor&) = delete;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  ~OwnedTensor() { memory_.give_back(view_.data(), size_bytes_); }
  [[nodiscard]] const TensorView& view() const noexcept { return view_; }

 private:
  Memory& memory_;
  std::int64_t size_bytes_;
  TensorView view_;
};

/// Numbers without a pattern, uniform in [-scale, scale): the same for the same seed. fp32 or of 16 bits.
void fill_with_noise(Memory& memory, const TensorView& tensor, std::uint32_t seed, float scale);

}  // namespace tandem
