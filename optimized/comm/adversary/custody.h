// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "core/tensor.h"
#include "kernels/memory.h"

namespace tandem::adversary {

/// The buffers of an operation from its call until it is complete. The operation works on copies; the caller's output is filled
/// with signalling NaNs (integers: with ones), and both must be as they were left when the result is handed back.
///
/// The copies lie in the memory of the buffers, in the order of whose lane everything happens; no ledger counts them. Touches the
/// caller's buffers in the constructor, disturbance() and hand_back() alone.
class Custody {
 public:
  /// What the operation reads and what it writes, of one dtype; either may be empty, and one may lie within the other. `memory`
  /// is theirs, borrowed for as long as this lives or until hand_back().
  Custody(TensorView input, TensorView output, Memory& memory);
  Custody(const Custody&) = delete;
  Custody& operator=(const Custody&) = delete;
  ~Custody();

  // The copies, in the same position to each other.
  [[nodiscard]] TensorView input() noexcept { return input_copy_; }
  [[nodiscard]] TensorView output() noexcept { return output_copy_; }

  /// "element 17 of the output was written", "element 3 of the input changed": what somebody else has done to the caller's
  /// buffers.
  [[nodiscard]] std::optional<std::string> disturbance() const;
  /// The output's copy becomes the output. Without a result it has what was there before. The copies are gone then.
  void hand_back();

 private:
  void give_back() noexcept;

  Memory& memory_;
  TensorView input_, output_;
  std::byte* copies_ = nullptr;  // the operation's, then the input as it was
  std::int64_t copies_bytes_ = 0;
  TensorView sent_;  // the latter
  TensorView input_copy_, output_copy_;
};

}  // namespace tandem::adversary
