// SPDX-License-Identifier: Apache-2.0
#include "kernels/operand_checks.h"

#include <fmt/format.h>

#include "core/batch.h"
#include "core/error.h"

namespace tandem {

void expect(const TensorView& tensor, std::string_view operand, DType dtype, std::initializer_list<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  const bool fits = tensor.dtype() == dtype && tensor.num_dims() > 0 && tensor.num_elements() == count &&
                    (count == 0 || tensor.dim(tensor.num_dims() - 1) == *(shape.end() - 1));
  TANDEM_CHECK(fits || (count == 0 && tensor.num_elements() == 0),
               fmt::format("{} is {} of {}, expected {} of {}", operand, to_string(tensor.shape()), name(tensor.dtype()),
                           to_string(Shape(shape)), name(dtype)));
}

void expect_count(const TensorView& tensor, std::string_view operand, DType dtype, std::int64_t count) {
  TANDEM_CHECK(tensor.num_elements() == count && (count == 0 || tensor.dtype() == dtype),
               fmt::format("{} is {} of {}, expected {} elements of {}", operand, to_string(tensor.shape()), name(tensor.dtype()),
                           count, name(dtype)));
}

void expect_accumulator(const TensorView& tensor, std::string_view operand, DType data) {
  TANDEM_CHECK(tensor.dtype() == data || tensor.dtype() == wide(data),
               fmt::format("{} is of {}, which {} is not accumulated in", operand, name(tensor.dtype()), name(data)));
}

std::int64_t rows_of(const TensorView& tensor, std::string_view operand, std::int64_t last) {
  if (tensor.num_elements() == 0) return 0;
  TANDEM_CHECK(tensor.num_dims() > 0 && tensor.dim(tensor.num_dims() - 1) == last,
               fmt::format("{} is {}, its last extent should be {}", operand, to_string(tensor.shape()), last));
  return tensor.num_elements() / last;
}

void expect_targets(std::span<const std::int32_t> targets, std::int64_t vocabulary) {
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const bool valid = targets[t] == kIgnoredTarget || (targets[t] >= 0 && targets[t] < vocabulary);
    TANDEM_CHECK(valid, fmt::format("target {} at {} is outside the vocabulary of {}", targets[t], t, vocabulary));
  }
}

void expect_columns(std::int64_t columns, std::int64_t width, std::span<const std::int32_t> targets) {
  TANDEM_CHECK(columns >= 0 && columns <= width, fmt::format("{} columns of {}", columns, width));
  for (std::size_t t = 0; t < targets.size(); ++t) {
    TANDEM_CHECK(targets[t] < columns, fmt::format("target {} at {} is outside the {} columns", targets[t], t, columns));
  }
}

TokenRows check_embedding(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, const TensorView& wte,
                          const TensorView& wpe, const TensorView& out) {
  const TokenRows size{wte.dtype(), static_cast<std::int64_t>(ids.size()), wte.dim(1)};
  TANDEM_CHECK(positions.size() == ids.size());
  expect(wpe, "wpe", wte.dtype(), {wpe.dim(0), size.width});
  expect(out, "out", wte.dtype(), {size.tokens, size.width});
  expect_tokens(ids, wte.dim(0), "token id");
  expect_tokens(positions, wpe.dim(0), "position");
  return size;
}

TokenRows check_embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                                   const TensorView& dout, const TensorView& dwte, const TensorView& dwpe) {
  const TokenRows size{dout.dtype(), static_cast<std::int64_t>(ids.size()), dwte.dim(1)};
  TANDEM_CHECK(positions.size() == ids.size());
  expect(dwpe, "dwpe", dwte.dtype(), {dwpe.dim(0), size.width});
  expect(dout, "dout", dout.dtype(), {size.tokens, size.width});
  if (size.tokens > 0) expect_accumulator(dwte, "dwte", dout.dtype());
  expect_tokens(ids, dwte.dim(0), "token id");
  expect_tokens(positions, dwpe.dim(0), "position");
  return size;
}

