// SPDX-License-Identifier: Apache-2.0
// Data parallelism: every rank holds the whole model and computes its rows; gradients are summed.
// docs/techniques/data_parallel.md
#include <array>
#include <cmath>
#include <filesystem>
#include <memory>
#include <span>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/data_parallel/gradient_sync.h"
#include "optimized/data_pipeline/text_source.h"
#include "reference/data_parallel.h"
#include "suites/benefits.h"
#include "suites/pair.h"
#include "suites/repeated_rows.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "data_parallel";

// Small, with no size that another divides: 61 tokens, 3 heads of 10, 17 positions, 11 rows for up to 7 ranks.
GptConfig small_model(bool tied) {
  GptConfig model;
  model.vocabulary = 61;
  model.sequence = 17;
  model.layers = 2;
  model.hidden = 30;
  model.heads = 3;
  model.tied = tied;
  model.embedding_dropout = 0.1;
  model.attention_dropout = 0.1;
  model.residual_dropout = 0.1;
  return model;
}

struct Variant {
  int ranks = 1;
  int micro_batches = 1;
  bool tied = true;
  RowShape row_shape = RowShape::skewed;
  std::int64_t rows = 11;
  std::int64_t bucket_bytes = 0;
};

PairInputs inputs_of(const Variant& variant, const RunContext& context) {
  PairInputs inputs;
  inputs.model = small_model(variant.tied);
  inputs.plan.parallel.data = variant.ranks;
  inputs.plan.batch = {variant.rows, variant.micro_batches};
  inputs.plan.buckets.bucket_bytes = variant.bucket_bytes;
  inputs.plan.threads_per_rank = context.threads_per_rank;
  inputs.optimizer.learning_rate = 3e-3;
  // Adam divides a gradient by its own size. With the usual 1e-8, an element whose true gradient is below the rounding error d of
  // the sum gets a full-size update in a random direction, and two right runs part. Here an error d moves an update by at most d
  // / epsilon: with d = 4 2^-24 sqrt(K) rms(g) = 4e-9 that is 4e-5 of the learning rate, far below the bound.
  inputs.optimizer.epsilon = 1e-4;
  inputs.schedule = {ScheduleKind::cosine, 2, 6, 0.1};
  inputs.steps = context.repetitions + 1;
  inputs.seed = context.seed;
  inputs.optimizer_frozen = context.pitfalls.on(Pitfall::both_sides_frozen);
  inputs.data = std::make_shared<SyntheticCorpus>(SyntheticOptions{.vocabulary = inputs.model.vocabulary,
                                                                   .sequence = inputs.model.sequence,
                                                                   .seed = context.seed,
                                                                   .row_shape = variant.row_shape});
  // Equal rows on all ranks hide a missing reduction: averaging equal gradients changes nothing. So that they are really equal,
  // the rows divide evenly and nothing is dropped.
  if (context.pitfalls.on(Pitfall::same_batch_on_every_rank)) {
    inputs.plan.batch.rows = 3 * variant.ranks;
    inputs.model.embedding_dropout = inputs.model.attention_dropout = inputs.model.residual_dropout = 0.0;
    inputs.data = std::make_shared<RepeatedRows>(inputs.data, variant.ranks);
  }
  return inputs;
}

// What data parallelism costs and buys, from what was recorded: bytes sent and activations of the fullest rank.
std::vector<Property> benefits(const PairInputs& inputs, const Measured& measured) {
  const int ranks = inputs.plan.parallel.data;
  const std::int64_t predicted = predicted_gradient_bytes(inputs.model, inputs.plan) * inputs.steps;
  std::vector<Property> properties;
  properties.push_back({"gradient_bytes_on_the_wire", static_cast<double>(bytes_sent(measured, Purpose::gradient)),
                        Relation::equal, static_cast<double>(predicted),
                        "steps * ranks * 2 b (ranks - 1) / ranks, b bytes of gradients", -1, ""});
  TrainingPlan alone = inputs.plan;
  alone.parallel.data = 1;
  const auto activations = static_cast<std::size_t>(MemoryCategory::activations);
  const std::int64_t one_rank = predicted_peak(inputs.model, alone, inputs.optimizer.kind, inputs.data->sequence())[activations];
  const std::int64_t rows = micro_batch_rows(inputs.plan.batch.rows, ranks, 0, inputs.plan.batch.micro_batches, 0).size();
  const std::int64_t all_rows = micro_batch_rows(inputs.plan.batch.rows, 1, 0, inputs.plan.batch.micro_batches, 0).size();
  const double share = static_cast<double>(rows) / static_cast<double>(all_rows);
  // Every tensor is rounded up to 64 bytes and the gradient stream counts as workspace: 5 % on the closed form.
  properties.push_back({"activation_bytes_per_rank", static_cast<double>(measured.peak_bytes[activations]), Relation::at_most,
                        1.05 * share * static_cast<double>(one_rank),
                        "1.05 * rows of the rank / rows of one rank * its activations", -1, ""});
  return properties;
}

