// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/comm/nccl/nccl_world.h"
#include "optimized/comm/run_threads.h"

namespace tandem {
namespace {

[[noreturn]] void refuse_transport(const std::string& transport) {
  if (transport == "nccl") throw InputError("transport nccl: " + why_no_nccl());
  if (transport == "mpi") throw InputError("transport mpi: not in this build; use threads, or build with MPI");
  throw InputError(fmt::format("transport {}: unknown; there are {}", transport, fmt::join(transports(), ", ")));
}

// The body with somebody's own communicator.
std::function<void(Communicator&)> with_own_communicator(const WorldSettings& settings,
                                                         const std::function<void(Communicator&)>& body) {
  return [parts = settings.own_parts, &body](Communicator& inner) {
    const std::unique_ptr<Communicator> own = parts->communicator(inner);
    TANDEM_CHECK(own != nullptr, fmt::format("own parts '{}' made no communicator", parts->name));
    body(*own);
  };
}

void run_on_transport(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  const std::string& transport = options.settings.transport;
  if (transport == "threads") return run_threads(options, body);
  const bool is_nccl = transport == "nccl" && has_nccl();
  if (!is_nccl && (transport != "mpi" || !has_mpi())) refuse_transport(transport);
  if (options.settings.link)
    throw InputError("transport " + transport + ": a link shapes the messages of threads only; leave it out");
  if (is_nccl) return run_nccl_world(options, body);
  run_mpi_world(options, body);
}

}  // namespace

void run_world(const WorldOptions& wanted, const std::function<void(Communicator&)>& body) {
  WorldOptions options = wanted;
  if (options.settings.deadline_seconds > 0) {
    options.deadline =
        std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(options.settings.deadline_seconds));
  }
  TANDEM_CHECK(options.ranks >= 1, fmt::format("{} ranks", options.ranks));
  TANDEM_CHECK(options.deadline.count() > 0, "the deadline must be positive");
  const std::shared_ptr<const OwnParts>& own = options.settings.own_parts;
  if (own && own->communicator) return run_on_transport(options, with_own_communicator(options.settings, body));
  run_on_transport(options, body);
}

JobShape job_shape(const WorldSettings& settings) {
  if (settings.transport == "threads") return {};
  if (settings.transport == "nccl" && has_nccl()) return nccl_job_shape();
  if (settings.transport != "mpi" || !has_mpi()) refuse_transport(settings.transport);
  return mpi_job_shape();
}

std::vector<std::string> transports() {
  std::vector<std::string> all = {"threads"};
  if (has_mpi()) all.emplace_back("mpi");
  if (has_nccl()) all.emplace_back("nccl");
  return all;
}

}  // namespace tandem
