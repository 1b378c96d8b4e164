// SPDX-License-Identifier: Apache-2.0
// ZeRO: what data-parallel ranks would all hold is dealt to them. docs/techniques/zero.md
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/suites.h"
#include "suites/zero_cases.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "zero";

void add_against_reference(CaseList& cases) {
  const auto add = [&](const std::string& name, ParallelVariant variant, const PropertiesOf& properties, bool quick = true) {
    cases.push_back(parallel_case(kSuite, name, variant, properties, quick));
  };
  const auto data_parallel = [&](const std::string& name, ParallelVariant variant, bool quick = true) {
    add(name, std::move(variant), zero_data_parallel_properties, quick);
  };
  // AdamW decays matrices and embeddings alone: parts of units begin and end inside tensors of either kind.
  data_parallel("stage1/ranks1/fp32", {.micro_batches = 2, .zero_stage = 1});
  data_parallel("stage3/ranks1/bf16", {.layers = 4, .precision = "bf16", .zero_stage = 3});
  data_parallel("stage1/ranks3/accum2/fp32", {.degrees = {.data = 3}, .micro_batches = 2, .zero_stage = 1});
  data_parallel("stage2/ranks2/accum3/fp32", {.degrees = {.data = 2}, .micro_batches = 3, .zero_stage = 2});
  data_parallel("stage3/ranks4/accum2/fp32", {.degrees = {.data = 4}, .tied = false, .micro_batches = 2, .zero_stage = 3});
  data_parallel("stage3/ranks7/accum1/fp32", {.degrees = {.data = 7}, .layers = 3, .zero_stage = 3});
  data_parallel("stage1/ranks7/accum2/fp32", {.degrees = {.data = 7}, .micro_batches = 2, .rows = 16, .zero_stage = 1});
  data_parallel("stage2/ranks7/bf16", {.degrees = {.data = 7}, .layers = 4, .precision = "bf16", .zero_stage = 2});
  // Six elements of the token table and of the final norm for seven ranks: some own nothing of them.
  for (const int stage : {1, 2, 3}) {
    add(fmt::format("stage{}/ranks7/small/fp32", stage),
        {.degrees = {.data = 7}, .vocabulary = 2, .zero_stage = stage, .hidden = 3, .heads = 1, .mlp_hidden = 5},
        zero_composed_properties);
  }
  data_parallel("stage2/ranks3/sgd/fp32", {.degrees = {.data = 3}, .zero_stage = 2, .optimizer = OptimizerKind::sgd});
  data_parallel("stage1/ranks4/accum2/bf16",
                {.degrees = {.data = 4}, .micro_batches = 2, .layers = 4, .precision = "bf16", .zero_stage = 1});
  data_parallel("stage2/ranks3/accum2/fp16",
                {.degrees = {.data = 3}, .micro_batches = 2, .layers = 4, .precision = "fp16", .zero_stage = 2});
  data_parallel("stage3/ranks3/accum2/bf16",
                {.degrees = {.data = 3}, .micro_batches = 2, .layers = 4, .precision = "bf16", .zero_stage = 3});
  data_parallel("stage3/ranks2/stored-gradients/bf16",
                {.degrees = {.data = 2}, .layers = 4, .precision = "bf16", .zero_stage = 3, .gradients = "stored"});
  add("stage3/data2/tensor2/pipeline2/fp32",
      {.degrees = {.data = 2, .tensor = 2, .pipeline = 2},
       .sequence_parallel = true,
       .micro_batches = 3,
       .layers = 4,
       .zero_stage = 3},
      zero_composed_properties);
  add("stage2/data2/pipeline4/zb-v/fp32",
      {.degrees = {.data = 2, .pipeline = 2}, .pipeline = {"zb-v", 2, ""}, .micro_batches = 3, .layers = 5, .zero_stage = 2},
      zero_composed_properties);
  add("stage3/data2/context2/recompute/fp32",
      {.degrees = {.data = 2, .context = 2}, .layers = 5, .recompute = {"full", 2}, .zero_stage = 3}, zero_composed_properties);
  // A group of three layers is computed again from its first: more layers back than the backward pass gathers ahead.
  add("stage3/data2/recompute3/fp32",
      {.degrees = {.data = 2}, .micro_batches = 2, .layers = 7, .recompute = {"full", 3}, .zero_stage = 3},
      zero_composed_properties);
  add("stage3/experts/fp32", {.degrees = {.data = 4, .expert = 2}, .experts = 4, .choices = 2, .layers = 3, .zero_stage = 3},
      zero_composed_properties);
  add("stage3/data2/tensor2/pipeline2/bf16",
      {.degrees = {.data = 2, .tensor = 2, .pipeline = 2},
       .micro_batches = 2,
       .layers = 5,
       .precision = "bf16",
       .recompute = {"selective", 1},
       .zero_stage = 3},
      zero_composed_properties);
}

