// SPDX-License-Identifier: Apache-2.0
// Overlap: communication in the background of the computation that does not need it. docs/techniques/overlap.md
#include <algorithm>

#include <fmt/format.h>

#include "optimized/engine/lower.h"
#include "suites/benefits.h"
#include "suites/overlap_cases.h"
#include "suites/parallel_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "overlap";

void without_overlap(ParallelVariant& variant) { variant.overlap = {.gradients = false, .prefetch = false, .tensor_chunks = 1}; }

ParallelVariant overlapped(ParallelVariant variant) {
  variant.overlap.gradients = true;
  return variant;
}

bool adds_to_gradients(const Operation& op) {
  return op.kind == OpKind::compute && (op.phase == Phase::backward_weight || op.part == Part::head_loss);
}

// Every reduction of a bucket is in the background and right behind an operation that adds to gradients; that it is not too early
// is for the checker to prove.
Property issued_early(const PairInputs& inputs) {
  double late = 0;
  double buckets = 0;
  for (const StepProgram& program : programs_of(inputs)) {
    const Operation* last = nullptr;  // that takes time, in the foreground
    for (const Operation& op : program) {
      const bool is_bucket = op.kind == OpKind::communicate && op.purpose == Purpose::gradient && op.bucket >= 0;
      if (is_bucket) {
        buckets += 1;
        late += op.background && last != nullptr && adds_to_gradients(*last) ? 0 : 1;
      } else if (!op.background && op.kind != OpKind::allocate && op.kind != OpKind::free) {
        last = &op;
      }
    }
  }
  return {"buckets_issued_late",
          late,
          Relation::equal,
          0,
          fmt::format("all {} reductions of buckets are in the background, right behind what completes them", buckets),
          -1,
          ""};
}

// Programs say what should be; the timeline what was: until its last computation no rank carries out or waits for a reduction
// itself. With ZeRO 2 and 3 it may, where it frees the gradients of the layer before.
Property nothing_waited_for(const PairInputs& inputs, const Measured& measured) {
  double waits = 0;
  for (const std::vector<Span>& spans : measured.spans_by_rank) {
    for (int step = 0; step < inputs.steps; ++step) {
      std::int64_t last_computation_ns = 0;
      for (const Span& span : spans) {
        if (span.step == step && span.activity == Activity::compute)
          last_computation_ns = std::max(last_computation_ns, span.begin_ns);
      }
      const auto window = std::find_if(spans.begin(), spans.end(),
                                       [&](const Span& span) { return span.step == step && span.activity == Activity::step; });
      if (window == spans.end()) continue;
      for (const Span& span : spans) {
        const bool in_step = span.begin_ns >= window->begin_ns && span.begin_ns < last_computation_ns;
        waits += in_step && span.purpose == Purpose::gradient && span.lane == Lane::compute ? 1 : 0;
      }
    }
  }
  return {"reductions_waited_for_in_the_backward_pass",
          waits,
          Relation::equal,
          0,
          "by the timelines of all ranks: none before the last computation of a step",
          -1,
          ""};
}

std::vector<Property> properties(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = {issued_early(inputs), sent_as_programmed(inputs, run.measured, Purpose::gradient),
                               sent_as_programmed(inputs, run.measured, Purpose::parameter)};
  if (inputs.plan.zero_stage < 2) all.push_back(nothing_waited_for(inputs, run.measured));
  return all;
}

void add_bitwise(CaseList& cases) {
  const auto same_bits = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(twin_case(kSuite, name + "/bitwise", "the same bits as without overlap", overlapped(variant), without_overlap,
                              properties));
  };
  // A bucket for every tensor, a few tensors each, one for all.
  same_bits("ranks3/accum2/bucket-of-a-tensor", {.degrees = {.data = 3}, .micro_batches = 2, .bucket_bytes = 1});
  same_bits("ranks4/accum3/buckets", {.degrees = {.data = 4}, .micro_batches = 3, .layers = 3, .bucket_bytes = 8192});
  same_bits("ranks2/one-bucket", {.degrees = {.data = 2}, .micro_batches = 2});
  same_bits("ranks3/untied/bf16", {.degrees = {.data = 3}, .tied = false, .bucket_bytes = 8192, .precision = "bf16"});
  same_bits("ranks2/stored/fp16",
            {.degrees = {.data = 2}, .micro_batches = 2, .bucket_bytes = 4096, .precision = "fp16", .gradients = "stored"});
  same_bits("data2/tensor2/pipeline2", {.degrees = {.data = 2, .tensor = 2, .pipeline = 2},
                                        .sequence_parallel = true,
                                        .micro_batches = 3,
                                        .layers = 4,
                                        .bucket_bytes = 4096});
  same_bits("data2/zb-v", {.degrees = {.data = 2, .pipeline = 2},
                           .pipeline = {"zb-v", 2, ""},
                           .micro_batches = 3,
                           .layers = 5,
                           .bucket_bytes = 4096});
  same_bits("data2/context2/recompute",
            {.degrees = {.data = 2, .context = 2}, .layers = 4, .bucket_bytes = 8192, .recompute = {"full", 2}});
  same_bits("experts",
            {.degrees = {.data = 4, .expert = 2}, .experts = 4, .choices = 2, .micro_batches = 2, .bucket_bytes = 8192});
  same_bits("stage1/ranks3/accum2", {.degrees = {.data = 3}, .micro_batches = 2, .layers = 3, .zero_stage = 1});
  same_bits("stage2/ranks3/accum2", {.degrees = {.data = 3}, .micro_batches = 2, .layers = 3, .zero_stage = 2});
  same_bits("stage3/ranks4/accum2/bf16",
            {.degrees = {.data = 4}, .micro_batches = 2, .layers = 3, .precision = "bf16", .zero_stage = 3});
  same_bits("stage3/data2/tensor2/pipeline2", {.degrees = {.data = 2, .tensor = 2, .pipeline = 2},
                                               .sequence_parallel = true,
                                               .micro_batches = 3,
                                               .layers = 5,
                                               .zero_stage = 3});
}

void add_against_reference(CaseList& cases) {
  const auto add = [&](const std::string& name, const ParallelVariant& variant) {
    cases.push_back(parallel_case(kSuite, name, overlapped(variant), properties));
  };
  add("ranks4/accum2/fp32", {.degrees = {.data = 4}, .micro_batches = 2, .layers = 3, .bucket_bytes = 8192});
  add("stage2/ranks3/accum2/fp32", {.degrees = {.data = 3}, .micro_batches = 2, .layers = 3, .zero_stage = 2});
  add("data2/tensor2/pipeline2/fp32", {.degrees = {.data = 2, .tensor = 2, .pipeline = 2},
                                       .sequence_parallel = true,
                                       .micro_batches = 2,
                                       .layers = 4,
                                       .bucket_bytes = 4096});
}

}  // namespace

void add_overlap_cases(CaseList& cases) {
  add_against_reference(cases);
  add_bitwise(cases);
  add_overlap_time_cases(cases);
  add_overlap_tensor_cases(cases);
}

}  // namespace tandem
