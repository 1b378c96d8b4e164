// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tandem::adversary {

/// The buffers of an operation from its call until it is complete. The operation works on copies; the caller's output is filled
/// with signalling NaNs (integers: with ones), and both must be as they were left when the result is handed back.
///
/// Ordinary heap memory: no ledger counts it. Touches the caller's buffers in the constructor, disturbance() and hand_back()
/// alone.
class Custody {
 public:
  /// What the operation reads and what it writes, of one dtype; either may be empty, and one may lie within the other.
  Custody(TensorView input, TensorView output);
  Custody(const Custody&) = delete;
  Custody& operator=(const Custody&) = delete;

  // The copies, in the same position to each other.
  [[nodiscard]] TensorView input() noexcept { return input_copy_; }
  [[nodiscard]] TensorView output() noexcept { return output_copy_; }

  /// "element 17 of the output was written", "element 3 of the input changed": what somebody else has done to the caller's
  /// buffers.
  [[nodiscard]] std::optional<std::string> disturbance() const;
  /// The output's copy becomes the output. Without a result it has what was there before.
  void hand_back() const noexcept;

 private:
  TensorView input_, output_;
  std::vector<std::byte> copies_;
  std::vector<std::byte> sent_;  // input as it was
  TensorView input_copy_, output_copy_;
};

}  // namespace tandem::adversary