Case reference_case(const std::string& name, const Variant& variant, bool quick) {
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/{}", kSuite, name);
  result.summary = fmt::format("{} ranks, {} micro-batches, {} rows of uneven length, dropout on, {} head", variant.ranks,
                               variant.micro_batches, variant.rows, variant.tied ? "tied" : "untied");
  result.model = small_model(variant.tied);
  result.plan = inputs_of(variant, {}).plan;
  result.criterion = Criterion::rounding;
  result.quick = quick;
  result.execute = [variant](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    CaseEvidence evidence = compare_with_reference(inputs, context);
    evidence.properties = benefits(inputs, *evidence.measured);
    evidence.properties.push_back(proven_program(inputs));
    return evidence;
  };
  return result;
}

// A model of the size that a newcomer trains first, on text that every Debian system carries.
Case text_case(int ranks) {
  static const std::filesystem::path kText = "/usr/share/common-licenses/GPL-3";
  PairInputs base;
  base.model.vocabulary = 256;
  base.model.sequence = 64;
  base.model.hidden = 64;
  base.model.residual_dropout = base.model.embedding_dropout = 0.1;
  base.plan.parallel.data = ranks;
  base.plan.batch = {8, 2};
  base.optimizer.epsilon = 1e-4;  // as above
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/text/ranks{}/fp32", kSuite, ranks);
  result.summary = fmt::format("{} rank(s) on English text against the reference", ranks);
  result.model = base.model;
  result.plan = base.plan;
  result.unavailable = [](const RunContext&) -> std::optional<std::string> {
    if (std::filesystem::exists(kText)) return std::nullopt;
    return "this system does not carry " + kText.string();
  };
  result.execute = [base](const RunContext& context) {
    PairInputs inputs = base;
    inputs.plan.threads_per_rank = context.threads_per_rank;
    inputs.steps = context.repetitions + 1;
    inputs.seed = context.seed;
    inputs.optimizer_frozen = context.pitfalls.on(Pitfall::both_sides_frozen);
    inputs.data = open_text({kText}, {.sequence = inputs.model.sequence, .seed = context.seed});
    CaseEvidence evidence = compare_with_reference(inputs, context);
    evidence.properties = benefits(inputs, *evidence.measured);
    evidence.properties.push_back(proven_program(inputs));
    return evidence;
  };
  return result;
}

// Two runs of the engine that must not differ in a bit.
Case bitwise_case(const std::string& name, const std::string& summary, const Variant& first, const Variant& second) {
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/{}", kSuite, name);
  result.summary = summary;
  result.model = small_model(first.tied);
  result.plan = inputs_of(second, {}).plan;
  result.criterion = Criterion::bitwise;
  result.execute = [first, second](const RunContext& context) {
    CaseEvidence evidence;
    evidence.truth = engine_run(inputs_of(first, context), context, " first").evidence;
    EngineRun run = engine_run(inputs_of(second, context), context, " second");
    evidence.candidate = std::move(run.evidence);
    evidence.measured = std::move(run.measured);
    return evidence;
  };
  return result;
}

// A part of the range of fp16: near 65504 a sum of two overflows; near the smallest normal 2^-14 a division by 64 costs six bits;
// of subnormal numbers near 2^-18 it leaves nothing or one unit in the last place.
struct HalfRange {
  const char* name;
  float scale;
};
constexpr std::array<HalfRange, 3> kHalfRanges = {
    {{"near_largest", 60000.0F}, {"near_smallest_normal", 0x1p-14F}, {"subnormal", 0x1p-18F}}};

// Different on each rank.
std::vector<float> extreme_gradients(float scale, int rank, std::size_t count, std::uint64_t seed) {
  CounterRng rng(seed, fmt::format("extreme gradients {}", rank));
  std::vector<float> values(count);
  for (float& value : values) value = scale * static_cast<float>(0.5 + 0.5 * rng.next_unit());
  return values;
}

std::uint64_t hash_of_floats(const std::vector<float>& values) { return hash64(std::as_bytes(std::span(values))); }

