// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tandem::cuda_bench {

/// The model whose shapes are measured: GPT-2 124M by default, in bf16 with gradients and optimizer state in fp32.
struct Shapes {
  std::int64_t rows = 64, sequence = 1024, hidden = 768, vocabulary = 50304, parameters = 124'475'904;
  int heads = 12;
  [[nodiscard]] std::int64_t tokens() const { return rows * sequence; }
};

/// What bounds a case, and with what it is compared.
enum class Bound : std::uint8_t {
  memory,  ///< bytes that must move at least, against a copy
  matrix,  ///< floating-point operations, against a product of 8192 a side
};

/// One kernel at one shape. `prepare` reserves what the call needs and returns the call; what it has captured is given back with
/// it.
struct BenchCase {
  std::string name;
  Bound bound = Bound::memory;
  double amount = 0;  ///< bytes or operations of one call
  double target = 0;  ///< share of the measured peak that --check asks for
  std::function<std::function<void()>(Kernels&)> prepare;
};

[[nodiscard]] std::vector<BenchCase> cases_of(const Shapes& shapes);

}  // namespace tandem::cuda_bench
