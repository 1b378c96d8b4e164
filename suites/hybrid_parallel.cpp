// SPDX-License-Identifier: Apache-2.0
// Hybrid parallelism: every axis with every other. Faults of compositions need two or three options to meet, so the cases are a
// covering array of the options. docs/techniques/hybrid_parallel.md
#include <algorithm>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "optimized/engine/lower.h"
#include "reference/hybrid_parallel.h"
#include "suites/benefits.h"
#include "suites/expert_ledger.h"
#include "suites/held_out.h"
#include "suites/hybrid_options.h"
#include "suites/hybrid_rows.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "hybrid_parallel";

// Ranks of one model replica read the same rows, replicas different ones, all together every row once.
Property rows_ledger(const PairInputs& inputs, const EngineRun& run) {
  const ProcessGrid grid(inputs.plan);
  int wrong = 0;
  std::multiset<std::int64_t> read;
  for (int rank = 0; rank < grid.size(); ++rank) {
    const Coordinates here = grid.coordinates(rank);
    const int first = grid.rank_of({0, 0, here.data, 0});
    const auto& rows = run.rows[static_cast<std::size_t>(rank)];
    if (rows != run.rows[static_cast<std::size_t>(first)]) ++wrong;
    if (rank == first) read.insert(rows.begin(), rows.end());
  }
  for (std::int64_t row = 0; row < inputs.plan.batch.rows; ++row) wrong += read.count(row) == 1 ? 0 : 1;
  return {"rows_read_wrongly",
          static_cast<double>(wrong),
          Relation::equal,
          0,
          "the same within a model replica, each row of the global batch by one replica",
          0,
          ""};
}

// What a trace says of the tensors of a step must be right where the step is: or a fault would be located in the wrong place.
Property trace_agrees(const PairInputs& inputs) {
  const std::optional<Localisation> first = localise(inputs, {});
  return {"traced_error_over_bound",
          first ? first->error_over_bound : 0,
          Relation::at_most,
          1,
          "every traced activation and gradient of one step, by name and slice, against the reference's",
          0,
          first ? first->tensor : ""};
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = {rows_ledger(inputs, run), trace_agrees(inputs)};
  if (inputs.model.experts > 0) {
    const std::vector<Property> ledger = expert_ledger(inputs, run);
    all.insert(all.end(), ledger.begin(), ledger.end());
  }
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::activation));
  all.push_back(sent_as_programmed(inputs, run.measured, Purpose::gradient));
  all.push_back(state_as_predicted(inputs, run.measured));
  all.push_back(activations_as_predicted(inputs, run.measured));
  return all;
}

Case property_case(const std::string& name, const std::string& summary, std::function<std::vector<Property>()> properties,
                   bool quick = true) {
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/{}", kSuite, name);
  result.summary = summary;
  result.criterion = Criterion::convergence;
  result.quick = quick;
  result.execute = [properties = std::move(properties)](const RunContext&) {
    CaseEvidence evidence;
    evidence.properties = properties();
    return evidence;
  };
  return result;
}

// Calls use(degrees) for every way to write `world` as data * tensor * pipeline * context, and every expert degree in each.
template <class Use>
void for_each_factorisation(int world, const Use& use) {
  const auto divides = [](int a, int b) { return b % a == 0; };
  for (int data = 1; data <= world; ++data) {
    for (int tensor = 1; divides(data, world) && tensor <= world / data; ++tensor) {
      for (int pipeline = 1; divides(tensor, world / data) && pipeline <= world / data / tensor; ++pipeline) {
        if (!divides(pipeline, world / data / tensor)) continue;
        for (int expert = 1; expert <= data; ++expert) {
          if (divides(expert, data)) use(ParallelDegrees{data, tensor, pipeline, world / data / tensor / pipeline, expert});
        }
      }
    }
  }
}

// Groups of the grid against the definition that filters all ranks by their places.
std::vector<Property> grid_is_the_definition() {
  std::int64_t grids = 0;
  std::int64_t wrong = 0;
  for (int world = 1; world <= 24; ++world) {
    for_each_factorisation(world, [&](const ParallelDegrees& degrees) {
      for (const std::string order :
           {"tensor-context-data-pipeline", "pipeline-data-context-tensor", "data-tensor-pipeline-context"}) {
        TrainingPlan plan;
        plan.parallel = degrees;
        plan.rank_order = order;
        plan.pipeline.schedule = world % 2 == 0 ? "zb-v" : "1f1b";  // whose last stage is on the first rank
        const ProcessGrid grid(plan);
        const reference::HybridGrid definition = reference::hybrid_grid(plan);
        ++grids;
        for (int rank = 0; rank < world; ++rank) {
          if (grid.rank_of(grid.coordinates(rank)) != rank) ++wrong;
          for (std::size_t axis = 0; axis < kGroupAxes; ++axis) {
            const auto which = static_cast<GroupAxis>(axis);
            std::vector<int> mine = grid.group(which, rank);
            std::vector<int> defined = reference::hybrid_group(definition, which, rank);
            std::sort(mine.begin(), mine.end());
            std::sort(defined.begin(), defined.end());
            wrong += mine == defined ? 0 : 1;
          }
        }
      }
    });
  }
  return {{"grids", static_cast<double>(grids), Relation::at_least, 1000, "factorisations of 1 to 24 ranks, three rank orders",
           -1, ""},
          {"groups_unlike_the_definition", static_cast<double>(wrong), Relation::equal, 0, "every group of every rank", -1, ""}};
}

