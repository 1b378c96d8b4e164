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

}  // namespace tandem