void expect_gradient_and_stored(const TensorView& gradient, const TensorView& parameter, const TensorView& stored) {
  const std::int64_t count = parameter.num_elements();
  const bool fits = gradient.num_elements() == count && (gradient.dtype() == parameter.dtype() || is_16bit(gradient.dtype()) ||
                                                         gradient.dtype() == wide(parameter.dtype()));
  TANDEM_CHECK(fits, fmt::format("the gradient is {} of {}, the parameter {} of {}", to_string(gradient.shape()),
                                 name(gradient.dtype()), to_string(parameter.shape()), name(parameter.dtype())));
  TANDEM_CHECK(!stored || (is_16bit(stored.dtype()) && stored.num_elements() == count),
               fmt::format("stored is {} of {}", to_string(stored.shape()), name(stored.dtype())));
  // fp64 would be rounded twice on its way to 16 bits.
  const bool mixes = stored || gradient.dtype() != parameter.dtype();
  TANDEM_CHECK(parameter.dtype() != DType::f64 || !mixes, "an fp64 parameter has an fp64 gradient and is not stored in 16 bits");
}

namespace {

void expect_statistics(const TensorView& mean, const TensorView& rstd, DType storage, std::int64_t tokens) {
  expect_count(mean, "mean", wide(storage), tokens);
  expect_count(rstd, "rstd", wide(storage), tokens);
}

}  // namespace

TokenRows check_layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias, const TensorView& y,
                           const TensorView& mean, const TensorView& rstd) {
  const std::int64_t hidden = weight.num_elements(), tokens = rows_of(x, "x", hidden);
  const DType dtype = weight.dtype();
  expect(x, "x", dtype, {tokens, hidden});
  expect(bias, "bias", dtype, {hidden});
  expect(y, "y", dtype, {tokens, hidden});
  expect_statistics(mean, rstd, dtype, tokens);
  return {dtype, tokens, hidden};
}

TokenRows check_layer_norm_input(const TensorView& dy, const TensorView& x, const TensorView& weight, const TensorView& mean,
                                 const TensorView& rstd, const TensorView& dresidual, const TensorView& dx) {
  const std::int64_t hidden = weight.num_elements(), tokens = rows_of(x, "x", hidden);
  const DType dtype = weight.dtype();
  expect(x, "x", dtype, {tokens, hidden});
  expect(dy, "dy", dtype, {tokens, hidden});
  expect(dx, "dx", dtype, {tokens, hidden});
  if (dresidual) expect(dresidual, "dresidual", dtype, {tokens, hidden});
  expect_statistics(mean, rstd, dtype, tokens);
  return {dtype, tokens, hidden};
}

TokenRows check_layer_norm_weight(const TensorView& dy, const TensorView& x, const TensorView& mean, const TensorView& rstd,
                                  const TensorView& dweight, const TensorView& dbias) {
  const std::int64_t hidden = dweight.num_elements(), tokens = rows_of(x, "x", hidden);
  const DType dtype = x.num_elements() > 0 ? x.dtype() : dy.dtype();
  expect(x, "x", dtype, {tokens, hidden});
  expect(dy, "dy", dtype, {tokens, hidden});
  expect_accumulator(dweight, "dweight", dtype);
  expect(dbias, "dbias", dweight.dtype(), {hidden});
  expect_statistics(mean, rstd, dtype, tokens);
  return {dtype, tokens, hidden};
}

TokenRows check_rows(std::span<const std::int32_t> indices, std::int64_t tokens, const TensorView& table,
                     std::string_view operand, const TensorView& x, TableUse use) {
  const std::int64_t width = x.num_elements() / tokens;
  expect(x, operand, x.dtype(), {tokens, width});
  const std::int64_t rows = width == 0 ? 0 : rows_of(table, "table", width);
  if (rows > 0 && use == TableUse::accumulated) expect_accumulator(table, "table", x.dtype());
  TANDEM_CHECK(rows == 0 || use == TableUse::accumulated || table.dtype() == x.dtype());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    TANDEM_CHECK(indices[i] < rows, fmt::format("row {} at {} of a table of {}", indices[i], i, rows));
  }
  return {x.dtype(), tokens, width};
}

void expect_tokens(std::span<const std::int32_t> ids, std::int64_t extent, std::string_view what) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    TANDEM_CHECK(ids[i] >= 0 && ids[i] < extent, fmt::format("{} {} at {} is outside [0, {})", what, ids[i], i, extent));
  }
}

}  // namespace tandem
