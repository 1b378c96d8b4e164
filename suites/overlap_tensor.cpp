// SPDX-License-Identifier: Apache-2.0
// Tensor-parallel overlap: a product whose sum is scattered is made in pieces, each scattered while the next is computed.
// docs/techniques/overlap.md
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "harness/statistics.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/engine/lower.h"
#include "optimized/machine.h"
#include "optimized/memory/arena.h"
#include "suites/adversary_cases.h"
#include "suites/benefits.h"
#include "suites/overlap_cases.h"
#include "suites/parallel_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "overlap";
// What one whole product takes, asleep: long beside the real work of a small model, so that ranks need no cores of their own.
constexpr double kProductSeconds = 0.012;
constexpr double kLatencySeconds = 2e-4;

void in_one_piece(ParallelVariant& variant) { variant.overlap.tensor_chunks = 1; }

// Whether the bits of a row of a product are the same however many rows are computed with it, from a library's smallest block on.
// Where they are not, pieces cannot have the bits of the whole.
bool rows_keep_their_bits(const std::string& backend) {
  constexpr std::int64_t kRows = 64, kInner = 36;
  std::vector<float> dy(kRows * kInner), weight(kInner * kInner), whole(kRows * kInner), halves(kRows * kInner);
  for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(static_cast<int>(i * 37 % 101) - 50) / 7.0F;
  for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(static_cast<int>(i * 53 % 97) - 48) / 11.0F;
  const auto kernels = make_kernels({}, MachineChoice{backend});
  Memory& memory = kernels->memory();
  Arena arena({.memory = &memory});
  std::vector<Arena::Buffer> buffers;
  const auto place = [&](std::vector<float>& values, std::int64_t rows) {
    buffers.push_back(arena.allocate(DType::f32, {rows, kInner}, MemoryCategory::workspace));
    const TensorView view = buffers.back().view(DType::f32, {rows, kInner});
    write_tensor(memory, values.data(), view);
    return view;
  };
  const TensorView rows = place(dy, kRows), w = place(weight, kInner);
  const TensorView in_one = place(whole, kRows), in_halves = place(halves, kRows);
  kernels->linear_backward_input(rows, w, in_one);
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{17}}) {
    const std::int64_t count = first == 0 ? 17 : kRows - 17;
    kernels->linear_backward_input(rows.rows(first, count), w, in_halves.rows(first, count));
  }
  read_tensor(memory, in_one, whole.data());
  read_tensor(memory, in_halves, halves.data());
  return std::memcmp(whole.data(), halves.data(), whole.size() * sizeof(float)) == 0;
}

std::optional<std::string> without_fixed_bits(const RunContext& context) {
  if (rows_keep_their_bits(context.backend)) return std::nullopt;
  return "this machine's matrix library gives a row other bits where it has other rows beside it";
}

bool is_block_scatter(const Operation& op) {
  return op.kind == OpKind::communicate && op.collective == Collective::reduce_scatter && op.purpose == Purpose::activation &&
         op.layer >= 0;
}

Property made_in_pieces(const PairInputs& inputs) {
  double pieces = 0, whole = 0;
  for (const StepProgram& program : programs_of(inputs)) {
    for (const Operation& op : program) {
      if (is_block_scatter(op)) (op.background ? pieces : whole) += 1;
    }
  }
  return {"sums_in_the_foreground",
          whole,
          Relation::equal,
          0,
          fmt::format("every sum that a block scatters is in pieces, {} in all, in the background", pieces),
          -1,
          ""};
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  return {made_in_pieces(inputs), sent_as_programmed(inputs, run.measured, Purpose::activation),
          activations_as_predicted(inputs, run.measured)};
}

// FLOPs of each kind of product whose sum a block scatters, made whole.
using Products = std::map<std::pair<Phase, Part>, double>;

Products products_of(const PairInputs& whole) {
  Products products;
  const StepProgram program = programs_of(whole).front();
  for (const Operation& op : program) {
    if (is_block_scatter(op)) products[{op.phase, op.part}] = 0;
  }
  for (const Operation& op : program) {
    const auto found = products.find({op.phase, op.part});
    if (op.kind == OpKind::compute && op.layer >= 0 && found != products.end()) found->second = op.flops;
  }
  return products;
}

struct Stated {
  Products products;
  LinkProfile link;

