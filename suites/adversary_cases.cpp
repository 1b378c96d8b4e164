// SPDX-License-Identifier: Apache-2.0
// Every technique on a transport that completes late, lets messages overtake each other and shows NaN in buffers that nobody may
// read. docs/measuring.md, "Time is adversarial"
#include "suites/adversary_cases.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include <fmt/format.h>

#include "optimized/engine/lower.h"
#include "suites/suites.h"

namespace tandem {
namespace {

// Longer than an operation on these small models takes, short enough for hundreds of them.
constexpr double kLongestDelaySeconds = 5e-4;

RunContext undisturbed(const RunContext& context, CollectiveAlgorithm algorithm) {
  RunContext result = context;
  result.world.adversary.reset();
  if (algorithm != CollectiveAlgorithm::direct) result.world.algorithm = algorithm;
  return result;
}

RunContext disturbed(const RunContext& context, CollectiveAlgorithm algorithm) {
  RunContext result = undisturbed(context, algorithm);
  result.world.adversary = context.world.adversary.value_or(AdversaryScript{context.seed, kLongestDelaySeconds});
  return result;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y); });
}

// Tensors of all stages, and copies of them, that have other bits than in the undisturbed run.
Property unlike(const Evidence& run, const Evidence& calm) {
  double count = 0;
  std::string first;
  const auto note = [&](bool same, const std::string& tensor) {
    if (same) return;
    if (count == 0) first = tensor;
    count += 1;
  };
  for (std::size_t stage = 0; stage < std::max(run.stages.size(), calm.stages.size()); ++stage) {
    const std::vector<EvidenceTensor>& mine = run.stages.at(stage).tensors;
    const std::vector<EvidenceTensor>& twins = calm.stages.at(stage).tensors;
    for (std::size_t i = 0; i < std::max(mine.size(), twins.size()); ++i) {
      note(same_bits(mine.at(i).values, twins.at(i).values), mine.at(i).name);
    }
  }
  const auto in_order = [](std::vector<ReplicaHash> copies) {
    std::sort(copies.begin(), copies.end(), [](const ReplicaHash& a, const ReplicaHash& b) {
      return std::tie(a.stage, a.tensor, a.part, a.rank) < std::tie(b.stage, b.tensor, b.part, b.rank);
    });
    return copies;
  };
  const std::vector<ReplicaHash> mine = in_order(run.replicas);
  const std::vector<ReplicaHash> twins = in_order(calm.replicas);
  for (std::size_t i = 0; i < std::max(mine.size(), twins.size()); ++i)
    note(mine.at(i).hash == twins.at(i).hash, mine.at(i).tensor);
  return {"tensors_unlike_undisturbed",
          count,
          Relation::equal,
          0.0,
          "when and in which order operations complete changes no bit of any stage, step or replica",
          -1,
          first};
}

// Of the programs that the engine executes, faults included.
Property problems_as_executed(const PairInputs& inputs, const PitfallSet& pitfalls) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < inputs.plan.parallel.world_size(); ++rank) {
    programs.push_back(lower(inputs.plan, inputs.model, inputs.data->sequence(), rank, pitfalls));
  }
  const ProgramFacts facts = check_programs(programs, expectation(inputs.plan, inputs.model, inputs.data->sequence()));
  return {"problems_of_executed_programs",
          static_cast<double>(facts.problems.size()),
          Relation::equal,
          0.0,
          facts.problems.empty() ? "every operation waits for all that it needs" : facts.problems.front(),
          -1,
          ""};
}

void add_pipelines(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(adversary_case("pipeline_parallel", name, variant, "messages arrive late and overtake collectives"));
  };
  // Two ranks that are neighbours on both sides, with messages of several kinds on the same pair.
  add("interleaved",
      {.degrees = {.pipeline = 2}, .pipeline = {.schedule = "interleaved", .chunks = 2}, .micro_batches = 4, .layers = 4});
  const ParallelVariant zb_v{
      .degrees = {.pipeline = 2}, .pipeline = {.schedule = "zb-v", .chunks = 2}, .micro_batches = 6, .rows = 12, .layers = 5};
  add("zb-v", zb_v);
  cases.push_back(
      adversary_case("pipeline_parallel", "zb-v/messages", zb_v, "everything is a message, and late", CollectiveAlgorithm::ring));
  add("ranks3", {.degrees = {.pipeline = 3}, .pipeline = {.stage_layers = "1-3-1"}, .micro_batches = 5, .layers = 5});
  add("data2", {.degrees = {.data = 2, .pipeline = 2}, .micro_batches = 3, .precision = "bf16"});
}

