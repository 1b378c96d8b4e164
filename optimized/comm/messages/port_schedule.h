// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tandem {

/// When a receiver's port is taken. Messages are told to it as their two ends meet, which is not always the order in which they
/// come in: one that comes in earlier than others that were told before is served in the gap before them, where more than half of
/// it fits there. What was promised to the others stays, but whoever is told later finds the port taken for as long as all of
/// them need. All times are nanoseconds on one clock.
class PortSchedule {
 public:
  /// Takes the port for a message that may come in from `receivable_ns` on; returns when it is there.
  [[nodiscard]] std::int64_t take(std::int64_t receivable_ns, std::int64_t moving_ns);

 private:
  static constexpr std::size_t kRemembered = 64;

  struct Taken {
    std::int64_t begin_ns, end_ns;
  };
  std::vector<Taken> taken_;  // in order of time, without overlaps
  std::int64_t forgotten_until_ns_ = std::numeric_limits<std::int64_t>::min();
};

}  // namespace tandem