Evidence half_evidence(std::string side, double roundoff, const std::vector<double>& values, int ranks) {
  Evidence evidence;
  evidence.side = std::move(side);
  evidence.unit_roundoff = roundoff;
  evidence.ranks = ranks;
  StageEvidence stage;
  stage.stage = kGradients;
  // Two roundings to fp16 and none of the sum: K = 2 whatever the number of ranks.
  stage.tensors = {{"mean", values, 2.0, false}};
  evidence.stages = {stage};
  return evidence;
}

Case half_reduction_case(const HalfRange& range) {
  constexpr int kRanks = 64;
  constexpr std::size_t kElements = 1021;
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("data_parallel/reduce_fp16/ranks64/{}", range.name);
  result.summary = "mean of fp16 gradients over 64 ranks: no overflow, nothing flushed";
  result.plan.parallel.data = kRanks;
  result.plan.numerics.reduce = DType::f16;
  result.execute = [scale = range.scale](const RunContext& context) {
    std::vector<double> truth(kElements, 0.0);
    std::vector<std::vector<float>> yardstick(kRanks);
    std::vector<std::span<float>> spans;
    for (int rank = 0; rank < kRanks; ++rank) {
      auto& values = yardstick[static_cast<std::size_t>(rank)] = extreme_gradients(scale, rank, kElements, context.seed);
      for (std::size_t i = 0; i < kElements; ++i) truth[i] += static_cast<double>(values[i]) / kRanks;
      spans.emplace_back(values);
    }
    reference::all_reduce_mean_f16<float>(spans);

    std::vector<double> mean;
    CaseEvidence evidence;
    std::vector<std::uint64_t> inputs(kRanks), replicas(kRanks);
    run_world({.ranks = kRanks, .settings = context.world}, [&](Communicator& comm) {
      Arena arena({.poison = true, .huge_pages = false});
      const auto kernels = make_cpu_kernels({});
      std::vector<float> values = extreme_gradients(scale, comm.rank(), kElements, context.seed);
      const auto rank = static_cast<std::size_t>(comm.rank());
      inputs[rank] = hash_of_floats(values);
      all_reduce_mean_f16({&comm, kernels.get(), &arena, nullptr, context.pitfalls, {}}, comm, view_of(values, {kElements}),
                          {Purpose::gradient, "fp16 gradients"});
      replicas[rank] = hash_of_floats(values);
      if (comm.rank() == 0) mean.assign(values.begin(), values.end());
    });
    const std::vector<float>& first = yardstick.front();
    evidence.truth = half_evidence("mean in fp64", unit_roundoff(DType::f64), truth, 1);
    evidence.yardstick = half_evidence("reference fp16 wire", unit_roundoff(DType::f16), {first.begin(), first.end()}, 1);
    evidence.candidate = half_evidence("gradient sync fp16 wire", unit_roundoff(DType::f16), mean, kRanks);
    evidence.candidate->input_hashes = inputs;
    evidence.candidate->replica_hashes = replicas;
    return evidence;
  };
  return result;
}

}  // namespace

void add_data_parallel_cases(CaseList& cases) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const int micro_batches : {1, 3}) {
      const bool tied = (ranks + micro_batches) % 2 == 0;
      cases.push_back(reference_case(fmt::format("ranks{}/accum{}/fp32", ranks, micro_batches),
                                     {.ranks = ranks, .micro_batches = micro_batches, .tied = tied}, true));
      cases.push_back(reference_case(fmt::format("ranks{}/accum{}/fp32/{}", ranks, micro_batches, tied ? "untied" : "tied"),
                                     {.ranks = ranks, .micro_batches = micro_batches, .tied = !tied}, false));
    }
  }
  cases.push_back(
      reference_case("ranks3/accum2/packed/fp32", {.ranks = 3, .micro_batches = 2, .row_shape = RowShape::packed}, true));
  cases.push_back(reference_case("ranks7/rows5/fp32", {.ranks = 7, .rows = 5}, true));
  cases.push_back(reference_case("ranks4/accum3/buckets/fp32", {.ranks = 4, .micro_batches = 3, .bucket_bytes = 8192}, true));
  for (const int ranks : {1, 2, 4}) cases.push_back(text_case(ranks));
  cases.push_back(bitwise_case("ranks4/bucket_sizes/bitwise", "one bucket against many: the same order of sums, the same bits",
                               {.ranks = 4, .micro_batches = 2}, {.ranks = 4, .micro_batches = 2, .bucket_bytes = 4096}));
  cases.push_back(bitwise_case("ranks3/repeat/bitwise", "the same run twice", {.ranks = 3, .micro_batches = 2},
                               {.ranks = 3, .micro_batches = 2}));
  for (const HalfRange& range : kHalfRanges) cases.push_back(half_reduction_case(range));
}

}  // namespace tandem
