// SPDX-License-Identifier: Apache-2.0
// What a checkpoint must keep of compression: residuals are what the ranks have not in common.
#include <fmt/format.h>

#include "suites/compression_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

constexpr std::int64_t kSavedAfter = 3;
constexpr std::int64_t kSteps = 6;

struct Side {
  ParallelVariant variant;
  CompressionConfig compression;
};

struct Interrupted {
  CompressionScript first, second;
  CompressionRun before, after;
};

Interrupted interrupted(const Side& before, const Side& after, const RunContext& context) {
  const ScratchFolder scratch("compression-resume");
  Interrupted both;
  both.first.inputs = compressed_inputs(before.variant, before.compression, context);
  both.first.inputs.steps = kSavedAfter;
  both.first.save = scratch.path();
  both.before = run_compressed(both.first, context);
  both.second.inputs = compressed_inputs(after.variant, after.compression, context);
  both.second.inputs.steps = kSteps;
  both.second.first_step = kSavedAfter;
  both.second.load = scratch.path();
  both.after = run_compressed(both.second, context);
  return both;
}

// The sums depend on no bucket's bounds: a run whose buckets are cut anew goes on with the same bits.
Case bitwise_case(const std::string& name, const std::string& summary, const Side& before, std::int64_t bucket_bytes_after) {
  Case result = compression_case("resume/" + name, summary, before.variant, before.compression);
  result.execute = [=](const RunContext& context) {
    Side after = before;
    after.variant.bucket_bytes = bucket_bytes_after;
    CompressionScript uninterrupted;
    uninterrupted.inputs = compressed_inputs(before.variant, before.compression, context);
    uninterrupted.inputs.steps = kSteps;
    const CompressionRun whole = run_compressed(uninterrupted, context);
    const Interrupted both = interrupted(before, after, context);
    CaseEvidence evidence;
    evidence.properties = conserved_each_step(both.second, both.after);
    evidence.properties.push_back(goes_on_bitwise(whole, both.after));
    const ParallelDegrees& degrees = before.variant.degrees;
    if (degrees.tensor * degrees.pipeline == 1) {
      evidence.properties.push_back(conserved_in_total({&both.first, &both.second}, {&both.before, &both.after}));
    }
    evidence.properties.push_back(copies_agree(both.after));
    return evidence;
  };
  return result;
}

Case other_layout_case(const std::string& name, const Side& before, const Side& after) {
  Case result = compression_case("resume/" + name, "another layout or codec goes on: what was not sent yet still is",
                                 after.variant, after.compression);
  result.execute = [=](const RunContext& context) {
    const Interrupted both = interrupted(before, after, context);
    CaseEvidence evidence;
    evidence.properties = conserved_each_step(both.second, both.after);
    evidence.properties.push_back(conserved_in_total({&both.first, &both.second}, {&both.before, &both.after}));
    evidence.properties.push_back(copies_agree(both.after));
    return evidence;
  };
  return result;
}

}  // namespace

void add_compression_resume_cases(CaseList& cases) {
  const ParallelVariant three{.degrees = {.data = 3}, .bucket_bytes = 20000};
  const ParallelVariant two{.degrees = {.data = 2}};
  ParallelVariant half = three;
  half.precision = "fp16";
  half.loss_scale.growth_interval = 2;
  const char* same = "bit for bit the run that was not interrupted";
  const char* rebuilt = "bit for bit, with other buckets than before";
  cases.push_back(bitwise_case("int8", same, {three, compression_of("int8")}, 20000));
  cases.push_back(bitwise_case("power_sgd", same, {three, compression_of("power_sgd")}, 20000));
  cases.push_back(bitwise_case("top_k/fp16", same, {half, compression_of("top_k")}, 20000));
  cases.push_back(bitwise_case("sign/data2/tensor2", same,
                               {{.degrees = {.data = 2, .tensor = 2}, .bucket_bytes = 20000}, compression_of("sign")}, 20000));
  cases.push_back(bitwise_case("int4/rebuilt", rebuilt, {three, compression_of("int4")}, 7000));
  cases.push_back(bitwise_case("top_k/rebuilt", rebuilt, {three, compression_of("top_k")}, 0));
  cases.push_back(other_layout_case("int8/ranks3-to-2", {three, compression_of("int8")}, {two, compression_of("int8")}));
  cases.push_back(other_layout_case("top_k/ranks2-to-3", {two, compression_of("top_k")}, {three, compression_of("top_k")}));
  cases.push_back(other_layout_case("int4-to-top_k", {three, compression_of("int4")}, {three, compression_of("top_k")}));
}

}  // namespace tandem
