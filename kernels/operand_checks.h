// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

#include "core/tensor.h"

// What every implementation of Kernels asks of its operands.
namespace tandem {

/// Throws ContractError, naming the operand, unless `tensor` has that dtype and as many elements as `shape`, its last extent
/// equal (so that [rows, sequence, hidden] passes for [tokens, hidden]).
void expect(const TensorView& tensor, std::string_view operand, DType dtype, std::initializer_list<std::int64_t> shape);

/// The same of dtype and number of elements.
void expect_count(const TensorView& tensor, std::string_view operand, DType dtype, std::int64_t count);

/// Throws ContractError unless what is accumulated into is of the data's dtype, or fp32 where that is 16 bits wide.
void expect_accumulator(const TensorView& tensor, std::string_view operand, DType data);

/// Elements over `last`, the last extent of the tensor; throws ContractError where that is not the last extent.
[[nodiscard]] std::int64_t rows_of(const TensorView& tensor, std::string_view operand, std::int64_t last);

/// Of a loss: throws ContractError unless every target is kIgnoredTarget or a column of the vocabulary; of a part of it: unless
/// `columns` are at most `width` and every target, negative where it is not here, below `columns`.
void expect_targets(std::span<const std::int32_t> targets, std::int64_t vocabulary);
void expect_columns(std::int64_t columns, std::int64_t width, std::span<const std::int32_t> targets);

/// Of tokens with a row of `width` elements each, of dtype `dtype`.
struct TokenRows {
  DType dtype = DType::f32;
  std::int64_t tokens = 0, width = 0;
};
/// Of layer norm: throws ContractError unless the operands are what layer_norm_...() state. weight, or dweight, says the width.
[[nodiscard]] TokenRows check_layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                                         const TensorView& y, const TensorView& mean, const TensorView& rstd);
[[nodiscard]] TokenRows check_layer_norm_input(const TensorView& dy, const TensorView& x, const TensorView& weight,
                                               const TensorView& mean, const TensorView& rstd, const TensorView& dresidual,
                                               const TensorView& dx);
[[nodiscard]] TokenRows check_layer_norm_weight(const TensorView& dy, const TensorView& x, const TensorView& mean,
                                                const TensorView& rstd, const TensorView& dweight, const TensorView& dbias);

/// Of tables: throws ContractError unless x is [tokens, width] and the indices, but negative ones, are rows of a table [any,
/// width].
enum class TableUse : std::uint8_t { of_one_dtype, accumulated };
[[nodiscard]] TokenRows check_rows(std::span<const std::int32_t> indices, std::int64_t tokens, const TensorView& table,
                                   std::string_view operand, const TensorView& x, TableUse use = TableUse::of_one_dtype);
/// Throws ContractError for ids outside of [0, extent), naming the first.
void expect_tokens(std::span<const std::int32_t> ids, std::int64_t extent, std::string_view what);
/// Of embeddings: throws ContractError unless the operands are what embedding_...() state. The table of tokens says the width.
[[nodiscard]] TokenRows check_embedding(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                                        const TensorView& wte, const TensorView& wpe, const TensorView& out);
[[nodiscard]] TokenRows check_embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                                                 const TensorView& dout, const TensorView& dwte, const TensorView& dwpe);

/// Of an optimizer step: throws ContractError unless dtypes go together as adamw() states, and sizes agree.
void expect_gradient_and_stored(const TensorView& gradient, const TensorView& parameter, const TensorView& stored);

}  // namespace tandem
