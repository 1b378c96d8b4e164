// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "harness/report/report.h"
#include "harness/text_table.h"
#include "optimized/scaling/planner.h"

namespace tandem {

/// What tandem plan and tandem scale share: how workloads are read from the command line and how their estimates are told.

/// Shares of a step, and of the wall time what checkpoints and failures take.
struct StepShares {
  double compute = 0;        ///< recomputation included
  double communication = 0;  ///< that nothing hides
  double bubble = 0, optimizer = 0, data = 0;
  double stall = 0;  ///< of the wall time
};
[[nodiscard]] StepShares shares_of(const StepEstimate& estimate);

/// "1f1b", "interleaved x 3", "-" where there is no pipeline.
[[nodiscard]] std::string schedule_text(const TrainingPlan& plan);
/// "61.2 of 80.0 GiB"
[[nodiscard]] std::string memory_of_limit(const MemoryEstimate& memory);

/// The plan section of a training configuration, which config files and --set use too.
[[nodiscard]] nlohmann::ordered_json plan_json(const TrainingPlan& plan);
[[nodiscard]] nlohmann::ordered_json estimate_json(const StepEstimate& estimate);

/// Rows of cells, the first one heads. On a terminal, columns whose cells are all alike are said in a line below.
using CellRows = std::vector<std::vector<std::string>>;
[[nodiscard]] std::string rendered(const CellRows& rows, TableStyle style);

/// A document of its own keys and of report sections, as `tandem report` reads them.
[[nodiscard]] std::string with_sections(nlohmann::ordered_json document, const std::vector<ReportSection>& sections);

/// The plan of a training configuration, or of the best layout of a report that `tandem plan --json` wrote. Throws InputError.
[[nodiscard]] TrainingPlan read_layout(const std::string& file);
/// What the software does where the plan says it: overlap, attention.
[[nodiscard]] SoftwareTraits traits_of(const TrainingPlan& plan);

}  // namespace tandem
