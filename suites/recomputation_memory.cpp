// SPDX-License-Identifier: Apache-2.0
// Activation bytes in every mode: measured beside predicted, and beside what is published.
#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "suites/benefits.h"
#include "suites/parallel_cases.h"
#include "suites/recomputation_cases.h"

namespace tandem {
namespace {

constexpr const char* kSuite = "recomputation";
constexpr std::size_t kActivations = static_cast<std::size_t>(MemoryCategory::activations);

struct Layout {
  const char* name;
  ParallelVariant variant;
};

// a s / h = 8, and every tensor is a multiple of 64 bytes, sliced or not: what is measured is what is kept.
PairInputs sized_inputs(ParallelVariant variant, const RunContext& context) {
  constexpr std::int64_t kSequence = 64;
  variant.row_tokens = kSequence;
  variant.row_shape = RowShape::full;
  variant.rows = 2 * variant.degrees.data;
  PairInputs inputs = inputs_of(variant, context);
  inputs.model.hidden = 64;
  inputs.model.heads = 8;
  inputs.model.mlp_hidden = 256;
  inputs.model.sequence = kSequence;
  inputs.steps = 2;
  return inputs;
}

// Elements of `run` that are other ones than in `truth`, over all stages.
double different_elements(const Evidence& truth, const Evidence& run) {
  if (truth.stages.size() != run.stages.size()) return std::nan("");
  double different = 0;
  for (std::size_t s = 0; s < truth.stages.size(); ++s) {
    const auto& expected = truth.stages[s].tensors;
    const auto& found = run.stages[s].tensors;
    if (expected.size() != found.size()) return std::nan("");
    for (std::size_t t = 0; t < expected.size(); ++t) {
      if (expected[t].values.size() != found[t].values.size()) return std::nan("");
      for (std::size_t i = 0; i < expected[t].values.size(); ++i) {
        different += expected[t].values[i] == found[t].values[i] ? 0 : 1;
      }
    }
  }
  return different;
}

Case properties_case(const std::string& name, const std::string& summary, const ParallelVariant& shown) {
  Case result;
  const PairInputs inputs = sized_inputs(shown, {});
  result.suite = kSuite;
  result.name = fmt::format("{}/{}", kSuite, name);
  result.summary = summary;
  result.model = inputs.model;
  result.plan = inputs.plan;
  result.criterion = Criterion::convergence;
  return result;
}

void check_mode(const ParallelVariant& variant, const RunContext& context, const std::string& mode, EngineRun& kept_all,
                CaseEvidence& evidence) {
  const PairInputs inputs = sized_inputs(variant, context);
  EngineRun run = engine_run(inputs, context);
  const std::string row = fmt::format("{}/{}/{}", variant.precision, variant.attention, mode);
  evidence.properties.push_back(activations_near_prediction(run.measured, row));
  evidence.properties.push_back(activations_as_predicted(inputs, run.measured));
  evidence.properties.back().name += "/" + row;
  if (mode == "none") {
    kept_all = std::move(run);
    return;
  }
  const auto bytes = [](const EngineRun& of) { return static_cast<double>(of.measured.peak_bytes[kActivations]); };
  evidence.properties.push_back({"different_elements/" + row, different_elements(kept_all.evidence, run.evidence),
                                 Relation::equal, 0.0, "gradients, parameters, losses and norms of the run that keeps everything",
                                 -1, ""});
  evidence.properties.push_back(
      {"share_of_none/" + row, bytes(run) / bytes(kept_all), Relation::at_most, 0.9, "less than it was", -1, ""});
  evidence.candidate = std::move(run.evidence);
}

Case memory_case(const Layout& layout) {
  Case result = properties_case(fmt::format("memory/{}", layout.name),
                                "every mode, blocked and materialized, fp32 and bf16: measured within 10 % of predicted bytes",
                                layout.variant);
  result.execute = [layout](const RunContext& context) {
    const std::pair<const char*, RecomputeConfig> modes[] = {
        {"none", {}}, {"selective", {"selective", 1}}, {"full", {"full", 1}}, {"every2", {"full", 2}}};
    CaseEvidence evidence;
    for (const char* precision : {"fp32", "bf16"}) {
      for (const char* attention : {"blocked", "materialized"}) {
        EngineRun kept_all;
        for (const auto& [mode, recompute] : modes) {
          ParallelVariant variant = layout.variant;
          variant.precision = precision;
          variant.attention = attention;
          variant.recompute = recompute;
          check_mode(variant, context, mode, kept_all, evidence);
        }
      }
    }
    return evidence;
  };
  return result;
}

// Measured bytes of one layer: what two more cost. Gives the sides of the last run to `evidence`.
double layer_bytes(ParallelVariant variant, const RunContext& context, CaseEvidence& evidence) {
  double bytes[2] = {};
  for (const int more : {0, 1}) {
    variant.layers = 2 + 2 * more;
    EngineRun run = engine_run(sized_inputs(variant, context), context);
    bytes[more] = static_cast<double>(run.measured.peak_bytes[kActivations]);
    evidence.candidate = std::move(run.evidence);
  }
  return (bytes[1] - bytes[0]) / 2;
}

// The published bytes and the terms that lead from them to ours.
Property explained(const std::string& row, double measured, const GptConfig& model, const reference::RecomputationSize& size,
                   const std::string& mode) {
  double sum = reference::published_activation_bytes(model, size, mode);
  std::string text = fmt::format("published {:.0f}", sum);
  for (const reference::ByteTerm& term : reference::differences_from_published(model, size, mode)) {
    sum += term.bytes;
    text += fmt::format(", {} {:+.0f}", term.reason, term.bytes);
  }
  return {"bytes_of_a_layer/" + row, measured, Relation::equal, sum, text, -1, ""};
}

// What selective recomputation is published for: the matrices of attention are gone, and with them 5 a s / h of 34 + 5 a s / h.
// Here 2 a s / h of them exist (no mask, no second copy), and the outputs of norms and GELU go as well.
std::vector<Property> effect_of_selective(const GptConfig& model, const reference::RecomputationSize& size,
                                          const std::map<std::string, double>& bytes) {
  const double as_h = model.heads * static_cast<double>(size.sequence) / static_cast<double>(model.hidden);
  const double share = bytes.at("selective") / bytes.at("none");
  const double expected = size.materialized ? (34 - 2 - 12) / (34 - 2 + 2 * as_h) : (34.0 - 2 - 12) / (34 - 2);
  return {{"selective_off_adapted_share", std::abs(share / expected - 1), Relation::at_most, 0.1,
           fmt::format("measured {:.3f} of none, (34 - 2 - 12) / (34 - 2{}) = {:.3f}; statistics are not in it", share,
                       size.materialized ? " + 2 a s / h" : "", expected),
           -1, ""},
          {"selective_share_of_none", share, Relation::at_most, size.materialized ? 0.5 : 0.75, "less than it was", -1, ""}};
}

Case published_case(const std::string& attention) {
  ParallelVariant variant{.precision = "bf16", .attention = attention};
  Case result = properties_case("published/" + attention,
                                "measured bytes of a layer in bf16 from s b h (34 + 5 a s / h), explained term by term", variant);
  result.execute = [variant](const RunContext& context) {
    const Layout layouts[] = {{"alone", variant}, {"tensor2", variant}, {"tensor2/sequence", variant}};
    CaseEvidence evidence;
    std::map<std::string, double> alone;
    for (Layout layout : layouts) {
      const std::string name = layout.name;
      layout.variant.degrees.tensor = name == "alone" ? 1 : 2;
      layout.variant.sequence_parallel = name == "tensor2/sequence";
      for (const char* mode : {"none", "selective", "full"}) {
        layout.variant.recompute = {mode, 1};
        const PairInputs inputs = sized_inputs(layout.variant, context);
        const double measured = layer_bytes(layout.variant, context, evidence);
        evidence.properties.push_back(
            explained(fmt::format("{}/{}", name, mode), measured, inputs.model, layer_size(inputs), mode));
        if (name == "alone") alone[mode] = measured;
      }
    }
    const PairInputs inputs = sized_inputs(variant, context);
    for (Property& property : effect_of_selective(inputs.model, layer_size(inputs), alone)) {
      evidence.properties.push_back(std::move(property));
    }
    return evidence;
  };
  return result;
}

}  // namespace

Property activations_near_prediction(const Measured& measured, const std::string& name) {
  const auto bytes = static_cast<double>(measured.peak_bytes[kActivations]);
  const auto predicted = static_cast<double>(measured.predicted_peak_bytes[kActivations]);
  return {"activations_off_prediction/" + name,
          std::abs(bytes / predicted - 1),
          Relation::at_most,
          0.1,
          fmt::format("measured {:.0f}, predicted {:.0f} (docs/measuring.md)", bytes, predicted),
          -1,
          ""};
}

void add_recomputation_memory_cases(CaseList& cases) {
  cases.push_back(memory_case({"alone", {.layers = 5}}));
  cases.push_back(memory_case({"tensor2", {.degrees = {.tensor = 2}, .layers = 5}}));
  cases.push_back(memory_case({"tensor2/sequence", {.degrees = {.tensor = 2}, .sequence_parallel = true, .layers = 5}}));
  cases.push_back(memory_case({"experts", {.degrees = {.data = 2, .expert = 2}, .experts = 4, .choices = 2, .layers = 5}}));
  cases.push_back(published_case("blocked"));
  cases.push_back(published_case("materialized"));
}

}  // namespace tandem
