// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string_view>

namespace tandem {

/// Adds a line to a file that several processes may add to: one write, durable when it returns, the name of a new file included.
/// It begins a line of its own, also behind what a writer that was killed has left of its last. Throws IoError.
void append_line(const std::filesystem::path& file, std::string_view line);

}  // namespace tandem
