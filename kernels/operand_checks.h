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

/// Of an optimizer step: throws ContractError unless dtypes go together as adamw() states, and sizes agree.
void expect_gradient_and_stored(const TensorView& gradient, const TensorView& parameter, const TensorView& stored);

}  // namespace tandem
