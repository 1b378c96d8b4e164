// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/exchange.h"

#include <cstdint>
#include <cstring>
#include <numeric>

#include "optimized/comm/world.h"

namespace tandem {

std::vector<std::string> all_gather_bytes(Communicator& comm, const std::string& own) {
  std::vector<std::int64_t> sizes;
  for (const std::uint64_t size : all_gather_u64(comm, own.size())) sizes.push_back(static_cast<std::int64_t>(size));
  std::vector<std::uint8_t> input(own.size());
  if (!own.empty()) std::memcpy(input.data(), own.data(), own.size());
  std::vector<std::uint8_t> output(static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})));
  comm.all_gather(view_of(input, {std::ssize(input)}), view_of(output, {std::ssize(output)}), sizes, {Purpose::other, "exchange"})
      .wait_host();
  std::vector<std::string> parts;
  std::size_t at = 0;
  for (const std::int64_t size : sizes) {
    parts.emplace_back(reinterpret_cast<const char*>(output.data()) + at, static_cast<std::size_t>(size));
    at += static_cast<std::size_t>(size);
  }
  return parts;
}

std::vector<std::string> all_gather_bytes(const WorldSettings& settings, const std::string& own) {
  const JobShape job = job_shape(settings);
  if (job.processes == 1) return {own};
  std::vector<std::string> parts;
  WorldOptions options{.ranks = job.processes};
  options.settings.transport = settings.transport;
  run_world(options, [&](Communicator& comm) { parts = all_gather_bytes(comm, own); });
  return parts;
}

}  // namespace tandem
