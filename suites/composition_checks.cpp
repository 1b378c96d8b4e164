// SPDX-License-Identifier: Apache-2.0
// A composition of options as cases that the harness judges. docs/compositions.md
#include "suites/composition_checks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/compression_run.h"
#include "suites/expected_yardstick.h"
#include "suites/expert_ledger.h"
#include "suites/held_out.h"
#include "suites/overflow_script.h"

namespace tandem {
namespace {

// Sent whole, by way of the codec's own path.
bool is_lossless(const CompressionConfig& compression) {
  return compression.codec == "none" || (compression.codec == "top_k" && compression.density == 1.0);
}

Composition without_lossy_code(Composition composition) {
  if (!is_lossless(composition.config.plan.compression)) composition.config.plan.compression = {};
  return composition;
}

// Forms that hold of rows of one length, whose collectives share memory.
bool has_byte_forms(const Composition& composition) {
  return composition.second_row_tokens == 0 && composition.algorithm == "direct" &&
         composition.config.plan.compression.codec == "none";
}

// The suite's ledger but for what it knows of its own model and precision.
std::vector<Property> routing_ledger(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> ledger = expert_ledger(inputs, run);
  std::erase_if(ledger, [&](const Property& property) {
    return property.name == "dropped_assignments" || property.name == "auxiliary_loss_error";
  });
  return ledger;
}

std::vector<Property> byte_forms(const PairInputs& inputs, const EngineRun& run) {
  std::vector<Property> all = {state_as_predicted(inputs, run.measured), activations_as_predicted(inputs, run.measured)};
  for (const Purpose purpose : {Purpose::activation, Purpose::gradient, Purpose::parameter})
    all.push_back(sent_as_programmed(inputs, run.measured, purpose));
  return all;
}

// Double has no wider reference that would show its rounding errors; those of fp32 over the same path are 2^29 times as large.
// And the truth has them too: where each side is within B of what is exact, the two are within 2 B of each other.
constexpr double kSidesThatRound = 2;

Evidence errors_of_double(const Evidence& truth, Evidence narrow) {
  constexpr double kOfSingle = kSidesThatRound * 0x1p-29;
  narrow.side += ", errors in units of fp64";
  narrow.unit_roundoff = kSidesThatRound * truth.unit_roundoff;
  for (std::size_t stage = 0; stage < narrow.stages.size(); ++stage) {
    for (std::size_t t = 0; t < narrow.stages[stage].tensors.size(); ++t) {
      const std::vector<double>& exact = truth.stages.at(stage).tensors.at(t).values;
      std::vector<double>& values = narrow.stages[stage].tensors[t].values;
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = exact.at(i) + (values[i] - exact.at(i)) * kOfSingle;
    }
  }
  return narrow;
}

CaseEvidence beside_the_reference(const Composition& composition, const RunContext& context) {
  const PairInputs inputs = inputs_of(composition);
  CaseEvidence evidence;
  evidence.truth = reference_evidence<double>(inputs, 1, 1);
  evidence.yardstick = expected_yardstick(inputs, *evidence.truth);
  if (inputs.plan.numerics.storage == DType::f64)
    evidence.yardstick = errors_of_double(*evidence.truth, std::move(*evidence.yardstick));
  EngineRun run = engine_run(inputs, context_of(composition, context));
  if (inputs.steps > 0 && has_byte_forms(composition)) evidence.properties = byte_forms(inputs, run);
  if (inputs.steps > 0 && inputs.model.experts > 0 && composition.second_row_tokens == 0) {
    for (Property& property : routing_ledger(inputs, run)) evidence.properties.push_back(std::move(property));
  }
  evidence.properties.push_back(proven_program(inputs));
  evidence.candidate = std::move(run.evidence);
  if (inputs.plan.numerics.storage == DType::f64) evidence.candidate->unit_roundoff *= kSidesThatRound;
  return evidence;
}

// The composition without all that must not change a bit of it.
Composition plain_twin(const Composition& composition) {
  Composition twin = composition;
  TrainingPlan& plan = twin.config.plan;
  plan.overlap.gradients = false;
  plan.overlap.prefetch = plan.zero_stage != 3;
  // Pieces of a product may have other bits than the whole one that recomputation makes.
  if (plan.overlap.tensor_chunks == 1) plan.recompute = {};
  plan.offload = "none";
  twin.adversary = 0;
  // Stage 1 deals the update alone. The others reduce gradients once for each micro-batch; messages that are summed around a ring
  // have an order that depends on where in the bucket an element is.
  const bool same_order = plan.zero_stage == 1 || plan.batch.micro_batches == 1;
  if (same_order && composition.algorithm == "direct") {
    plan.zero_stage = 0;
    plan.overlap.prefetch = true;
  }
  return twin;
}

CaseEvidence beside_the_twin(const Composition& composition, const RunContext& context) {
  const Composition twin = plain_twin(composition);
  CaseEvidence evidence;
  evidence.truth = engine_run(inputs_of(twin), context_of(twin, context), " twin").evidence;
  evidence.candidate = engine_run(inputs_of(composition), context_of(composition, context)).evidence;
  return evidence;
}

CaseEvidence beside_the_codec(const Composition& composition, const RunContext& context) {
  CompressionScript script;
  script.inputs = inputs_of(composition);
  const CompressionRun run = run_compressed(script, context_of(composition, context));
  CaseEvidence evidence;
  // The definition adds in the order of ranks.
  if (composition.algorithm == "direct") evidence.properties = as_the_reference(script, run);
  if (script.inputs.plan.compression.error_feedback) {
    const SumOrder order = composition.algorithm == "direct" ? SumOrder::ranks : SumOrder::other;
    for (Property& property : conserved_each_step(script, run, order)) evidence.properties.push_back(std::move(property));
  }
  evidence.properties.push_back(copies_agree(run));
  if (composition.algorithm == "direct") evidence.properties.push_back(bytes_as_programmed(script, run));
  return evidence;
}

// (rank, step) pairs whose histories of fp8 scales are not those of `twin`, from the skipped step on; there, of the run that went
// on with that step.
Property histories_go_on(const ScriptedRun& run, const ScriptedRun& twin, const ScriptedRun& unskipped, std::int64_t skipped) {
  const auto first = static_cast<std::size_t>(skipped);
  double differing = 0;
  for (std::size_t rank = 0; rank < run.steps.size(); ++rank) {
    differing += run.steps[rank][first].fp8 == unskipped.steps[rank][first].fp8 ? 0 : 1;
    for (std::size_t step = first + 1; step < run.steps[rank].size(); ++step) {
      differing += run.steps[rank][step].fp8 == twin.steps[rank].at(step - 1).fp8 ? 0 : 1;
    }
  }
  return {"fp8_histories_that_differ",
          differing,
          Relation::equal,
          0.0,
          "a step that is skipped leaves its largest values as any other does (reference/fp8.h)",
          -1,
          ""};
}

CaseEvidence with_an_overflow(const Composition& composition, const RunContext& context) {
  Script script;
  script.inputs = inputs_of(composition);
  const std::int64_t skipped = composition.overflow_step;
  script.overflows = [skipped, rank = static_cast<int>(composition.overflow_rank)](int of, std::int64_t at) {
    return of == rank && at == skipped;
  };
  const RunContext run_context = context_of(composition, context);
  Script without = without_overflows(script);
  ScriptedRun unskipped;
  const bool fp8 = script.inputs.plan.numerics.fp8;
  if (fp8) {
    Script same = script;
    same.overflows = {};
    unskipped = run_script(same, run_context, "with the step");
    without.before_step = [&unskipped, skipped, scale = without.before_step](Engine& engine, std::int64_t step) {
      scale(engine, step);
      const auto rank = static_cast<std::size_t>(engine.groups().rank());
      if (step == skipped + 1) engine.fp8_scaling()->set_state(unskipped.steps[rank][static_cast<std::size_t>(skipped)].fp8);
    };
  }
  ScriptedRun twin = run_script(without, run_context, "without the skipped step");
  ScriptedRun run = run_script(script, run_context, "with an overflow");
  CaseEvidence evidence;
  evidence.properties = overflow_properties(script, run);
  if (fp8) evidence.properties.push_back(histories_go_on(run, twin, unskipped, skipped));
  evidence.truth = std::move(twin.evidence);
  evidence.candidate = std::move(run.evidence);
  return evidence;
}

using Execute = CaseEvidence (*)(const Composition&, const RunContext&);

Case composition_case(const Composition& composition, const std::string& name, const std::string& check, Criterion criterion,
                      Execute execute) {
  Case result;
  result.suite = "compositions";
  result.name = fmt::format("compositions/{}/{}", name, check);
  const RunConfig& config = composition.config;
  result.summary =
      fmt::format("{} rank(s), {}, {}", config.plan.parallel.world_size(), describe_layout(config.plan), config.plan.precision);
  result.model = config.model;
  result.plan = config.plan;
  result.criterion = criterion;
  result.execute = [composition, execute](const RunContext& context) { return execute(composition, context); };
  return result;
}

}  // namespace

CaseList composition_cases(const Composition& composition, const std::string& name) {
  const TrainingPlan& plan = composition.config.plan;
  CaseList cases;
  const auto add = [&](const Composition& of, const std::string& check, Criterion criterion, Execute execute) {
    cases.push_back(composition_case(of, name, check, criterion, execute));
  };
  const Composition lossless = without_lossy_code(composition);
  add(lossless, "reference", Criterion::rounding, beside_the_reference);
  cases.back().localise = [lossless](const RunContext& context) {
    return localise(inputs_of(lossless), context_of(lossless, context));
  };
  if (to_settings(plain_twin(composition)) != to_settings(composition))
    add(composition, "bits", Criterion::bitwise, beside_the_twin);
  if (plan.compression.codec != "none") add(composition, "compression", Criterion::convergence, beside_the_codec);
  if (composition.overflow_step >= 0) add(composition, "overflow", Criterion::bitwise, with_an_overflow);
  add(composition, "evaluation", Criterion::convergence, [](const Composition& of, const RunContext& context) {
    return beside_held_out_rows(inputs_of(of), context_of(of, context));
  });
  return cases;
}

std::string check_of(const std::string& case_name) { return case_name.substr(case_name.rfind('/') + 1); }

}  // namespace tandem
