// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <vector>

namespace tandem {

/// The cores that the calling thread may run on; empty where the system does not tell.
[[nodiscard]] std::vector<int> available_cores();

/// Cores that this process may keep busy at the same time: those that it may run on, and no more than the CPU time that its
/// control groups (of either version, or of a container) leave it, rounded down; at least 1. `root` is another place of /proc and
/// /sys, for tests. Costs some file operations: what is asked often keeps the answer.
[[nodiscard]] int usable_cores(const std::filesystem::path& root = "/");

}  // namespace tandem
