// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/batch.h"
#include "reference/gpt.h"
#include "reference/tensors.h"

/// Ranks that work on one model together, simulated in lockstep: what each holds is an element of a vector, every line of a pass
/// runs for all of them before the next line does, and a collective is a plain loop over the vector.
namespace tandem::reference {

/// Element r: what rank r holds.
template <class Real>
using PerRank = std::vector<std::vector<Real>>;

/// values[0] + values[1] + ..., added in that order in Real: what an all-reduce gives to every rank. All of one length.
template <class Real>
[[nodiscard]] std::vector<Real> sum_over_ranks(const PerRank<Real>& values);

/// values[0], then values[1], ...: what an all-gather gives to every rank.
template <class Real>
[[nodiscard]] std::vector<Real> joined_over_ranks(const PerRank<Real>& values);

/// Parameters of one rank, its slices under their global names, and the gradients of these slices.
template <class Real>
struct LockstepRank {
  NamedTensors<Real> parameters;
  NamedTensors<Real> gradients;
};

/// Output and statistics of one layer norm on every rank.
template <class Real>
struct NormOfRanks {
  PerRank<Real> out;                ///< [own tokens, hidden]
  PerRank<Real> mean;               ///< [own tokens]
  PerRank<Real> reciprocal_stddev;  ///< [own tokens]
};

/// The operators of a block on every rank. `name` picks the parameters `name`.weight and `name`.bias of each rank. Gradients of
/// parameters are added to those of the rank.
///
/// norm: y_r = layer_norm(x_r), of each rank's own tokens [own tokens, hidden].
template <class Real>
[[nodiscard]] NormOfRanks<Real> norm_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name,
                                             double epsilon, const PerRank<Real>& x);
/// Returns dx_r.
template <class Real>
[[nodiscard]] PerRank<Real> norm_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& x,
                                          const NormOfRanks<Real>& kept, const PerRank<Real>& dy);

/// Column-parallel linear layer: W = [W_0 W_1 ...] by columns, y_r = x W_r + b_r with the same x [tokens, in] on every rank;
/// y_r [tokens, columns of r].
template <class Real>
[[nodiscard]] PerRank<Real> column_linear_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name,
                                                  const PerRank<Real>& x);
/// dW_r += x^T dy_r, db_r += sum dy_r; returns dy_r W_r^T, of which the gradient of x is the *sum over ranks*.
template <class Real>
[[nodiscard]] PerRank<Real> column_linear_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name,
                                                   const PerRank<Real>& x, const PerRank<Real>& dy);

/// Row-parallel linear layer: W stacked from W_0, W_1, ... by rows, x_r [tokens, rows of r of W]; returns x_r W_r [tokens, out],
/// of which y is the *sum over ranks* plus b. The bias is added by bias_forward() after that sum, once.
template <class Real>
[[nodiscard]] PerRank<Real> row_linear_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name,
                                               const PerRank<Real>& x);
/// dW_r += x_r^T dy with the same dy [tokens, out] on every rank; returns dx_r = dy W_r^T.
template <class Real>
[[nodiscard]] PerRank<Real> row_linear_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name,
                                                const PerRank<Real>& x, const PerRank<Real>& dy);

/// y_r += b on each rank's own tokens [own tokens, out].
template <class Real>
void bias_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name, PerRank<Real>& y);
/// db += sum over own tokens of dy_r.
template <class Real>
void bias_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& dy);

/// Where the tokens of a batch lie in the global batch: row_id * sequence + index in the row, [rows, sequence of the batch].
/// `sequence` is the model's. Element (token, channel) of a mask of `width` channels is place * width + channel.
[[nodiscard]] std::vector<std::int64_t> token_places(const Batch& batch, std::int64_t sequence);

/// y = x * factor for tokens at these places: x, y [places, width]; x and y may be the same.
template <class Real>
void apply_dropout_at(const Dropout& dropout, std::span<const std::int64_t> places, std::span<const Real> x, std::span<Real> y);

/// a_r + b_r.
template <class Real>
[[nodiscard]] PerRank<Real> add_ranks(const PerRank<Real>& a, const PerRank<Real>& b);

}  // namespace tandem::reference
