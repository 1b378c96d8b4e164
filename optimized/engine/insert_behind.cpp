// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/insert_behind.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

Inserted insert_behind(StepProgram program, std::vector<Insertion> insertions) {
  const auto size = static_cast<OperationId>(program.size());
  for (const Insertion& insertion : insertions) {
    TANDEM_CHECK(insertion.behind >= -1 && insertion.behind < size,
                 fmt::format("insertion behind operation {} of {}", insertion.behind, size));
    for (const OperationId before : insertion.operation.after) {
      TANDEM_CHECK(before >= 0 && before <= insertion.behind,
                   fmt::format("insertion behind operation {} waits for {}", insertion.behind, before));
    }
  }
  std::vector<std::size_t> order(insertions.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return insertions[a].behind < insertions[b].behind; });

  Inserted result;
  result.moved_to.resize(program.size());
  result.inserted.resize(insertions.size());
  result.program.reserve(program.size() + insertions.size());
  const auto append = [&](Operation op) {
    for (OperationId& before : op.after) before = result.moved_to[static_cast<std::size_t>(before)];
    result.program.push_back(std::move(op));
    return static_cast<OperationId>(result.program.size()) - 1;
  };
  auto next = order.begin();
  for (OperationId i = -1; i < size; ++i) {
    if (i >= 0) result.moved_to[static_cast<std::size_t>(i)] = append(std::move(program[static_cast<std::size_t>(i)]));
    for (; next != order.end() && insertions[*next].behind == i; ++next) {
      result.inserted[*next] = append(std::move(insertions[*next].operation));
    }
  }
  return result;
}

}  // namespace tandem
