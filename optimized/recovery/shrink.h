// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "core/model_config.h"
#include "core/pitfall.h"
#include "core/plan.h"

namespace tandem {

/// The plan of a run for fewer ranks: tensor, pipeline, context and expert degrees stay, so that the state fits by slices; the
/// data degree falls to the largest that is legal, and accumulation grows so that
///
///   rows of a step               the same: loss curve, schedule and position in the data do not notice
///   rows of a micro-batch, most  at most as many as before: memory does not grow with what is computed at once
///
/// Nothing where not even one replica fits. `ranks` as large as the plan's or larger: the plan as it is.
[[nodiscard]] std::optional<TrainingPlan> shrink_plan(const TrainingPlan& plan, const GptConfig& model, int ranks,
                                                      const PitfallSet& pitfalls = {});

}  // namespace tandem
