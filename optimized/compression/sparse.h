// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optimized/compression/codec.h"

/// What Top-K and random-K share: single elements are moved. Values lie at any alignment.
namespace tandem::detail {

/// Throws ContractError unless k >= 0.
void check_k(std::int64_t k);

/// Throws ContractError for more elements than int32 indices reach: nothing wraps around.
void check_indexable(std::int64_t elements);

/// values[i] = c[indices[i]], and 0 there in new_residual, which holds c unless it is empty.
void take(std::span<const std::int32_t> indices, const CompressCall& call, std::byte* values);

/// out[indices[i]] = or += values[i]. Throws ContractError on an index outside.
void scatter(std::span<const std::int32_t> indices, const std::byte* values, std::span<float> out);
void scatter_accumulate(std::span<const std::int32_t> indices, const std::byte* values, std::span<float> sum);

}  // namespace tandem::detail
