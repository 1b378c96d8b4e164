// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "optimized/comm/communicator.h"

namespace tandem {

/// Seconds that a message there and back takes on each link of the ring of ranks, [ranks]: element r is the link from r to its
/// right neighbour. The quickest of `tries`: a machine that is busy delays some messages, a slow link all of them. One element,
/// both ways of the same link, for two ranks; none for one. Collective, the same on all ranks.
[[nodiscard]] std::vector<double> probe_links(Communicator& world, int tries = 9, std::int64_t bytes = 1 << 16);

struct SlowLink {
  int rank = -1;      ///< whose links are all slow; -1: one link alone
  std::string where;  ///< "link 1-2", "links of rank 1"
  double ratio = 0;   ///< to what it took before
};
inline constexpr double kSlowLinkRatio = 5;
inline constexpr double kSlowLinkSeconds = 1e-3;

/// Which link is slow: kSlowLinkRatio times as long as before, and as the quickest link now (where there are others), and
/// kSlowLinkSeconds longer than both. Nothing where all are: then it is the machine. A pure function.
[[nodiscard]] std::optional<SlowLink> find_slow_link(const std::vector<double>& now, const std::vector<double>& before);

}  // namespace tandem
