// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "core/step_program.h"

namespace tandem {

/// An operation that goes into a program right behind one that is there. `behind` and operation.after are numbers before the
/// insertion; behind -1: at the beginning.
struct Insertion {
  OperationId behind = -1;
  Operation operation;
};

/// Puts operations into a program; of several behind the same one the first given comes first. References to operations are kept
/// right.
struct Inserted {
  StepProgram program;
  std::vector<OperationId> moved_to;  ///< [old operations]
  std::vector<OperationId> inserted;  ///< [insertions]
};
/// Throws ContractError where an insertion names an operation that does not exist, or waits for one after itself.
[[nodiscard]] Inserted insert_behind(StepProgram program, std::vector<Insertion> insertions);

}  // namespace tandem
