// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/buckets.h"

#include <functional>
#include <tuple>

namespace tandem {
namespace {

std::vector<std::int64_t> offsets_of(const std::vector<LocalParameter>& parameters) {
  std::vector<std::int64_t> offsets = {0};
  for (const LocalParameter& parameter : parameters) offsets.push_back(offsets.back() + parameter.num_elements());
  return offsets;
}

// Consecutive parameters from the last to the first, as long as `joins(first, end)` lets the parameter `first` in.
std::vector<GradientBucket> joined(const std::vector<LocalParameter>& parameters,
                                   const std::function<bool(std::int64_t first, std::int64_t end)>& joins) {
  const std::vector<std::int64_t> offsets = offsets_of(parameters);
  std::vector<GradientBucket> buckets;
  auto end = static_cast<std::int64_t>(parameters.size());
  while (end > 0) {
    std::int64_t begin = end - 1;
    while (begin > 0 && joins(begin - 1, end)) --begin;
    buckets.push_back({{offsets[static_cast<std::size_t>(begin)], offsets[static_cast<std::size_t>(end)]},
                       {begin, end},
                       parameters[static_cast<std::size_t>(begin)].expert()});
    end = begin;
  }
  return buckets;
}

// Equal for parameters of one unit.
std::tuple<bool, int, int> unit_of(const ParameterSpec& spec) {
  if (spec.layer >= 0) return {spec.expert >= 0, spec.layer, 0};
  switch (spec.kind) {
    case ParameterKind::token_embedding: return {false, -1, 0};
    case ParameterKind::position_embedding: return {false, -1, 1};
    case ParameterKind::norm_weight:
    case ParameterKind::norm_bias: return {false, -1, 2};
    default: return {false, -1, 3};
  }
}

}  // namespace

std::vector<GradientBucket> gradient_buckets(const std::vector<LocalParameter>& parameters, std::int64_t bucket_bytes,
                                             std::int64_t element_bytes) {
  const std::vector<std::int64_t> offsets = offsets_of(parameters);
  return joined(parameters, [&](std::int64_t first, std::int64_t end) {
    const std::int64_t bytes =
        (offsets[static_cast<std::size_t>(end)] - offsets[static_cast<std::size_t>(first)]) * element_bytes;
    return parameters[static_cast<std::size_t>(first)].expert() == parameters[static_cast<std::size_t>(end - 1)].expert() &&
           (bucket_bytes == 0 || bytes <= bucket_bytes);
  });
}

std::vector<GradientBucket> parameter_units(const std::vector<LocalParameter>& parameters) {
  return joined(parameters, [&](std::int64_t first, std::int64_t end) {
    return unit_of(parameters[static_cast<std::size_t>(first)].spec) ==
           unit_of(parameters[static_cast<std::size_t>(end - 1)].spec);
  });
}

std::vector<GradientBucket> buckets_of(const TrainingPlan& plan, const std::vector<LocalParameter>& parameters) {
  if (plan.zero_stage > 0) return parameter_units(parameters);
  return gradient_buckets(parameters, plan.buckets.bucket_bytes, static_cast<std::int64_t>(size_bytes(plan.numerics.accumulate)));
}

std::vector<std::int64_t> part_sizes(const GradientBucket& unit, int ranks) {
  std::vector<std::int64_t> sizes;
  for (int rank = 0; rank < ranks; ++rank) sizes.push_back(balanced_part(unit.elements.size(), ranks, rank).size());
  return sizes;
}

}  // namespace tandem