  // A whole product takes the stated time, a piece of it its share; nothing else takes any.
  [[nodiscard]] double compute(const Operation& op) const {
    const auto found = op.layer < 0 ? products.end() : products.find({op.phase, op.part});
    return found == products.end() ? 0.0 : kProductSeconds * op.flops / found->second;
  }
  [[nodiscard]] double communicate(const Operation& op, int ranks) const {
    const CollectiveKind kind = op.collective == Collective::all_gather       ? CollectiveKind::all_gather
                                : op.collective == Collective::reduce_scatter ? CollectiveKind::reduce_scatter
                                                                              : CollectiveKind::all_reduce;
    return expected_seconds(CollectiveAlgorithm::direct, kind, op.bytes, ranks, link);
  }
};

// On which scattering a whole sum takes `share` of the time of its product.
Stated stated(const PairInputs& whole, double share) {
  const double ranks = whole.plan.parallel.tensor;
  std::int64_t bytes = 0;
  const StepProgram program = programs_of(whole).front();
  for (const Operation& op : program) {
    if (is_block_scatter(op)) bytes = op.bytes;
  }
  LinkProfile link;
  link.name = "stated";
  link.description = fmt::format("a whole sum is scattered in {} of the time of its product", share);
  const double sent = static_cast<double>(bytes) * (ranks - 1) / ranks;
  link.in_node = link.between_nodes = {kLatencySeconds, sent / (share * kProductSeconds - kLatencySeconds), 0};
  return {products_of(whole), link};
}

struct Timed {
  EngineRun run;
  double step_seconds = 0, exposed = 0;
  double predicted_step_seconds = 0, predicted_exposed = 0;
  double scattering = 0;  ///< predicted: of a rank and step, what it scatters in its blocks
};

Timed time_of(PairInputs inputs, const Stated& stated, const RunContext& context, const std::string& side) {
  Timed result;
  RunContext shaped = context;
  shaped.world.link = stated.link;
  const int ranks = inputs.plan.parallel.tensor;
  inputs.injected_seconds = [stated](const Operation& op) { return stated.compute(op); };
  result.run = engine_run(inputs, shaped, side);
  result.step_seconds = median(result.run.measured.step_seconds);
  result.exposed = exposed_seconds(result.run.measured);
  const std::vector<StepProgram> programs = programs_of(inputs);
  const auto seconds = [&](const Operation& op) {
    return op.kind == OpKind::communicate ? stated.communicate(op, ranks) : stated.compute(op);
  };
  const ProgramTiming timing = time_programs(programs, expectation(inputs.plan, inputs.model, inputs.data->sequence()), seconds);
  result.predicted_step_seconds = timing.makespan_seconds;
  for (const double exposed : timing.exposed_seconds) result.predicted_exposed += exposed / ranks;
  for (const Operation& op : programs.front()) {
    if (is_block_scatter(op)) result.scattering += stated.communicate(op, ranks);
  }
  return result;
}

std::vector<Property> hidden(const Timed& whole, const Timed& pieces) {
  // Real work of the small model and late wake-ups: half a millisecond for each sum that somebody waits for.
  const double slack = 0.5e-3 * whole.scattering / kProductSeconds + 2e-3;
  const auto within = [&](const std::string& name, const Timed& timed) {
    return Property{name,
                    std::abs(timed.exposed - timed.predicted_exposed),
                    Relation::at_most,
                    0.1 * timed.predicted_exposed + slack,
                    fmt::format("{:.1f} ms, of a step of {:.1f}; the step programs predict {:.1f} of {:.1f}: 10 %, and {:.1f} ms "
                                "for real work and late wake-ups",
                                1e3 * timed.exposed, 1e3 * timed.step_seconds, 1e3 * timed.predicted_exposed,
                                1e3 * timed.predicted_step_seconds, 1e3 * slack),
                    -1,
                    ""};
  };
  return {{"hidden_share_of_scattering", (whole.exposed - pieces.exposed) / whole.scattering, Relation::at_least, 0.5,
           fmt::format("of {:.1f} ms that a step scatters; the step programs predict {:.2f}", 1e3 * whole.scattering,
                       (whole.predicted_exposed - pieces.predicted_exposed) / whole.scattering),
           -1, ""},
          within("exposed_seconds_off_prediction, whole", whole),
          within("exposed_seconds_off_prediction, in pieces", pieces)};
}

