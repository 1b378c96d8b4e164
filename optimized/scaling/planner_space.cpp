// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/planner_space.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/nearest_name.h"

namespace tandem::planner {
namespace {

struct ScheduleName {
  const char* name;
  Schedule schedule;
};
constexpr std::array<ScheduleName, 4> kSchedules = {{{"1f1b", Schedule::one_f_one_b},
                                                     {"interleaved", Schedule::interleaved},
                                                     {"zb-h1", Schedule::zb_h1},
                                                     {"zb-v", Schedule::zb_v}}};
constexpr std::array<const char*, 3> kRecomputeNames = {"none", "selective", "full"};

bool is_searched(const PlanQuery& query, Schedule schedule) {
  const char* const name = kSchedules.at(static_cast<std::size_t>(schedule)).name;
  return std::find(query.schedules.begin(), query.schedules.end(), name) != query.schedules.end();
}

bool chunks_fit(const PlanQuery& query, const PlannedLayout& layout, int chunks) {
  return static_cast<std::int64_t>(layout.pipeline) * chunks <= query.model.layers;
}

void add_interleaved(const PlanQuery& query, const PlannedLayout& layout, std::vector<PlannedLayout>& found) {
  if (layout.micro_batches % layout.pipeline != 0) return;
  for (int chunks = 2; chunks_fit(query, layout, chunks); ++chunks) {
    found.push_back(layout);
    found.back().schedule = Schedule::interleaved;
    found.back().chunks = chunks;
  }
}

std::vector<PlannedLayout> with_schedules(const PlanQuery& query, const PlannedLayout& layout) {
  std::vector<PlannedLayout> found;
  if (layout.pipeline == 1) return {layout};
  if (is_searched(query, Schedule::one_f_one_b)) found.push_back(layout);
  if (is_searched(query, Schedule::interleaved)) add_interleaved(query, layout, found);
  if (is_searched(query, Schedule::zb_h1)) {
    found.push_back(layout);
    found.back().schedule = Schedule::zb_h1;
  }
  if (is_searched(query, Schedule::zb_v) && chunks_fit(query, layout, 2)) {
    found.push_back(layout);
    found.back().schedule = Schedule::zb_v;
    found.back().chunks = 2;
  }
  return found;
}

// Every way to cut the batch, to schedule it and to keep less of it, for given degrees.
void add_variants(const PlanQuery& query, const PlannedLayout& degrees, std::vector<PlannedLayout>& found) {
  const std::int64_t rows_per_rank = query.global_batch_rows / degrees.data;
  for (const int rows : divisors_of(rows_per_rank)) {
    PlannedLayout cut = degrees;
    cut.rows = rows;
    cut.micro_batches = static_cast<std::int32_t>(rows_per_rank / rows);
    for (const PlannedLayout& scheduled : with_schedules(query, cut)) {
      for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
        for (const bool sequence_parallel : {false, true}) {
          if (sequence_parallel && cut.tensor == 1) continue;
          found.push_back(scheduled);
          found.back().recompute = recompute;
          found.back().sequence_parallel = sequence_parallel;
        }
      }
    }
  }
}

const std::vector<std::string>& axis_names() {
  static const std::vector<std::string> kNames = {"data", "tensor", "pipeline", "context", "expert"};
  return kNames;
}

bool is_within_limits(const PlanQuery& query, const PlannedLayout& layout) {
  const std::array<int, 5> degrees = {layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert};
  for (std::size_t axis = 0; axis < degrees.size(); ++axis) {
    const auto most = query.most.find(axis_names()[axis]);
    if (most != query.most.end() && degrees[axis] > most->second) return false;
  }
  return true;
}

std::vector<int> expert_degrees(const PlanQuery& query, int data) {
  if (query.model.experts == 0) return {1};
  std::vector<int> degrees = divisors_of(query.model.experts);
  std::erase_if(degrees, [data](int degree) { return data % degree != 0; });
  return degrees;
}

[[noreturn]] void refuse(const std::string& what) { throw InputError(what); }

void check_devices(const PlanQuery& query) {
  const ClusterSpec& cluster = query.cluster;
  if (query.devices < 1) refuse(fmt::format("{} devices: at least 1 is needed", query.devices));
  if (query.devices > cluster.devices_per_node && query.devices % cluster.devices_per_node != 0) {
    refuse(fmt::format("{} devices are no whole number of nodes: {} has {} a node", query.devices, cluster.name,
                       cluster.devices_per_node));
  }
  const std::int64_t most = static_cast<std::int64_t>(cluster.nodes) * cluster.devices_per_node;
  if (most > 0 && query.devices > most) {
    refuse(fmt::format("{} devices are more than cluster {} has: {}", query.devices, cluster.name, most));
  }
}

[[noreturn]] void refuse_word(const std::string& what, const std::string& word, const std::vector<std::string>& known) {
  const auto nearest = nearest_name(word, known);
  refuse(fmt::format("{} {}: not one that is searched{}; there are {}", what, word,
                     nearest ? fmt::format(" (did you mean {}?)", *nearest) : "", fmt::join(known, ", ")));
}

void check_words(const PlanQuery& query) {
  std::vector<std::string> names;
  for (const ScheduleName& entry : kSchedules) names.emplace_back(entry.name);
  for (const std::string& schedule : query.schedules) {
    if (std::find(names.begin(), names.end(), schedule) == names.end()) refuse_word("schedule", schedule, names);
  }
  for (const auto& [axis, most] : query.most) {
    if (std::find(axis_names().begin(), axis_names().end(), axis) == axis_names().end()) refuse_word("axis", axis, axis_names());
    if (most < 1) refuse(fmt::format("at most {} {} ranks: there is always one", most, axis));
  }
}

}  // namespace

