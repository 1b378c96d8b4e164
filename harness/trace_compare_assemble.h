// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/io/trace_file.h"

namespace tandem {

/// All entries of one tensor.
struct TracedGroup {
  std::string name;
  TraceKind kind = TraceKind::activation;
  std::vector<std::size_t> entries;  ///< indices into the source's, by rank and micro-batch
};

/// Every tensor of a trace in the order in which its first entry was recorded.
[[nodiscard]] std::vector<TracedGroup> group_by_tensor(const TraceSource& source);

/// Groups in the order of execution: parameters, activations, gradients; each parameter gradient after the gradient of the module
/// that computes it.
[[nodiscard]] std::vector<TracedGroup> in_execution_order(std::vector<TracedGroup> groups);

/// A global tensor put together from its entries.
struct AssembledTensor {
  static constexpr std::int32_t kMissing = -1;  ///< in no entry
  static constexpr std::int32_t kSummed = -2;   ///< sum of several partial sums
  Shape shape;
  DType dtype = DType::f32;         ///< widest of the entries
  std::vector<double> values;       ///< row-major; 0 where missing
  std::vector<std::int32_t> owner;  ///< index of the entry that each value is from
  std::int64_t num_missing = 0;
  std::int64_t num_conflicts = 0;  ///< values that entries disagree about
  std::int64_t first_conflict = -1;
};

/// Partial sums are added. Of other values that several entries hold, the first counts; where `truth` is given (as many values as
/// the tensor has), the one farthest from it, so that no wrong replica hides behind a right one. Each value is divided by
/// `divisor`. Throws InputError where entries of one tensor have different numbers of elements, or only some of them are partial
/// sums.
[[nodiscard]] AssembledTensor assemble(const TraceSource& source, const TracedGroup& group,
                                       const std::vector<double>* truth = nullptr, double divisor = 1);

/// Hands every tensor of `source`, whole, to `consumer`, in the order recorded. Returns one line for each whose replicas differ.
/// Throws InputError where a part of a tensor is in no entry. Partial sums come out as fp64, others in the widest dtype of their
/// parts.
std::vector<std::string> merge_trace(const TraceSource& source, const TraceConsumer& consumer);

}  // namespace tandem
