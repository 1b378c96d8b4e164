// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "optimized/scaling/planner.h"

/// The space that the planner searches: private to optimized/scaling/planner*.cpp and their test.
namespace tandem::planner {

/// Simplest first: among equals the planner takes the first.
enum class Schedule : std::uint8_t { one_f_one_b, interleaved, zb_h1, zb_v };
enum class Recompute : std::uint8_t { none, selective, full };
inline constexpr int kZeroStages = 4;

/// A plan in few bytes. The order of layouts decides ties of time: fewer tricks first.
struct PlannedLayout {
  std::int32_t tensor = 1, pipeline = 1, context = 1, expert = 1, data = 1;
  Recompute recompute = Recompute::none;
  std::uint8_t zero = 0;
  bool sequence_parallel = false;
  Schedule schedule = Schedule::one_f_one_b;
  std::int32_t chunks = 1;
  std::int32_t rows = 1;  ///< of a micro-batch
  std::int32_t micro_batches = 1;

  friend auto operator<=>(const PlannedLayout&, const PlannedLayout&) = default;
  /// Replicas of a dense parameter.
  [[nodiscard]] int replicas() const noexcept { return data * context; }
  [[nodiscard]] bool same_degrees(const PlannedLayout& other) const noexcept {
    return tensor == other.tensor && pipeline == other.pipeline && context == other.context && expert == other.expert &&
           data == other.data;
  }
};

/// The query with its defaults filled in: global_batch_rows, sequence, schedules. Throws InputError where it is not possible.
[[nodiscard]] PlanQuery completed(PlanQuery query);

/// What every layout of the query shares; apply() sets the rest.
[[nodiscard]] Workload base_workload(const PlanQuery& query);
void apply(const PlannedLayout& layout, Workload& workload);

/// All legal layouts of a completed query but for the ZeRO stage, which is 0; stages 1 to 3 are further ones where there are
/// replicas. Deterministic order.
[[nodiscard]] std::vector<PlannedLayout> all_layouts(const PlanQuery& query);
/// ZeRO stages of a layout: those that change nothing are left out.
[[nodiscard]] int zero_stages(const PlannedLayout& layout) noexcept;

[[nodiscard]] std::vector<int> divisors_of(std::int64_t value);
/// The simplest layout of these degrees: 1f1b, one row a micro-batch.
[[nodiscard]] PlannedLayout simple_layout(const PlanQuery& query, const ParallelDegrees& degrees);
/// Whether tensor, pipeline, context and expert degrees fit the model, and the rows the data ranks.
[[nodiscard]] bool degrees_fit(const PlanQuery& query, const PlannedLayout& layout);

}  // namespace tandem::planner
