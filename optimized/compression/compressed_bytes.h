// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan.h"

namespace tandem {

/// A parameter, or this rank's part of one, whose gradient is compressed: a matrix, or a vector as one row.
struct CompressedTensor {
  std::string name;
  std::int64_t rows = 1;
  std::int64_t columns = 0;
  std::int64_t padding = 0;  ///< elements behind it in the gradient buffer that belong to nothing: neither sent nor touched
  [[nodiscard]] std::int64_t elements() const noexcept { return rows * columns; }
};

/// int8, int4, sign: ranks send codes of parts to the rank that sums them, and get codes of the sums.
[[nodiscard]] bool sums_at_owners(const CompressionConfig& config);
/// Whether this tensor travels as a code. power_sgd sends vectors, and matrices that its factors would not make smaller, as they
/// are.
[[nodiscard]] bool is_coded(const CompressionConfig& config, const CompressedTensor& tensor);
/// top_k, random_k: elements that each rank sends: round(density * elements), halves up, at least one.
[[nodiscard]] std::int64_t sent_elements(const CompressionConfig& config, std::int64_t elements);
/// What random_k draws by in place of a bucket: a hash of the name.
[[nodiscard]] std::int64_t random_k_key(std::string_view name);

/// Bytes b of a plain all_reduce that puts as much on the wire, over all `ranks` together 2 (ranks - 1) b, as the compressed sum
/// of one tensor does (reference/compressed_reduction.h has the formulas). A step program states communication so.
[[nodiscard]] std::int64_t equivalent_bytes(const CompressionConfig& config, const CompressedTensor& tensor, int ranks);

}  // namespace tandem
