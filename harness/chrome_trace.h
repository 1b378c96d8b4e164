// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/timeline.h"

namespace tandem {

/// Spans of the ranks of one run, for one trace.
struct TraceGroup {
  std::string name;  ///< case or run; stands before the rank in the viewer
  std::vector<std::vector<Span>> spans_by_rank;
};

/// Chrome trace events in JSON: opens in Perfetto and chrome://tracing. A process per rank (id: 1000 * group + rank), a thread
/// per lane; complete events ("X") with activity, step, and bytes and purpose where there are bytes. Times are microseconds from
/// the earliest span of the group, to the nanosecond.
[[nodiscard]] std::string to_chrome_trace(const std::vector<TraceGroup>& groups);

/// Atomically. Throws IoError.
void write_chrome_trace(const std::filesystem::path& path, const std::vector<TraceGroup>& groups);
/// Of one run.
void write_chrome_trace(const std::filesystem::path& path, const std::vector<std::vector<Span>>& spans_by_rank);

}  // namespace tandem
