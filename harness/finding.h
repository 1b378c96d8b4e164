// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "harness/evidence.h"
#include "harness/verdict.h"

namespace tandem {

/// Why a verdict is not `pass`.
struct Finding {
  Status status = Status::fail;
  std::string check;   ///< Verdict::check
  std::string reason;  ///< one line
  int step = -1;
  std::string tensor;  ///< empty: concerns no single tensor
};

/// The sides of a case that are judged, in the order truth, yardstick, candidate. Borrows the evidence.
struct Sides {
  const Evidence* truth = nullptr;
  const Evidence* yardstick = nullptr;
  const Evidence* candidate = nullptr;

  [[nodiscard]] std::vector<const Evidence*> given() const {
    std::vector<const Evidence*> sides;
    for (const Evidence* side : {truth, yardstick, candidate}) {
      if (side != nullptr) sides.push_back(side);
    }
    return sides;
  }
};

/// Those that the criterion uses.
[[nodiscard]] Sides sides_of(Criterion criterion, const CaseEvidence& evidence);

[[nodiscard]] const StageEvidence* find_stage(const Evidence& side, std::string_view stage, int step);
/// The first stage of that name, whatever its step.
[[nodiscard]] const StageEvidence* find_stage(const Evidence& side, std::string_view stage);
[[nodiscard]] const EvidenceTensor* find_tensor(const StageEvidence& stage, std::string_view name);

}  // namespace tandem
