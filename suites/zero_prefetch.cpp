// SPDX-License-Identifier: Apache-2.0
// Stage 3: parameters arrive while the layer before is computed, and at most two blocks of them are here.
#include <algorithm>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "optimized/engine/lower.h"
#include "suites/benefits.h"
#include "suites/zero_cases.h"

namespace tandem {
namespace {

// Long beside the real work of a small model, so that ranks asleep need no cores of their own.
constexpr double kLayerSeconds = 0.005;

double layer_seconds(const Operation& op) {
  const bool ends_layer = (op.phase == Phase::forward && op.part == Part::mlp_merge) ||
                          (op.phase == Phase::backward_input && op.part == Part::norm_1);
  return ends_layer ? kLayerSeconds : 0.0;
}

struct GatherOrder {
  double late = 0;       // layers that began before the gather of the next one had
  double layers = 0;     // that have a next one
  double most_here = 0;  // blocks
};

// The layer that a pass comes to after `op`; -1 after its last.
int next_layer(const Operation& op, Interval layers) {
  const int next = op.phase == Phase::forward ? op.layer + 1 : op.layer - 1;
  return next >= layers.begin && next < layers.end ? next : -1;
}

GatherOrder order_of(const StepProgram& program, const std::vector<Interval>& chunk_layers) {
  GatherOrder order;
  std::set<int> here, gathering;                    // layers
  std::set<std::tuple<bool, int, int, int>> begun;  // forward, micro-batch, chunk, layer
  for (const Operation& op : program) {
    if (op.layer < 0) continue;
    const bool of_parameters = op.category == MemoryCategory::parameters;
    if (op.kind == OpKind::allocate && of_parameters) here.insert(op.layer);
    if (op.kind == OpKind::communicate && op.purpose == Purpose::parameter) gathering.insert(op.layer);
    if (op.kind == OpKind::free && of_parameters) {
      here.erase(op.layer);
      gathering.erase(op.layer);
    }
    order.most_here = std::max(order.most_here, static_cast<double>(here.size()));
    if (op.kind != OpKind::compute || op.phase == Phase::backward_weight) continue;
    if (!begun.emplace(op.phase == Phase::forward, op.micro_batch, op.chunk, op.layer).second) continue;
    const int next = next_layer(op, chunk_layers[static_cast<std::size_t>(op.chunk)]);
    if (next < 0) continue;
    order.layers += 1;
    order.late += gathering.contains(next) ? 0 : 1;
  }
  return order;
}

std::vector<Property> gathered_ahead(const PairInputs& inputs) {
  const ProgramExpectation expected = expectation(inputs.plan, inputs.model, inputs.data->sequence());
  const std::vector<StepProgram> programs = programs_of(inputs);
  GatherOrder all;
  for (std::size_t rank = 0; rank < programs.size(); ++rank) {
    const GatherOrder order = order_of(programs[rank], expected.ranks[rank].chunk_layers);
    all = {all.late + order.late, all.layers + order.layers, std::max(all.most_here, order.most_here)};
  }
  return {{"layers_whose_next_is_not_on_its_way", all.late, Relation::equal, 0.0,
           fmt::format("of {} forward and backward layers that have a next one: its gather begins before their first operation",
                       all.layers),
           -1, ""},
          {"blocks_gathered_at_once", all.most_here, Relation::equal, 2.0, "the one that is computed, and the next", -1, ""}};
}

bool overlaps_compute(const Span& span, const std::vector<Span>& spans) {
  return std::any_of(spans.begin(), spans.end(), [&](const Span& other) {
    return other.activity == Activity::compute && other.begin_ns < span.end_ns && span.begin_ns < other.end_ns;
  });
}

// Gathers whose bytes move, or whose peers are waited for, while this rank computes. Of L layers the first of a pass has nothing
// to hide behind, nor have the tables and the final norm: L - 1 of L + 2 in either direction.
Property hidden_gathers(const PairInputs& inputs, const EngineRun& run) {
  double hidden = 0;
  double all = 0;
  for (const std::vector<Span>& spans : run.measured.spans_by_rank) {
    for (const Span& span : spans) {
      if (span.purpose != Purpose::parameter || span.activity != Activity::transfer) continue;
      all += 1;
      hidden += span.lane == Lane::communication && overlaps_compute(span, spans) ? 1 : 0;
    }
  }
  const double layers = inputs.model.layers;
  const double possible = (layers - 1) / (layers + 2);
  return {
      "gathers_under_compute",
      all > 0 ? hidden / all : 0.0,
      Relation::at_least,
      possible / 2,
      fmt::format("{:.2f} of all could be; the rank that comes last may see a short one end before it computes again", possible),
      -1,
      ""};
}

Case prefetch_case(const std::string& name, const ParallelVariant& variant, bool timed) {
  Case result =
      parallel_case("zero", name, variant, [](const PairInputs& inputs, const EngineRun&) { return gathered_ahead(inputs); });
  result.summary += ": the next block's parameters are on their way before a block begins, at most two blocks are here";
  if (!timed) return result;
  result.localise = {};
  result.timed = true;
  result.execute = [variant](const RunContext& context) {
    PairInputs inputs = inputs_of(variant, context);
    inputs.injected_seconds = layer_seconds;
    inputs.steps = 2;
    EngineRun run;
    CaseEvidence evidence = compare_with_reference(inputs, context, run);
    evidence.properties = gathered_ahead(inputs);
    evidence.properties.push_back(hidden_gathers(inputs, run));
    return evidence;
  };
  return result;
}

}  // namespace

void add_zero_prefetch_cases(CaseList& cases) {
  cases.push_back(prefetch_case("stage3/prefetch/ranks3/fp32", {.degrees = {.data = 3}, .layers = 6, .zero_stage = 3}, true));
  cases.push_back(prefetch_case("stage3/prefetch/data2/interleaved/fp32",
                                {.degrees = {.data = 2, .pipeline = 2},
                                 .pipeline = {"interleaved", 2, ""},
                                 .micro_batches = 2,
                                 .layers = 9,
                                 .zero_stage = 3},
                                false));
}

}  // namespace tandem