// Every combination of options is either refused with a reason or has programs that the checker proves.
std::vector<Property> every_plan_is_proven_or_refused(int stride) {
  const HybridOptions options;
  std::int64_t legal = 0;
  std::int64_t refused = 0;
  std::int64_t without_reason = 0;
  std::int64_t unproven = 0;
  std::string first;
  options.for_each(stride, [&](const ParallelVariant& variant) {
    const PairInputs inputs = inputs_of(variant, {});
    const std::vector<Conflict> found = conflicts(inputs.plan, inputs.model);
    if (!found.empty()) {
      ++refused;
      for (const Conflict& conflict : found) without_reason += conflict.option.empty() || conflict.reason.empty() ? 1 : 0;
      return;
    }
    ++legal;
    const ProgramFacts facts = facts_of(inputs);
    if (!facts.problems.empty() && first.empty()) first = describe_layout(inputs.plan) + ": " + facts.problems.front();
    unproven += facts.problems.empty() ? 0 : 1;
  });
  return {
      {"legal_plans", static_cast<double>(legal), Relation::at_least, 20, "of the combinations tried", -1, ""},
      {"refused_plans", static_cast<double>(refused), Relation::at_least, 20, "of the combinations tried", -1, ""},
      {"refused_without_reason", static_cast<double>(without_reason), Relation::equal, 0, "each names option and reason", -1, ""},
      {"unproven_plans", static_cast<double>(unproven), Relation::equal, 0, first.empty() ? "complete, no deadlock" : first, -1,
       ""}};
}

// Evaluation has groups and sums of its own: which ranks hold the loss, and over whom it is added up.
Case evaluation_case(const std::string& name, ParallelVariant variant) {
  variant.precision = "fp64";
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/evaluation/{}/fp64", kSuite, name);
  result.model = model_of(variant);
  result.plan = plan_of(variant);
  result.criterion = Criterion::convergence;
  result.summary = "the loss of held-out rows: the reference's, the same on all ranks and again after other rows";
  result.execute = [variant](const RunContext& context) { return beside_held_out_rows(inputs_of(variant, context), context); };
  return result;
}

void add_evaluation_cases(CaseList& cases) {
  cases.push_back(evaluation_case("data2/tensor2", {.degrees = {.data = 2, .tensor = 2}}));
  cases.push_back(evaluation_case("tensor2/pipeline2", {.degrees = {.tensor = 2, .pipeline = 2}, .sequence_parallel = true}));
  cases.push_back(evaluation_case("data2/context2", {.degrees = {.data = 2, .context = 2}}));
  cases.push_back(
      evaluation_case("data2/tensor2/expert2", {.degrees = {.data = 2, .tensor = 2, .expert = 2}, .experts = 4, .choices = 2}));
}

}  // namespace

void add_hybrid_parallel_cases(CaseList& cases) {
  cases.push_back(property_case("grid", "process groups of all factorisations of up to 24 ranks against their definition",
                                grid_is_the_definition));
  cases.push_back(property_case("programs", "a sample of all combinations of options: proven, or refused with a reason",
                                [] { return every_plan_is_proven_or_refused(2003); }));
  cases.push_back(property_case(
      "programs/more", "a larger sample of all combinations of options", [] { return every_plan_is_proven_or_refused(101); },
      false));
  // The compositions that faults of groups, rows and clipping need, by name.
  const auto add = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(parallel_case(kSuite, name, variant, properties));
  };
  // Even rows, so that ranks that read or sum the wrong ones do so in silence.
  add("data2/tensor2/fp32", {.degrees = {.data = 2, .tensor = 2}, .micro_batches = 2, .rows = 12});
  add("tensor2/pipeline2/fp32", {.degrees = {.tensor = 2, .pipeline = 2}, .micro_batches = 3});
  add("data2/tensor2/pipeline2/fp32", {.degrees = {.data = 2, .tensor = 2, .pipeline = 2}, .micro_batches = 2});
  add("tensor2/pipeline2/context2/sequence/fp32",
      {.degrees = {.tensor = 2, .pipeline = 2, .context = 2}, .sequence_parallel = true, .micro_batches = 2});
  add("data2/tensor2/expert2/sequence/fp32", {.degrees = {.data = 2, .tensor = 2, .expert = 2},
                                              .sequence_parallel = true,
                                              .experts = 4,
                                              .choices = 2,
                                              .micro_batches = 2});
  // Rows shorter than the model's, whose masks are keyed by places in the model's; and more tokens than the head takes at once.
  add("tensor2/context2/short_rows/fp32", {.degrees = {.tensor = 2, .context = 2}, .rows = 50, .row_tokens = 13});
  add("tensor2/context2/sequence/short_rows/fp32",
      {.degrees = {.tensor = 2, .context = 2}, .sequence_parallel = true, .rows = 50, .row_tokens = 13});
  add("data2/context2/expert2/short_rows/fp32",
      {.degrees = {.data = 2, .context = 2, .expert = 2}, .experts = 4, .choices = 2, .micro_batches = 2, .row_tokens = 13});
  add_evaluation_cases(cases);
  const HybridOptions options;
  for (const auto& [name, variant] : options.named(kQuickRows)) cases.push_back(parallel_case(kSuite, name, variant, properties));
  for (const auto& [name, variant] : options.named(kMoreRows)) {
    cases.push_back(parallel_case(kSuite, "more/" + name, variant, properties, false));
  }
}

}  // namespace tandem
