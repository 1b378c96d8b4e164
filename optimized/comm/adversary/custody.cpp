// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/adversary/custody.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include <fmt/format.h>

namespace tandem::adversary {
namespace {

// The bytes of one element of a buffer under way: all ones but for the bit that tells quiet from signalling NaNs. Whoever adds to
// such a NaN makes it a quiet one, so that even sums leave a trace. Integers: all ones.
class Poison {
 public:
  explicit Poison(DType dtype) : width_(size_bytes(dtype)) {
    pattern_.fill(std::byte{0xFF});
    switch (dtype) {
      case DType::f64: pattern_[6] = std::byte{0xF7}; break;
      case DType::f32: pattern_[2] = std::byte{0xBF}; break;
      case DType::f16: pattern_[1] = std::byte{0xFD}; break;
      case DType::bf16: pattern_[0] = std::byte{0xBF}; break;
      default: break;
    }
  }
  [[nodiscard]] std::byte at(std::size_t byte) const { return pattern_[byte % width_]; }

 private:
  std::size_t width_;
  std::array<std::byte, 8> pattern_;  // little-endian
};

using Bytes = std::span<std::byte>;

Bytes bytes_of(TensorView view) {
  const std::int64_t size = view.size_bytes();
  return size == 0 ? Bytes() : Bytes(static_cast<std::byte*>(view.data()), static_cast<std::size_t>(size));
}

bool overlap(Bytes a, Bytes b) {
  if (a.empty() || b.empty()) return false;
  return a.data() < b.data() + b.size() && b.data() < a.data() + a.size();
}

std::size_t element_of(std::size_t byte, DType dtype) { return byte / size_bytes(dtype); }

}  // namespace

Custody::Custody(TensorView input, TensorView output, Memory& memory) : memory_(memory), input_(input), output_(output) {
  const Bytes in = bytes_of(input);
  const Bytes out = bytes_of(output);
  std::size_t in_place = 0;
  std::size_t out_place = in.size();
  if (overlap(in, out)) {
    in_place = static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, in.data() - out.data()));
    out_place = static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, out.data() - in.data()));
  }
  const std::size_t sent_place = std::max(in_place + in.size(), out_place + out.size());
  copies_bytes_ = static_cast<std::int64_t>(sent_place + in.size());
  if (copies_bytes_ > 0) copies_ = static_cast<std::byte*>(memory_.reserve(copies_bytes_));
  const auto copy_of = [&](TensorView view, std::size_t place) {
    const TensorView copy(view ? copies_ + place : nullptr, view.dtype(), view.shape());
    if (view.size_bytes() > 0) memory_.copy(view.data(), copy.data(), view.size_bytes());
    return copy;
  };
  input_copy_ = copy_of(input, in_place);
  output_copy_ = copy_of(output, out_place);
  sent_ = copy_of(input, sent_place);
  const Poison poison(output.dtype());
  std::vector<std::byte> pattern(out.size());
  for (std::size_t byte = 0; byte < out.size(); ++byte) pattern[byte] = poison.at(byte);
  if (!out.empty()) memory_.write(pattern.data(), out.data(), std::ssize(pattern));
}

Custody::~Custody() { give_back(); }

void Custody::give_back() noexcept {
  if (copies_ != nullptr) memory_.give_back(copies_, copies_bytes_);
  copies_ = nullptr;
}

std::optional<std::string> Custody::disturbance() const {
  const HostView input(memory_, input_, Access::read), output(memory_, output_, Access::read), sent(memory_, sent_, Access::read);
  const Bytes in = bytes_of(input.view());
  const Bytes out = bytes_of(output.view());
  const Bytes before = bytes_of(sent.view());
  const Poison poison(output_.dtype());
  for (std::size_t byte = 0; byte < out.size(); ++byte) {
    if (out[byte] != poison.at(byte))
      return fmt::format("element {} of the output was written", element_of(byte, output_.dtype()));
  }
  const Bytes callers = bytes_of(input_);
  const Bytes written = bytes_of(output_);
  for (std::size_t byte = 0; byte < in.size(); ++byte) {
    const bool is_output =
        !written.empty() && &callers[byte] >= written.data() && &callers[byte] < written.data() + written.size();
    if (!is_output && in[byte] != before[byte]) {
      return fmt::format("element {} of the input changed", element_of(byte, input_.dtype()));
    }
  }
  return std::nullopt;
}

void Custody::hand_back() {
  if (output_copy_.size_bytes() > 0) memory_.copy(output_copy_.data(), output_.data(), output_copy_.size_bytes());
  give_back();
}

}  // namespace tandem::adversary