Case hidden_case(const std::string& name, const ParallelVariant& variant, double scatter_per_product) {
  const PairInputs shown = inputs_of(variant, {});
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/{}", kSuite, name);
  result.summary = fmt::format("{}: products and links that take stated times, the share of scattering that is hidden",
                               describe_layout(shown.plan));
  result.model = shown.model;
  result.plan = shown.plan;
  result.criterion = Criterion::bitwise;
  result.timed = true;
  result.unavailable = [](const RunContext& context) -> std::optional<std::string> {
    if (const auto reason = without_fixed_bits(context)) return reason;
    return cannot_time_links(context);
  };
  result.execute = [variant, scatter_per_product](const RunContext& context) {
    ParallelVariant twin = variant;
    in_one_piece(twin);
    const PairInputs whole_inputs = inputs_of(twin, context), inputs = inputs_of(variant, context);
    const Stated times = stated(whole_inputs, scatter_per_product);
    Timed whole = time_of(whole_inputs, times, context, " whole");
    Timed pieces = time_of(inputs, times, context, " in pieces");
    CaseEvidence evidence;
    evidence.properties = hidden(whole, pieces);
    evidence.properties.push_back(made_in_pieces(inputs));
    evidence.properties.push_back(proven_program(inputs));
    evidence.truth = std::move(whole.run.evidence);
    evidence.candidate = std::move(pieces.run.evidence);
    evidence.measured = std::move(pieces.run.measured);
    return evidence;
  };
  return result;
}

ParallelVariant chunked(int ranks, int chunks) {
  ParallelVariant variant{.degrees = {.tensor = ranks}, .sequence_parallel = true};
  variant.overlap.tensor_chunks = chunks;
  return variant;
}

}  // namespace

void add_overlap_tensor_cases(CaseList& cases) {
  const auto against_reference = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(parallel_case(kSuite, "tensor/" + name, variant, properties));
  };
  const auto same_bits = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(twin_case(kSuite, "tensor/" + name + "/bitwise", "the same bits as with whole products", variant,
                              in_one_piece, properties));
    cases.back().unavailable = without_fixed_bits;
  };
  ParallelVariant uneven = chunked(4, 5);  // 11 rows of 17 tokens: slices of 46 and 47, or of 31 and 32, in pieces of 6 to 10
  uneven.micro_batches = 2;
  against_reference("ranks4/chunks5/fp32", uneven);
  ParallelVariant packed = chunked(3, 2);
  packed.row_shape = RowShape::packed;
  packed.recompute = {"full", 2};
  against_reference("ranks3/recompute/fp32", packed);
  ParallelVariant few = chunked(4, 40);  // more pieces than a slice has tokens
  few.rows = 2;
  against_reference("ranks4/chunks40/fp32", few);

  same_bits("ranks2/chunks4", chunked(2, 4));
  ParallelVariant recomputed = chunked(3, 3);
  recomputed.recompute = {"full", 2};
  recomputed.layers = 4;
  same_bits("ranks3/recompute", recomputed);
  ParallelVariant bf16 = chunked(4, 2);
  bf16.precision = "bf16";
  bf16.micro_batches = 2;
  same_bits("ranks4/bf16", bf16);
  ParallelVariant hybrid = chunked(2, 2);
  hybrid.degrees = {.data = 2, .tensor = 2, .pipeline = 2};
  hybrid.rows = 16;
  hybrid.layers = 4;
  hybrid.zero_stage = 1;
  hybrid.overlap.gradients = true;
  same_bits("data2/tensor2/pipeline2/stage1", hybrid);

  ParallelVariant late = chunked(2, 3);
  late.degrees = {.data = 2, .tensor = 2};
  late.bucket_bytes = 8000;
  late.overlap.gradients = true;
  cases.push_back(adversary_case(kSuite, "tensor-chunks", late, "pieces of products are scattered late"));

  cases.push_back(hidden_case("tensor/hidden/ranks2", chunked(2, 4), 0.6));
  ParallelVariant three = chunked(3, 4);
  three.rows = 12;
  cases.push_back(hidden_case("tensor/hidden/ranks3", three, 0.9));
}

}  // namespace tandem