namespace {
constexpr std::int64_t kMostRows = 1'000'000, kMostTokens = 100'000'000;  // of a step, of a row
}  // namespace

std::vector<int> divisors_of(std::int64_t value) {
  std::vector<int> small, large;
  for (std::int64_t divisor = 1; divisor * divisor <= value; ++divisor) {
    if (value % divisor != 0) continue;
    small.push_back(static_cast<int>(divisor));
    if (divisor * divisor != value) large.push_back(static_cast<int>(value / divisor));
  }
  small.insert(small.end(), large.rbegin(), large.rend());
  return small;
}

PlanQuery completed(PlanQuery query) {
  if (query.sequence == 0) query.sequence = query.model.sequence;
  if (query.global_batch_rows == 0) query.global_batch_rows = usual_batch_rows(query.model, query.sequence);
  if (query.precision.empty()) query.precision = usual_precision(query.cluster);
  if (query.schedules.empty()) {
    for (const ScheduleName& entry : kSchedules) query.schedules.emplace_back(entry.name);
  }
  check_devices(query);
  check_words(query);
  if (query.sequence < 1) refuse(fmt::format("sequence {}: at least 1 token is needed", query.sequence));
  if (query.sequence > kMostTokens)
    refuse(fmt::format("sequence {}: rows of at most {} tokens can be planned", query.sequence, kMostTokens));
  if (query.global_batch_rows < 1)
    refuse(fmt::format("a global batch of {} rows: at least 1 is needed", query.global_batch_rows));
  if (query.global_batch_rows > kMostRows)
    refuse(fmt::format("a global batch of {} rows: at most {} can be planned", query.global_batch_rows, kMostRows));
  if (query.top < 1) refuse(fmt::format("the best {} plans: at least 1 is needed", query.top));
  return query;
}

Workload base_workload(const PlanQuery& query) {
  Workload workload{.model = query.model, .plan = {}, .sequence = query.sequence, .software = query.software};
  workload.plan.batch.rows = query.global_batch_rows;
  workload.plan.precision = query.precision;
  workload.plan.numerics = numerics_from_precision(query.precision);
  // So that the plan says the same when it is run.
  workload.plan.overlap.gradients = query.software.overlap_gradients;
  workload.plan.overlap.prefetch = query.software.overlap_parameters;
  return workload;
}

void apply(const PlannedLayout& layout, Workload& workload) {
  TrainingPlan& plan = workload.plan;
  plan.parallel = {.data = layout.data,
                   .tensor = layout.tensor,
                   .pipeline = layout.pipeline,
                   .context = layout.context,
                   .expert = layout.expert};
  plan.batch.micro_batches = layout.micro_batches;
  plan.pipeline.schedule = kSchedules.at(static_cast<std::size_t>(layout.schedule)).name;
  plan.pipeline.chunks = layout.chunks;
  plan.recompute.mode = kRecomputeNames.at(static_cast<std::size_t>(layout.recompute));
  plan.zero_stage = layout.zero;
  plan.sequence_parallel = layout.sequence_parallel;
}

int zero_stages(const PlannedLayout& layout) noexcept { return layout.replicas() > 1 ? kZeroStages : 1; }

bool degrees_fit(const PlanQuery& query, const PlannedLayout& layout) {
  const ModelShape& model = query.model;
  const std::int64_t keys = model.key_value_heads();
  const bool tensor = model.heads % layout.tensor == 0 && (keys % layout.tensor == 0 || layout.tensor % keys == 0) &&
                      model.mlp_width() % layout.tensor == 0 && layout.tensor <= model.vocabulary;
  const bool sequence = layout.context == 1 || query.sequence % (2 * static_cast<std::int64_t>(layout.context)) == 0;
  return is_within_limits(query, layout) && tensor && sequence && layout.pipeline <= model.layers &&
         query.global_batch_rows % layout.data == 0;
}

PlannedLayout simple_layout(const PlanQuery& query, const ParallelDegrees& degrees) {
  PlannedLayout layout{.tensor = degrees.tensor,
                       .pipeline = degrees.pipeline,
                       .context = degrees.context,
                       .expert = degrees.expert,
                       .data = degrees.data};
  layout.micro_batches = static_cast<std::int32_t>(query.global_batch_rows / degrees.data);
  return layout;
}

std::vector<PlannedLayout> all_layouts(const PlanQuery& query) {
  std::vector<PlannedLayout> found;
  for (const int tensor : divisors_of(query.devices)) {
    for (const int pipeline : divisors_of(query.devices / tensor)) {
      for (const int context : divisors_of(query.devices / tensor / pipeline)) {
        PlannedLayout degrees{.tensor = tensor, .pipeline = pipeline, .context = context};
        degrees.data = query.devices / tensor / pipeline / context;
        if (query.is_stopped() || !degrees_fit(query, degrees)) continue;
        for (const int expert : expert_degrees(query, degrees.data)) {
          degrees.expert = expert;
          if (is_within_limits(query, degrees)) add_variants(query, degrees, found);
        }
      }
    }
  }
  return found;
}

}  // namespace tandem::planner
