// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/tensor.h"
#include "kernels/kernels.h"

// What every implementation of attention makes of the calls of Kernels, and asks of their operands.
namespace tandem {

/// All forms of attention as one: a segment of which all keys may be the sequence.
struct AttentionCall {
  AttentionSegment segment;
  StridedRows query, key, value, dquery, dkey, dvalue;  ///< the gradients only for backward
  TensorView out, logsumexp, dout;
  TensorView probabilities;  ///< of materialized attention, which has no logsumexp and whose backward does not read out
  bool accumulate = false;
  bool backward = false;
};

/// Throws ContractError, saying what is wrong, where the call's operands do not fit.
void check_attention(const AttentionCall& call, const DropoutSpec& dropout);

/// Whether a (checked) call has nothing to do, whatever the documents.
[[nodiscard]] bool sees_nothing(const AttentionSegment& segment);

/// Queries, keys and values as thirds of qkv; outputs are left to the caller. Throws ContractError for other sizes.
[[nodiscard]] AttentionCall whole_call(const AttentionShape& shape, const TensorView& qkv);
/// The same with dout and the thirds of dqkv.
[[nodiscard]] AttentionCall whole_backward_call(const AttentionShape& shape, const TensorView& dout, const TensorView& qkv,
                                                const TensorView& dqkv);
/// Of attention_decode(): throws ContractError where an operand does not fit; the caches' capacity. Rows are not 0.
[[nodiscard]] std::int64_t check_decode(int heads, std::int64_t head_size, std::int64_t length, const TensorView& qkv,
                                        const TensorView& key_cache, const TensorView& value_cache, const TensorView& out);
/// A tile of ring attention; forward.
[[nodiscard]] AttentionCall segment_call(const AttentionSegment& segment, const StridedRows& query, const StridedRows& key,
                                         const StridedRows& value, const TensorView& out, const TensorView& logsumexp);

}  // namespace tandem
