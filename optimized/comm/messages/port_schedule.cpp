// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/port_schedule.h"

#include <algorithm>
#include <cstddef>

namespace tandem {

std::int64_t PortSchedule::take(std::int64_t receivable_ns, std::int64_t moving_ns) {
  std::int64_t begin_ns = std::max(receivable_ns, forgotten_until_ns_);
  std::size_t place = 0;
  for (; place < taken_.size(); ++place) {
    const bool fits = begin_ns + moving_ns - taken_[place].begin_ns <= moving_ns / 2;
    if (fits) break;
    begin_ns = std::max(begin_ns, taken_[place].end_ns);
  }
  const std::int64_t there_ns = begin_ns + moving_ns;
  taken_.insert(taken_.begin() + static_cast<std::ptrdiff_t>(place), {begin_ns, there_ns});
  for (std::size_t next = place + 1; next < taken_.size(); ++next) {
    const std::int64_t late_ns = taken_[next - 1].end_ns - taken_[next].begin_ns;
    if (late_ns <= 0) break;
    taken_[next].begin_ns += late_ns;
    taken_[next].end_ns += late_ns;
  }
  if (taken_.size() > kRemembered) {
    forgotten_until_ns_ = taken_.front().end_ns;
    taken_.erase(taken_.begin());
  }
  return there_ns;
}

}  // namespace tandem
