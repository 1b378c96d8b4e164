// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/io/binary.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// What a rank's part of a phase came to.
struct PhaseOutcome {
  std::string error;                  ///< empty: it went well
  std::vector<CheckpointFile> files;  ///< that it wrote
  std::string folder;                 ///< that it published
  std::string note;                   ///< what went wrong without costing the checkpoint
  double seconds = 0;
};

template <class Archive>
void serialize(Archive& archive, CheckpointFile& file) {
  archive(file.name, file.bytes, file.hash.high, file.hash.low);
}
template <class Archive>
void serialize(Archive& archive, PhaseOutcome& outcome) {
  archive(outcome.error, outcome.files, outcome.folder, outcome.note, outcome.seconds);
}

/// Work that goes on beside training on every rank of a world, one phase at a time: a phase is over when it is over on all ranks,
/// and then all of them know what each came to. No rank ever waits for another one's disk.
class BackgroundPhase {
 public:
  [[nodiscard]] bool active() const noexcept { return job_.valid(); }
  /// `job` runs on a thread of its own; an IoError or filesystem_error that it throws is its outcome, anything else comes out of
  /// finished(). Collective.
  void start(std::function<PhaseOutcome()> job);
  /// Collective, while active: the outcomes by rank when all are through, else nothing.
  [[nodiscard]] std::optional<std::vector<PhaseOutcome>> finished(Communicator& world);
  /// For this rank's job, so long at most.
  void wait(std::chrono::milliseconds limit) const;

 private:
  std::future<PhaseOutcome> job_;
};

/// The first error in order of ranks; empty: none.
[[nodiscard]] std::string first_error(const std::vector<PhaseOutcome>& outcomes);

}  // namespace tandem
