// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/buckets.h"

namespace tandem {

std::vector<GradientBucket> gradient_buckets(const std::vector<LocalParameter>& parameters, std::int64_t bucket_bytes,
                                             std::int64_t element_bytes) {
  std::vector<std::int64_t> offsets = {0};
  for (const LocalParameter& parameter : parameters) offsets.push_back(offsets.back() + parameter.num_elements());
  const auto is_expert = [&](std::int64_t index) { return parameters[static_cast<std::size_t>(index)].expert(); };
  std::vector<GradientBucket> buckets;
  auto end = static_cast<std::int64_t>(parameters.size());
  while (end > 0) {
    const auto bytes_from = [&](std::int64_t first) {
      return (offsets[static_cast<std::size_t>(end)] - offsets[static_cast<std::size_t>(first)]) * element_bytes;
    };
    std::int64_t begin = end - 1;
    const bool experts = is_expert(begin);
    while (begin > 0 && is_expert(begin - 1) == experts && (bucket_bytes == 0 || bytes_from(begin - 1) <= bucket_bytes)) --begin;
    buckets.push_back(
        {{offsets[static_cast<std::size_t>(begin)], offsets[static_cast<std::size_t>(end)]}, {begin, end}, experts});
    end = begin;
  }
  return buckets;
}

}  // namespace tandem