void add_zero(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(adversary_case("zero", name, variant, "parts of gradients and parameters arrive late"));
  };
  add("stage1", {.degrees = {.data = 3}, .micro_batches = 2, .zero_stage = 1, .overlap = {.gradients = true}});
  add("stage2", {.degrees = {.data = 3}, .micro_batches = 2, .zero_stage = 2, .overlap = {.gradients = true}});
  add("stage3", {.degrees = {.data = 3}, .micro_batches = 2, .layers = 4, .zero_stage = 3});
  add("stage3/overlap",
      {.degrees = {.data = 2, .tensor = 2}, .micro_batches = 2, .layers = 4, .zero_stage = 3, .overlap = {.gradients = true}});
  add("stage3/offload", {.degrees = {.data = 2}, .layers = 3, .precision = "fp16", .zero_stage = 3, .offload = "optimizer"});
}

void add_overlap(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(adversary_case("overlap", name, variant, "buckets are reduced late while the backward pass goes on"));
  };
  // From every tensor for itself, by way of some, to the whole model in one.
  for (const std::int64_t bucket_bytes : {4, 20000, 10000000}) {
    add(fmt::format("bucket{}", bucket_bytes),
        {.degrees = {.data = 3}, .micro_batches = 2, .layers = 3, .bucket_bytes = bucket_bytes, .overlap = {.gradients = true}});
  }
  cases.push_back(adversary_case(
      "overlap", "messages", {.degrees = {.data = 3}, .micro_batches = 2, .bucket_bytes = 8000, .overlap = {.gradients = true}},
      "buckets go around a ring late", CollectiveAlgorithm::ring));
  add("untied/bf16", {.degrees = {.data = 2},
                      .tied = false,
                      .micro_batches = 3,
                      .bucket_bytes = 8000,
                      .precision = "bf16",
                      .overlap = {.gradients = true}});
  add("pipeline2/data2", {.degrees = {.data = 2, .pipeline = 2},
                          .micro_batches = 3,
                          .layers = 4,
                          .bucket_bytes = 8000,
                          .overlap = {.gradients = true}});
}

}  // namespace

Case adversary_case(const std::string& suite, const std::string& name, const ParallelVariant& variant, const std::string& summary,
                    CollectiveAlgorithm algorithm) {
  const std::string full_name = "adversary/" + name;
  Case result = parallel_case(suite, full_name, variant, {});
  result.summary += "; " + summary;
  result.execute = [suite, full_name, variant, algorithm](const RunContext& context) {
    const PropertiesOf compare = [&](const PairInputs& inputs, const EngineRun& run) {
      const EngineRun calm = engine_run(inputs, undisturbed(context, algorithm), " undisturbed");
      return std::vector<Property>{unlike(run.evidence, calm.evidence), problems_as_executed(inputs, context.pitfalls)};
    };
    CaseEvidence evidence = parallel_case(suite, full_name, variant, compare).execute(disturbed(context, algorithm));
    evidence.measured.reset();
    return evidence;
  };
  result.localise = [localise = std::move(result.localise), algorithm](const RunContext& context) {
    return localise(disturbed(context, algorithm));
  };
  return result;
}

void add_adversary_cases(CaseList& cases) {
  add_pipelines(cases);
  add_zero(cases);
  add_overlap(cases);
  cases.push_back(adversary_case("data_parallel", "buckets",
                                 {.degrees = {.data = 3}, .micro_batches = 2, .bucket_bytes = 8000, .precision = "fp16"},
                                 "buckets are reduced late"));
  cases.push_back(adversary_case("tensor_parallel", "sequence",
                                 {.degrees = {.data = 2, .tensor = 2}, .sequence_parallel = true, .micro_batches = 2},
                                 "slices are gathered and scattered late"));
  cases.push_back(adversary_case("context_parallel", "ring", {.degrees = {.context = 3}, .micro_batches = 2},
                                 "keys and values come around the ring late"));
  cases.push_back(adversary_case("expert_parallel", "exchange",
                                 {.degrees = {.data = 4, .expert = 2}, .experts = 4, .choices = 2, .micro_batches = 2},
                                 "tokens come to their experts late"));
}

}  // namespace tandem
