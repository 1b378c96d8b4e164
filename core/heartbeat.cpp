// SPDX-License-Identifier: Apache-2.0
#include "core/heartbeat.h"

namespace tandem {

std::string_view name(RunPhase phase) {
  switch (phase) {
    case RunPhase::start: return "start";
    case RunPhase::restore: return "restore";
    case RunPhase::data: return "data";
    case RunPhase::train: return "train";
    case RunPhase::evaluate: return "evaluate";
    case RunPhase::checkpoint: return "checkpoint";
    case RunPhase::finished: return "finished";
  }
  return "?";
}

}  // namespace tandem
