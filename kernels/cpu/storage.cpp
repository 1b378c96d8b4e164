// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/storage.h"

#include <cstring>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::cpu {

void widen(const VectorTables& tables, const void* from, DType dtype, float* to, std::int64_t count) {
  if (is_16bit(dtype)) {
    half_ops(tables, dtype).widen(static_cast<const std::uint16_t*>(from), to, count);
  } else {
    TANDEM_CHECK(dtype == DType::f32, fmt::format("{} is not widened to fp32", name(dtype)));
    if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  }
}

void narrow(const VectorTables& tables, const float* from, DType dtype, void* to, std::int64_t count) {
  if (is_16bit(dtype)) {
    half_ops(tables, dtype).narrow(from, static_cast<std::uint16_t*>(to), count);
  } else {
    TANDEM_CHECK(dtype == DType::f32, fmt::format("fp32 is not narrowed to {}", name(dtype)));
    if (count > 0) std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  }
}

float* Pieces::take(std::int64_t count) {
  float* piece = begin_;
  TANDEM_CHECK(padded(count) <= end_ - begin_, "a piece does not fit the scratch that was reserved");
  begin_ += padded(count);
  return piece;
}

void Pieces::remember(const Output& output) {
  TANDEM_CHECK(static_cast<std::size_t>(num_outputs_) < outputs_.size());
  outputs_[static_cast<std::size_t>(num_outputs_++)] = output;
}

void Pieces::store() {
  for (int i = 0; i < num_outputs_; ++i) {
    const Output& output = outputs_[static_cast<std::size_t>(i)];
    narrow(*tables_, output.copy, output.tensor.dtype(), element(output.tensor, output.first), output.count);
  }
  num_outputs_ = 0;
}

}  // namespace tandem::cpu
