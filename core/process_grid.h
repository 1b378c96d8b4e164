// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan.h"

namespace tandem {

/// The groups in which ranks communicate, each named by what varies inside it.
enum class GroupAxis : std::uint8_t {
  world,
  data,             ///< ranks that differ in their rows alone
  tensor,           ///< ranks that hold slices of the same matrices
  pipeline,         ///< ranks that hold consecutive layers
  context,          ///< ranks that hold slices of the same sequences
  expert,           ///< neighbouring data ranks that hold different experts
  gradient,         ///< data and context: the replicas of a dense parameter
  expert_gradient,  ///< data ranks with the same experts, and context: the replicas of an expert
  model,            ///< tensor, pipeline and expert: together they hold every parameter
  embedding,        ///< first and last stage, which both hold a tied token embedding; otherwise the rank alone
};
inline constexpr std::size_t kGroupAxes = 10;
[[nodiscard]] std::string_view name(GroupAxis axis);

/// Place of a rank on each axis. Its place on the expert axis is data % expert degree.
struct Coordinates {
  int tensor = 0;
  int context = 0;
  int data = 0;
  int pipeline = 0;
  friend bool operator==(const Coordinates&, const Coordinates&) = default;
};

/// The numbering of ranks: with rank_order "a-b-c-d", rank = a + A (b + B (c + C d)), A being the degree of axis a.
class ProcessGrid {
 public:
  /// Throws InputError where rank_order does not name the axes tensor, context, data and pipeline once each, joined by '-'.
  explicit ProcessGrid(const TrainingPlan& plan);

  [[nodiscard]] int size() const noexcept { return degrees_.world_size(); }
  [[nodiscard]] const ParallelDegrees& degrees() const noexcept { return degrees_; }
  [[nodiscard]] Coordinates coordinates(int rank) const;
  [[nodiscard]] int rank_of(const Coordinates& coordinates) const;
  [[nodiscard]] int expert_coordinate(int rank) const { return coordinates(rank).data % degrees_.expert; }
  /// The group of `rank` along `axis`, itself included, in ascending order of the coordinates that vary (the data coordinate
  /// slowest, then pipeline, context, tensor). Its first member names the group.
  [[nodiscard]] std::vector<int> group(GroupAxis axis, int rank) const;

 private:
  enum Axis : std::uint8_t { tensor, context, data, pipeline };
  ParallelDegrees degrees_;
  std::array<Axis, 4> order_{};             // fastest first
  int first_stage_rank_, last_stage_rank_;  // pipeline coordinates
};

}  // namespace tandem
