// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>

namespace tandem {

/// The folder of a supervised run, which belongs to one supervisor at a time: FOLDER/run.lock is locked while it lives, however
/// it ends, and says how many ranks the run began with.
class RunFolder {
 public:
  /// Waits up to `patience_seconds` for another supervisor to leave. Throws InputError where it does not, IoError.
  RunFolder(const std::filesystem::path& folder, double patience_seconds, const std::atomic<bool>& stop,
            const std::function<void(const std::string&)>& note);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// Ranks that the run began with; 0: it begins now.
  [[nodiscard]] int first_ranks() const noexcept { return first_ranks_; }
  void begin_with(int ranks);

 private:
  std::filesystem::path file_;
  int lock_ = -1;
  int first_ranks_ = 0;
};

/// Workers of a run whose supervisor was killed have been asked to save; whoever has not ended after `patience_seconds` is
/// killed.
void end_orphans(const std::string& mark, double patience_seconds, const std::function<void(const std::string&)>& note);

}  // namespace tandem
