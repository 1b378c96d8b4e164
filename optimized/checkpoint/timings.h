// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <vector>

#include "optimized/checkpoint/checkpointer.h"

namespace tandem {

/// What FOLDER/timings.jsonl says of each published checkpoint, a line of JSON each: its times, and how long a usual step took.
struct TimedCheckpoint {
  CheckpointTimes times;
  double step_seconds = 0;
};

/// Adds a line. Throws IoError.
void append_timings(const std::filesystem::path& folder, const TimedCheckpoint& checkpoint);

/// All lines; a torn one, which a run that was killed may leave, is passed over. Throws InputError where there is no such file,
/// or a line has not these fields.
[[nodiscard]] std::vector<TimedCheckpoint> read_timings(const std::filesystem::path& folder);

}  // namespace tandem
