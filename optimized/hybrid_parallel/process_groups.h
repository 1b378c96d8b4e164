// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <memory>

#include "core/pitfall.h"
#include "core/process_grid.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// One rank's communicators along every axis of the process grid (core/process_grid.h).
class ProcessGroups {
 public:
  /// Collective over `world`, which is borrowed; its size must be the plan's. An axis whose groups are single ranks gets no
  /// communicator, one whose groups are the whole world in its own order shares `world`.
  ProcessGroups(Communicator& world, const TrainingPlan& plan, const PitfallSet& pitfalls = {});

  [[nodiscard]] const ProcessGrid& grid() const noexcept { return grid_; }
  [[nodiscard]] int rank() const noexcept { return world_.rank(); }
  [[nodiscard]] const Coordinates& here() const noexcept { return here_; }
  /// Ranks in this rank's group.
  [[nodiscard]] int size(GroupAxis axis) const noexcept { return sizes_[static_cast<std::size_t>(axis)]; }
  /// Throws ContractError where the group is this rank alone.
  [[nodiscard]] Communicator& of(GroupAxis axis) const;
  [[nodiscard]] Communicator& world() const noexcept { return world_; }

 private:
  Communicator& world_;
  ProcessGrid grid_;
  Coordinates here_;
  std::array<int, kGroupAxes> sizes_{};
  std::array<Communicator*, kGroupAxes> groups_{};
  std::vector<std::unique_ptr<Communicator>> owned_;
};

}  // namespace tandem
