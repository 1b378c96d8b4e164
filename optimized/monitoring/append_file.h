// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tandem {

/// A file that grows by whole records, one write each: what was written survives the death of the process (not that of the
/// machine: nothing is synced), and a reader beside the writer sees records, at most the last one cut off.
///
/// Owns the descriptor. One writer at a time. Throws IoError with path and the system's reason.
class AppendFile {
 public:
  enum class Existing : std::uint8_t {
    refused,   ///< the file must be new
    continued  ///< a file that exists goes on behind its last line break; what a killed writer left behind that is cut off
  };
  /// Folders above `file` are made.
  AppendFile(std::filesystem::path file, Existing existing);
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;
  ~AppendFile();

  /// Where the system takes only a part of `record` (disk full), the part is cut off again before this throws.
  void append(std::string_view record);
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t size_bytes_ = 0;
};

}  // namespace tandem
