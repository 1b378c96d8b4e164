// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/gpu.h"
#include "kernels/operand_checks.h"

/// Launchers of rows.cu: rows of tables picked by index. Indices are on the device; a negative one picks nothing. No tokens or no
/// columns launch nothing.
namespace tandem::TANDEM_GPU {

/// out[t] = wte[ids[t]] + wpe[positions[t]]
void launch_embedding(const TokenRows& size, const std::int32_t* ids, const std::int32_t* positions, const void* wte,
                      const void* wpe, void* out, StreamHandle stream);
/// out[t] = table[ids[t]], zero where negative; of any dtype.
void launch_gather(const TokenRows& size, const std::int32_t* ids, const void* table, void* out, StreamHandle stream);
/// out[t] += table[ids[t]]
void launch_add_gathered(const TokenRows& size, const std::int32_t* ids, const void* table, void* out, StreamHandle stream);

/// Tokens sorted by the row that they go to, those of a row in their order. All three lie on the device and have a length that
/// hangs on the number of tokens alone: run r is of tokens order[begins[r]] ... order[begins[r + 1] - 1] and goes to row rows[r];
/// what is left over are empty runs.
struct RowRuns {
  const std::int32_t* order;   ///< [tokens]
  const std::int32_t* begins;  ///< [tokens + 1]
  const std::int32_t* rows;    ///< [tokens]
};
/// table[row] += x[t] of the row's run, in order of t; in the wide type, rounded once. The table's dtype is `sums`.
void launch_scatter_add(const TokenRows& size, const RowRuns& runs, const void* x, DType sums, void* table, StreamHandle stream);

/// gates and dgates are of wide(dtype), slots [tokens, choices].
struct CombineSize {
  TokenRows rows;
  std::int64_t choices;
};
void launch_combine(const CombineSize& size, const std::int32_t* slots, const void* gates, const void* y, void* out,
                    StreamHandle stream);
void launch_combine_backward(const CombineSize& size, const std::int32_t* slots, const void* gates, const void* dout,
                             const void* y, void* dgates, void* dy, StreamHandle stream);

}  // namespace tandem::TANDEM_GPU
