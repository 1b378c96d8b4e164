// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/rank_body.h"

#include <string>

#include <fmt/format.h>

#include "optimized/comm/adversary.h"
#include "optimized/comm/group_communicator.h"

namespace tandem {
namespace {

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

std::exception_ptr run_rank(const std::shared_ptr<Group>& group, const WorldSettings& settings,
                            const std::function<void(Communicator&)>& body) noexcept {
  WorldState& world = group->world();
  const int rank = group->world_rank();
  try {
    GroupCommunicator communicator(group);
    if (settings.adversary) {
      const std::unique_ptr<Communicator> wrapped = make_adversarial(communicator, *settings.adversary);
      body(*wrapped);
    } else {
      body(communicator);
    }
    communicator.require_none_dropped();
    world.mark_ended(rank);
    return nullptr;
  } catch (...) {
    std::exception_ptr error = std::current_exception();
    world.fail({Failure::Kind::peer, rank, fmt::format("rank {} failed: {}", rank, reason_of(error))});
    return error;
  }
}

}  // namespace tandem
