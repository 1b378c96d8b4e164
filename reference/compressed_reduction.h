// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/plan.h"

/// The sum of gradients over ranks that send lossy codes of them (reference/compression.h), on N ranks in lockstep, one parameter
/// at a time: parameters do not influence each other, whatever buckets they travel in.
namespace tandem::reference {

/// A parameter, or the part of one that the ranks of the group hold.
struct CodedTensor {
  std::string name;
  std::int64_t rows = 1;
  std::int64_t columns = 0;
  [[nodiscard]] std::int64_t num_elements() const { return rows * columns; }
};

/// What is left over from earlier steps. A vector without elements is zero.
template <class Real>
struct ReductionState {
  std::vector<std::vector<Real>> residuals;  ///< [ranks][elements] of each rank's own gradient
  std::vector<Real> sum_residual;            ///< [elements] int8, int4, sign: of the sum, kept once in the group
  std::vector<Real> start;                   ///< [rank, columns] power_sgd: right factor
};

template <class Real>
struct ReducedTensor {
  /// False where a rank's code, or that of the sum, does not exist (compression.h). `sum` is then NaN throughout, so that whoever
  /// looks at the gradient sees it, `sent` is empty, `next` the old state.
  bool finite = true;
  std::vector<std::vector<Real>> sent;  ///< [ranks][elements] what each rank's payload decodes to
  std::vector<Real> sum;                ///< [elements] the same on all ranks
  ReductionState<Real> next;
};

/// c_n = gradient_n + residual_n, d_n = decode(code(c_n)), residual_n <- c_n - d_n on rank n; then
///   int8, int4, sign   s = ((d_0 + d_1) + ...) + sum_residual;  sum = decode(code(s));  sum_residual <- s - sum
///                      (the sum goes back as a code too: what that leaves out must not be lost either)
///   top_k, random_k    sum = (d_0 + d_1) + ...      of k = sent_elements() each; random_k: the same elements on all ranks,
///                      RandomChoice{seed, step, random_k_key(name)}
///   power_sgd          sum = N times the approximation of the mean; matrices for which the factors are no smaller, and vectors,
///                      are summed as they are
/// Without error feedback all residuals are zero and stay so. Of `next` minus the old state, for every element:
///   sum + sum_residual' + sum over n of residual_n'  =  sum over n of gradient_n + sum_residual + sum over n of residual_n
/// but for the rounding of each addition.
template <class Real>
[[nodiscard]] ReducedTensor<Real> compressed_sum(const CompressionConfig& config, std::uint64_t seed, std::int64_t step,
                                                 const CodedTensor& tensor, const std::vector<std::vector<Real>>& gradients,
                                                 const ReductionState<Real>& state);

/// Zero residuals, and the first right factor where there is one.
template <class Real>
[[nodiscard]] ReductionState<Real> initial_reduction_state(const CompressionConfig& config, std::uint64_t seed,
                                                           const CodedTensor& tensor, int ranks);

/// round(density * elements), halves up, at least 1, at most all.
[[nodiscard]] std::int64_t sent_elements(double density, std::int64_t elements);
/// First 63 bits of XXH3 of the name: what stands for the bucket in RandomChoice, so that no bucket's bounds matter.
[[nodiscard]] std::int64_t random_k_key(const std::string& name);
/// power_sgd: whether both factors together are smaller than the matrix.
[[nodiscard]] bool has_factors(const CompressionConfig& config, const CodedTensor& tensor);

/// What N ranks together put on the wire for the sum of one tensor, p the bytes of one payload (compression.h), e elements:
///   none 2 (N-1) 4 e;  int8, int4, sign 2 (N-1) p;  top_k N (N-1) p;  random_k 2 (N-1) p;  power_sgd 2 (N-1) p, or as none
[[nodiscard]] std::int64_t compressed_sum_bytes(const CompressionConfig& config, const CodedTensor& tensor, int ranks);

}  // namespace tandem::reference
