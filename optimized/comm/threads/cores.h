// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

namespace tandem {

/// Part of `cores` for one of `ranks` rank threads: contiguous shares where there are enough, one core each for an equal number
/// of ranks where there are fewer cores and they divide the ranks. Empty: leave it to the system (one rank, or no even division).
[[nodiscard]] std::vector<int> share_of_cores(const std::vector<int>& cores, int ranks, int rank);

/// Keeps the calling thread, and threads that it starts, on these cores until destruction, then restores what was before. Does
/// nothing for an empty list, or where the system refuses.
class CoreBinding {
 public:
  explicit CoreBinding(const std::vector<int>& cores);
  CoreBinding(const CoreBinding&) = delete;
  CoreBinding& operator=(const CoreBinding&) = delete;
  ~CoreBinding();

 private:
  std::vector<int> before_;
};

}  // namespace tandem
