// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tandem::simt_gpu {

/// The `__shared__` variables of this program's kernels, as the calling thread of the process holds them: thread_local variables
/// that are local to functions of this namespace, found by the program's symbol table. (So no function of this namespace may have
/// a thread_local variable for something else.) In a stripped program they are not found, and what kernels read there before they
/// wrote is what an earlier block left.
///
/// They are 0xFF at the beginning of each block. Which of them a grid uses is seen after its first block, so that the others cost
/// nothing; one that only later blocks use is poisoned at the grid's end.
class SharedVariables {
 public:
  SharedVariables();
  void begin_grid();
  void end_block();
  void end_grid();
  [[nodiscard]] std::size_t count() const noexcept { return variables_.size(); }

 private:
  std::vector<std::span<std::byte>> variables_;
  std::vector<std::span<std::byte>> used_;
  bool first_block_ = true;
};
/// Of the calling thread.
[[nodiscard]] SharedVariables& shared_variables();

}  // namespace tandem::simt_gpu
