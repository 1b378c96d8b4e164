// SPDX-License-Identifier: Apache-2.0
#include "core/optimizer_config.h"

namespace tandem {

std::string_view name(OptimizerKind kind) { return kind == OptimizerKind::adamw ? "adamw" : "sgd"; }

std::string_view name(ScheduleKind kind) { return kind == ScheduleKind::constant ? "constant" : "cosine"; }

}  // namespace tandem
