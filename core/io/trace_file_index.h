// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/io/trace_file.h"

namespace tandem {

/// The content of trace.json.
struct TraceIndex {
  TraceHeader header;
  std::string batch_file;  ///< safetensors file with the batch; empty: the trace carries none
  std::vector<TraceEntry> entries;
};

/// Throws InputError naming `file`, the field (or the entry and its field), the value found and what may stand there. Fields that
/// are not known are refused too: a misspelt one would be a silent default.
[[nodiscard]] TraceIndex parse_trace_index(std::string_view text, const std::string& file);

[[nodiscard]] std::string to_json(const TraceIndex& index);

}  // namespace tandem