void add_bitwise(CaseList& cases) {
  const TwinOf unsharded = [](ParallelVariant& twin) { twin.zero_stage = 0; };
  const TwinOf on_device = [](ParallelVariant& twin) { twin.offload = "none"; };
  const auto sharded = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(twin_case(kSuite, name, "the same bits as unsharded", variant, unsharded, zero_composed_properties));
  };
  sharded("stage1/bitwise", {.degrees = {.data = 3}, .micro_batches = 2, .zero_stage = 1});
  sharded("stage1/fp16/bitwise", {.degrees = {.data = 4}, .micro_batches = 3, .precision = "fp16", .zero_stage = 1});
  sharded("stage1/tensor2/pipeline2/bitwise",
          {.degrees = {.data = 2, .tensor = 2, .pipeline = 2}, .sequence_parallel = true, .micro_batches = 2, .zero_stage = 1});
  sharded("stage1/experts/bitwise", {.degrees = {.data = 4, .expert = 2}, .experts = 4, .micro_batches = 2, .zero_stage = 1});
  sharded(
      "stage1/ranks7/small/bitwise",
      {.degrees = {.data = 7}, .micro_batches = 2, .vocabulary = 2, .zero_stage = 1, .hidden = 3, .heads = 1, .mlp_hidden = 5});
  // With one micro-batch gradients are reduced once in every stage.
  sharded("stage2/bitwise", {.degrees = {.data = 3}, .precision = "bf16", .zero_stage = 2});
  sharded("stage3/bitwise", {.degrees = {.data = 4, .tensor = 2}, .layers = 3, .zero_stage = 3});
  const auto offloaded = [&](const std::string& name, ParallelVariant variant) {
    variant.offload = "optimizer";
    cases.push_back(twin_case(kSuite, name, "the same bits with the optimizer's state in host memory", variant, on_device,
                              zero_offload_properties));
  };
  offloaded("stage0/offload/bitwise", {.layers = 3});
  // A table of more elements than one chunk has: an update of the middle of a tensor.
  offloaded("stage0/offload/large/fp32/bitwise", {.rows = 3, .layers = 1, .vocabulary = 8009});
  offloaded("stage0/offload/large/bf16/bitwise", {.rows = 3, .layers = 1, .vocabulary = 8009, .precision = "bf16"});
  offloaded("stage1/offload/bitwise", {.degrees = {.data = 3}, .layers = 3, .precision = "bf16", .zero_stage = 1});
  offloaded("stage3/offload/bitwise", {.degrees = {.data = 2}, .layers = 3, .precision = "fp16", .zero_stage = 3});
}

double norm_of_first_step(const ParallelVariant& variant, const RunContext& context) {
  return engine_run(inputs_of(variant, context), context).evidence.stages.at(2).tensors.at(0).values.at(0);
}

// Every stage and every way to lay four ranks out takes the same norm.
Case norm_case() {
  const ParallelVariant shown{.degrees = {.data = 4}, .precision = "fp64", .sgd_step_only = true, .zero_stage = 1};
  Case result;
  result.suite = kSuite;
  result.name = fmt::format("{}/norm/fp64", kSuite);
  result.summary = "the gradient norm of every stage on data x tensor = 1x4, 2x2, 4x1: the same bits, and that of one rank";
  result.model = model_of(shown);
  result.plan = plan_of(shown);
  result.criterion = Criterion::convergence;
  result.execute = [shown](const RunContext& context) {
    ParallelVariant one_rank = shown;
    one_rank.degrees = {};
    one_rank.zero_stage = 0;
    const double truth = norm_of_first_step(one_rank, context);
    CaseEvidence evidence;
    for (const int tensor : {1, 2, 4}) {
      ParallelVariant variant = shown;
      variant.degrees = {.data = 4 / tensor, .tensor = tensor};
      variant.zero_stage = 0;
      const double unsharded = norm_of_first_step(variant, context);
      const std::string layout = fmt::format("{}x{}", 4 / tensor, tensor);
      evidence.properties.push_back({"norm_error " + layout, std::abs(unsharded / truth - 1.0), Relation::at_most, 1e-12,
                                     "fp64 rounding of sums in another order", 0, ""});
      for (const int stage : {1, 2, 3}) {
        variant.zero_stage = stage;
        evidence.properties.push_back({fmt::format("norm_difference {} stage {}", layout, stage),
                                       std::abs(norm_of_first_step(variant, context) - unsharded), Relation::equal, 0.0,
                                       "the same sums of the same parts in the same order", 0, ""});
      }
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_zero_cases(CaseList& cases) {
  add_against_reference(cases);
  add_bitwise(cases);
  add_zero_prefetch_cases(cases);
  add_zero_resume_cases(cases);
  cases.push_back(norm_case());
}

}  // namespace tandem
