// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/sparse.h"

#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::detail {
namespace {

template <class Function>
void for_each_value(std::span<const std::int32_t> indices, const std::byte* values, std::span<float> out,
                    const Function& function) {
  for (const std::int32_t index : indices) {
    float value;
    std::memcpy(&value, values, sizeof value);
    values += sizeof value;
    TANDEM_CHECK(index >= 0 && static_cast<std::size_t>(index) < out.size(),
                 fmt::format("index {} of {} elements in a payload", index, out.size()));
    function(out[static_cast<std::size_t>(index)], value);
  }
}

}  // namespace

void check_k(std::int64_t k) { TANDEM_CHECK(k >= 0, fmt::format("k is {}", k)); }

void check_indexable(std::int64_t elements) {
  TANDEM_CHECK(elements <= std::numeric_limits<std::int32_t>::max(),
               fmt::format("{} elements are more than int32 indices reach: use smaller buckets", elements));
}

void take(std::span<const std::int32_t> indices, const CompressCall& call, std::byte* values) {
  const float* const c = call.new_residual.empty() ? call.gradient.data() : call.new_residual.data();
  for (const std::int32_t index : indices) {
    std::memcpy(values, c + index, sizeof(float));
    values += sizeof(float);
    if (!call.new_residual.empty()) call.new_residual[static_cast<std::size_t>(index)] = 0.0F;
  }
}

void scatter(std::span<const std::int32_t> indices, const std::byte* values, std::span<float> out) {
  for_each_value(indices, values, out, [](float& element, float value) { element = value; });
}

void scatter_accumulate(std::span<const std::int32_t> indices, const std::byte* values, std::span<float> sum) {
  for_each_value(indices, values, sum, [](float& element, float value) { element += value; });
}

}  // namespace tandem::detail
