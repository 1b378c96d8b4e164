// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "optimized/compression/instruction_set.h"

/// PowerSGD (Vogels, Karimireddy, Jaggi, 2019) of one matrix, cut where ranks exchange sums. A step of n ranks:
///
///   power_sgd_project       C = gradient + residual;  p[j] = C q[j]         then p <- mean of the ranks' p
///   power_sgd_orthogonalize p[j] orthonormal
///   power_sgd_back_project  own[j] = C^T p[j]                               then q <- mean of the ranks' own
///   power_sgd_subtract      residual <- C - sum over j of p[j] own[j]^T     with this rank's own factor
///   power_sgd_decompress    mean gradient ~ sum over j of p[j] q[j]^T       with the mean factor
///   power_sgd_next_start    warm start of the next step
///
/// Matrices are [rows, columns] row-major; factors lie vector by vector, p [rank, rows], q [rank, columns]. All fp32; dots run in
/// 16 fp32 lanes. sum p own^T + residual = C within half a unit in the last place of the residual, on every rank. A skipped step
/// keeps the old residual (give other memory for C) and the old q. Wrong sizes throw ContractError.
namespace tandem {

struct PowerSgdShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  int rank = 0;  ///< columns of P and Q, not a process
};

/// One rank sends this many bytes in the two exchanges together: 4 rank (rows + columns).
[[nodiscard]] std::int64_t power_sgd_bytes(const PowerSgdShape& shape);

/// q before the first step, the same on all ranks: parameter_normal(seed, "power_sgd/" + name, index).
void power_sgd_start(const PowerSgdShape& shape, std::uint64_t seed, std::string_view name, std::span<float> q);

/// `residual` may be empty: zero. `c` receives C; it may be the residual's memory, or empty where there is no residual: then C is
/// the gradient. False where an element of C or p is infinite or NaN: no rank may use the step.
[[nodiscard]] bool power_sgd_project(const PowerSgdShape& shape, std::span<const float> gradient, std::span<const float> residual,
                                     std::span<const float> q, std::span<float> c, std::span<float> p,
                                     InstructionSet set = best_instruction_set());

/// Gram-Schmidt with every projection removed twice, in double. A vector of which less than 1e-5 of its length is left after the
/// first time becomes zero.
void power_sgd_orthogonalize(const PowerSgdShape& shape, std::span<float> p);

/// False where an element of own is infinite or NaN.
[[nodiscard]] bool power_sgd_back_project(const PowerSgdShape& shape, std::span<const float> c, std::span<const float> p,
                                          std::span<float> own, InstructionSet set = best_instruction_set());

void power_sgd_subtract(const PowerSgdShape& shape, std::span<const float> p, std::span<const float> own, std::span<float> c,
                        InstructionSet set = best_instruction_set());

void power_sgd_decompress(const PowerSgdShape& shape, std::span<const float> p, std::span<const float> q, std::span<float> out,
                          InstructionSet set = best_instruction_set());

/// start[j] <- q[j] where that is not zero throughout: a direction that a zero gradient removed would never come back.
void power_sgd_next_start(const PowerSgdShape& shape, std::span<const float> q, std::span<float> start);

}  // namespace tandem
