// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

/// Lossy compression of gradients with error feedback: what is not sent in one step is added to the gradient of the next.
///
///   c = gradient + residual;  payload = code(c);  decompressed = decode(payload);  residual <- c - decompressed
///
/// (Seide et al., "1-bit stochastic gradient descent", 2014; Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", 2018;
/// Karimireddy et al., "Error feedback fixes SignSGD", 2019.) Each operation is rounded to Real. What that leaves of
/// decompressed + residual = c, the law that nothing is lost:
///   - INT8, INT4: exact. Where q != 0, c lies between decompressed / 2 and 2 decompressed, so the difference is a number of Real
///     (Sterbenz); where q = 0 it is c. A receiver decodes q * scale rounded, therefore a fused multiply-add in the residual
///     would break the law by its missing rounding.
///   - Top-K, random-K: exact, elements are moved and never computed with.
///   - sign, PowerSGD: |decompressed + residual - c| <= u |residual|, u the unit roundoff: the subtraction rounds once.
/// The sum gradient + residual rounds once, in every codec. Over steps, the sum of what was sent plus the last residual is the
/// sum of the gradients up to those roundings. (The double instances are the truth for the float ones, not for another order.)
namespace tandem::reference {

template <class Real>
struct Compressed {
  /// False where an element of c is infinite or NaN, or so large that its block decodes to infinity. Then nothing is sent:
  /// `decompressed` and the payload are empty, `residual` is the old one. The step must be skipped by all ranks.
  bool finite = true;
  std::vector<std::int32_t> codes;    ///< INT8, INT4: q of each element; sign: 1 where the sign bit of c is set, else 0
  std::vector<std::int32_t> indices;  ///< Top-K: ascending, sent; random-K: ascending, known to every rank and not sent
  std::vector<Real> values;           ///< INT8, INT4, sign: scale of each block; Top-K, random-K: c[indices[i]]
  std::vector<Real> decompressed;
  std::vector<Real> residual;  ///< c - decompressed; a caller without error feedback drops it
};

// In all that follow `residual` has as many elements as `gradient`, or none where there is no error feedback or no step yet (c =
// gradient). Wrong sizes throw ContractError.

/// Signed integers of `bits` = 8 or 4 in blocks of `block` >= 1 consecutive elements, the last one shorter. L = 127 or 7:
///   scale = max |c| / L over the block;  q = c / scale, rounded half to even, clamped to [-L, L]; 0 where the scale is 0
///   decoded: q * scale
/// The clamp acts only where scale is subnormal and has lost digits.
template <class Real>
[[nodiscard]] Compressed<Real> quantize_blocks(std::span<const Real> gradient, std::span<const Real> residual, int bits,
                                               std::int64_t block);

/// The min(k, elements) elements of largest |c|; of equal ones those of smaller index. Decoded: c there, 0 elsewhere.
template <class Real>
[[nodiscard]] Compressed<Real> top_k(std::span<const Real> gradient, std::span<const Real> residual, std::int64_t k);

/// What the indices of random-K depend on: nothing that differs between ranks.
struct RandomChoice {
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t bucket = 0;
};

/// k different numbers of [0, count), ascending, each set of k equally likely: Floyd's algorithm (Bentley, "Programming pearls: a
/// sample of brilliance", 1987). For j = count - k, ..., count - 1: t uniform in [0, j]; t is chosen, or j where t already is.
/// The draws are next_below(j + 1) of CounterRng(seed, "random_k STEP BUCKET"), the two in decimal.
[[nodiscard]] std::vector<std::int32_t> random_indices(const RandomChoice& choice, std::int64_t k, std::int64_t count);

/// The min(k, elements) elements at random_indices(). Decoded: c there, 0 elsewhere. Not multiplied by elements / k: with error
/// feedback that would make the residual grow, so without feedback the expectation is k / elements of the gradient.
template <class Real>
[[nodiscard]] Compressed<Real> random_k(std::span<const Real> gradient, std::span<const Real> residual, std::int64_t k,
                                        const RandomChoice& choice);

/// One bit per element: scale = mean |c| over a block of `block` elements; decoded: -scale where the sign bit of c is set (-0
/// too), else scale. The mean is summed in double in 16 lanes: lane l adds |c| of the block's elements l, l + 16, ... in order,
/// the lanes are added in order, the quotient is rounded to Real.
template <class Real>
[[nodiscard]] Compressed<Real> sign_blocks(std::span<const Real> gradient, std::span<const Real> residual, std::int64_t block);

/// PowerSGD (Vogels, Karimireddy, Jaggi, 2019, algorithms 1 and 2) of one matrix [rows, columns] on N ranks in lockstep.
template <class Real>
struct PowerSgdStep {
  /// False where an element of any rank's C, P or Q is infinite or NaN: the step must be skipped. `next_q` and `residuals` are
  /// then the old ones, everything else is empty.
  bool finite = true;
  std::vector<Real> p;                       ///< [rank, rows] left factor, orthonormal rows (or zero), equal on all ranks
  std::vector<Real> q;                       ///< [rank, columns] right factor, mean over ranks
  std::vector<Real> next_q;                  ///< [rank, columns] start of the next step
  std::vector<Real> decompressed;            ///< [rows, columns] approximates the mean of C_n, equal on all ranks
  std::vector<std::vector<Real>> residuals;  ///< [ranks][rows, columns]
};

/// Factors are stored row by row of their transpose: p[j] and q[j] are vectors. C_n = gradient + residual of rank n.
///   P_n[j] = C_n q[j];  p = orthogonalize(mean of P_n);  Q_n[j] = C_n^T p[j];  q = mean of Q_n
///   decompressed = sum over j of p[j] q[j]^T;  residual_n <- C_n - sum over j of p[j] Q_n[j]^T
/// so each rank keeps what *its own* part of the sum left out, and what ranks sent plus their residuals is C_n per rank too.
/// `q` in: the warm start, power_sgd_start() before the first step. next_q[j] is q[j], or the old one where the new is zero: a
/// direction that died with a zero or rank-deficient gradient would never come back. Sums run in double; results are Real.
template <class Real>
[[nodiscard]] PowerSgdStep<Real> power_sgd(std::span<const std::vector<Real>> gradients,
                                           std::span<const std::vector<Real>> residuals, std::int64_t rows, std::int64_t columns,
                                           std::span<const Real> q);

/// [rank, columns]: standard normal numbers, parameter_normal(seed, "power_sgd/" + name, index).
template <class Real>
[[nodiscard]] std::vector<Real> power_sgd_start(std::uint64_t seed, std::string_view name, int rank, std::int64_t columns);

/// Gram-Schmidt over the vectors p[0], p[1], ... of `length` elements each, in place. Each has its components along the earlier
/// ones removed one after the other, twice (Giraud, Langou, Rozloznik, 2005: twice is enough), and is divided by its length.
/// One of which less than 1e-5 is left after the first round depends on the earlier ones: what is left is rounding; it becomes 0.
template <class Real>
void orthogonalize(std::span<Real> p, std::int64_t length);

// Bytes that one rank's payload has on the wire, values and scales being fp32 and indices int32. Blocks never share a byte.
[[nodiscard]] std::int64_t quantized_bytes(std::int64_t elements, int bits,
                                           std::int64_t block);                    ///< 4 per block + ceil(bits e / 8)
[[nodiscard]] std::int64_t top_k_bytes(std::int64_t elements, std::int64_t k);     ///< 8 min(k, elements)
[[nodiscard]] std::int64_t random_k_bytes(std::int64_t elements, std::int64_t k);  ///< 4 min(k, elements)
[[nodiscard]] std::int64_t sign_bytes(std::int64_t elements, std::int64_t block);  ///< 4 per block + ceil(e / 8)
[[nodiscard]] std::int64_t power_sgd_bytes(std::int64_t rows, std::int64_t columns, int rank);  ///< 4 rank (rows + columns)

}  // namespace tandem::reference
