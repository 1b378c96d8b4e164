// SPDX-License-Identifier: Apache-2.0
// Gradients that travel as lossy codes. docs/techniques/compression.md
#include <fmt/format.h>

#include "suites/compression_cases.h"
#include "suites/suites.h"

namespace tandem {

CompressionConfig compression_of(const std::string& codec, bool error_feedback) {
  CompressionConfig config;
  config.codec = codec;
  config.error_feedback = error_feedback;
  config.block = 64;
  config.density = 0.05;
  config.rank = 2;
  return config;
}

Case compression_case(const std::string& name, const std::string& summary, const ParallelVariant& shown,
                      const CompressionConfig& compression, bool quick) {
  Case result;
  const PairInputs inputs = compressed_inputs(shown, compression, {});
  result.suite = "compression";
  result.name = "compression/" + name;
  result.summary =
      fmt::format("{} {} error feedback, {}, {}: {}", compression.codec, compression.error_feedback ? "with" : "without",
                  describe_layout(inputs.plan), inputs.plan.precision, summary);
  result.model = inputs.model;
  result.plan = inputs.plan;
  result.criterion = Criterion::convergence;
  result.quick = quick;
  return result;
}

namespace {

// What a codec must save at least on the suite's model, whose vectors are short: blocks are not full, and single elements are
// rounded up.
struct Saving {
  std::string codec;
  double ratio;
  std::string derivation;
};

std::vector<Saving> savings() {
  return {
      {"int8", 3.7, "4 / (1 + 4/64) = 3.76 bytes an element in full blocks of 64, less in vectors of 36 and 108"},
      {"int4", 6.8, "4 / (1/2 + 4/64) = 7.11 in full blocks"},
      {"sign", 18.0, "4 / (1/8 + 4/64) = 21.3 in full blocks"},
      {"top_k", 3.8, "2 (N-1) 4 e over N (N-1) 8 k = 1/(0.05 N) = 4 with five ranks, k = e/20 rounded"},
      {"random_k", 19.0, "e / k = 20"},
      {"power_sgd", 8.0, "m n / (2 (m + n)) of [36, 108], [36, 36], [36, 60], [61, 36] is 9 to 13.5; vectors and [17, 36] less"}};
}

std::vector<Property> properties_of(const CompressionScript& script, const CompressionRun& run) {
  std::vector<Property> all = as_the_reference(script, run);
  if (script.inputs.plan.compression.error_feedback) {
    for (Property& property : conserved_each_step(script, run)) all.push_back(std::move(property));
  }
  all.push_back(copies_agree(run));
  all.push_back(bytes_as_programmed(script, run));
  return all;
}

Case codec_case(const Saving& saving, bool error_feedback) {
  // Buckets of two thousand elements, whose sizes five does not divide.
  const ParallelVariant variant{.degrees = {.data = 5}, .micro_batches = 2, .bucket_bytes = 8000};
  const CompressionConfig compression = compression_of(saving.codec, error_feedback);
  Case result = compression_case(fmt::format("{}/{}/ranks5/fp32", saving.codec, error_feedback ? "feedback" : "plain"),
                                 "the definition's sums, nothing lost, bytes of the formula", variant, compression);
  result.execute = [=](const RunContext& context) {
    CompressionScript script;
    script.inputs = compressed_inputs(variant, compression, context);
    const CompressionRun run = run_compressed(script, context);
    CaseEvidence evidence;
    evidence.properties = properties_of(script, run);
    if (error_feedback) evidence.properties.push_back(conserved_in_total({&script}, {&run}));
    for (Property& property : fewer_bytes(script, run, saving.ratio, saving.derivation)) {
      evidence.properties.push_back(std::move(property));
    }
    return evidence;
  };
  return result;
}

// With other techniques: groups that hold copies of a parameter reduce it each for themselves.
Case layout_case(const std::string& name, const CompressionConfig& compression, const ParallelVariant& variant) {
  Case result = compression_case(name, "copies stay copies, nothing lost in any group", variant, compression);
  result.execute = [=](const RunContext& context) {
    CompressionScript script;
    script.inputs = compressed_inputs(variant, compression, context);
    const CompressionRun run = run_compressed(script, context);
    CaseEvidence evidence;
    evidence.properties = properties_of(script, run);
    return evidence;
  };
  return result;
}

Case overlap_case(const std::string& codec) {
  const ParallelVariant variant{.degrees = {.data = 3}, .micro_batches = 2, .layers = 3, .bucket_bytes = 20000};
  const CompressionConfig compression = compression_of(codec);
  Case result = compression_case(fmt::format("{}/overlap/ranks3/fp32", codec),
                                 "reduced in the background of the backward pass: the same bits", variant, compression);
  result.plan.overlap.gradients = true;
  result.execute = [=](const RunContext& context) {
    CompressionScript script;
    script.inputs = compressed_inputs(variant, compression, context);
    const CompressionRun at_the_end = run_compressed(script, context);
    script.inputs.plan.overlap.gradients = true;
    const CompressionRun run = run_compressed(script, context);
    CaseEvidence evidence;
    evidence.properties = properties_of(script, run);
    evidence.properties.push_back(goes_on_bitwise(at_the_end, run));
    return evidence;
  };
  return result;
}

// A scale that grows and falls, overflows that one rank finds after the sums, and at the start some in the gradients themselves,
// for which no code exists.
Case skipped_case(const std::string& codec) {
  ParallelVariant variant{.degrees = {.data = 3}, .precision = "fp16"};
  variant.loss_scale = {"dynamic", 0x1p26, 2.0, 0x1p-8, 2};
  const CompressionConfig compression = compression_of(codec);
  Case result =
      compression_case(fmt::format("{}/skipped/ranks3/fp16", codec),
                       "skipped steps leave every residual as it was, and the scale goes with it", variant, compression);
  result.execute = [=](const RunContext& context) {
    CompressionScript script;
    script.inputs = compressed_inputs(variant, compression, context);
    script.inputs.steps = 10;
    script.overflows = [](int rank, std::int64_t step) { return rank == 1 && (step == 3 || step == 6); };
    const CompressionRun run = run_compressed(script, context);
    CaseEvidence evidence;
    evidence.properties = properties_of(script, run);
    evidence.properties.push_back(conserved_in_total({&script}, {&run}));
    double skipped = 0, scales = 0, without_code = 0;
    const std::vector<CompressionStep>& steps = run.steps.front();
    for (std::size_t i = 0; i < steps.size(); ++i) {
      skipped += steps[i].skipped ? 1 : 0;
      scales += i > 0 && steps[i].loss_scale != steps[i - 1].loss_scale ? 1 : 0;
      without_code += steps[i].skipped && i != 3 && i != 6 ? 1 : 0;
    }
    evidence.properties.push_back(
        {"steps_skipped", skipped, Relation::at_least, 3.0, "two of the script, and the first", -1, ""});
    evidence.properties.push_back(
        {"steps_without_a_code", without_code, Relation::at_least, 1.0, "the scale starts far too large", -1, ""});
    evidence.properties.push_back({"changes_of_scale", scales, Relation::at_least, 4.0, "down, and up every two steps", -1, ""});
    return evidence;
  };
  return result;
}

}  // namespace

void add_compression_cases(CaseList& cases) {
  for (const Saving& saving : savings()) {
    cases.push_back(codec_case(saving, true));
    cases.push_back(codec_case(saving, false));
  }
  cases.push_back(layout_case("int8/data2/context2/fp32", compression_of("int8"), {.degrees = {.data = 2, .context = 2}}));
  cases.push_back(layout_case("int4/data2/tensor2/sequence_parallel/bf16", compression_of("int4"),
                              {.degrees = {.data = 2, .tensor = 2}, .sequence_parallel = true, .precision = "bf16"}));
  cases.push_back(layout_case("top_k/data2/tensor2/pipeline2/fp32", compression_of("top_k"),
                              {.degrees = {.data = 2, .tensor = 2, .pipeline = 2}, .micro_batches = 2, .bucket_bytes = 20000}));
  cases.push_back(layout_case("sign/data2/pipeline2/fp32", compression_of("sign"),
                              {.degrees = {.data = 2, .pipeline = 2}, .micro_batches = 2}));
  cases.push_back(
      layout_case("random_k/experts/fp32", compression_of("random_k"), {.degrees = {.data = 4, .expert = 2}, .experts = 4}));
  cases.push_back(
      layout_case("power_sgd/data2/tensor2/fp32", compression_of("power_sgd"), {.degrees = {.data = 2, .tensor = 2}}));
  // A factor of one column is the smallest, and not half of what two would be where places are counted wrongly.
  CompressionConfig one_column = compression_of("power_sgd");
  one_column.rank = 1;
  cases.push_back(layout_case("power_sgd/rank1/ranks3/fp32", one_column, {.degrees = {.data = 3}, .bucket_bytes = 20000}));
  for (const char* codec : {"int8", "top_k", "power_sgd"}) cases.push_back(overlap_case(codec));
  for (const char* codec : {"int8", "top_k", "power_sgd"}) cases.push_back(skipped_case(codec));
  add_compression_size_cases(cases);
  add_compression_resume_cases(cases);
  add_compression_convergence_cases(cases);
  add_compression_time_cases(cases);
}

}  // namespace tandem
