// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem {

struct RendezvousOptions {
  std::string host;  ///< of rank 0: a name or an IPv4 address
  std::uint16_t port = 0;
  int rank = 0, ranks = 1;
  std::string generation;  ///< of this start of the job; a process of another one is turned away
  std::string line;        ///< what the others are to know of this process
  std::chrono::milliseconds deadline{60000};
};

struct RendezvousResult {
  std::vector<std::string> lines;  ///< of all ranks
  std::uint64_t token = 0;         ///< the same number for all of them, and for no other job
};

/// Where the processes of a job meet for the first time: rank 0 listens at host:port, the others come there and say their lines,
/// and all get everybody's. A process may come before rank 0 does; it tries again until the deadline.
///
/// Throws, naming host:port: TimeoutError (on all that are there) with the ranks that are missing; IoError where the port is
/// taken or rank 0 cannot be reached; InputError where this process is turned away: of another generation, number of ranks, or a
/// rank that is there already. Processes must have the same byte order.
[[nodiscard]] RendezvousResult meet(const RendezvousOptions& options);

}  // namespace tandem
