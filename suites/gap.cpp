// SPDX-License-Identifier: Apache-2.0
// A slowdown of each kind, planted in real runs: layers and links take stated times, so that two cores show what machines would.
// docs/measuring.md
#include "suites/gap.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "harness/attribution.h"
#include "suites/parallel_cases.h"
#include "suites/properties.h"
#include "suites/timing.h"

namespace tandem {
namespace {

constexpr double kPassSeconds = 0.004;  // a layer forward, asleep; its backward pass takes twice as long
constexpr double kLeastShare = 0.6;     // of the gap; the rest is the real work and late wake-ups

// What may differ between two machines.
struct Machine {
  double pass_seconds = kPassSeconds;
  double sum_seconds = 1.5 * kPassSeconds;  ///< of the gradients of a layer
  bool overlaps = true;
  double batch_seconds = 0.001;
};

class SlowSource final : public WrappedSource {
 public:
  SlowSource(std::shared_ptr<const BatchSource> source, double seconds)
      : WrappedSource(*source), source_(std::move(source)), seconds_(seconds) {}
  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds_));
    return inner().training_rows(step, global_rows, rows);
  }

 private:
  std::shared_ptr<const BatchSource> source_;
  double seconds_;
};

ParallelVariant variant_of(const Machine& machine) {
  ParallelVariant variant{.degrees = {.data = 2}, .rows = 4, .layers = 4};
  variant.overlap.gradients = machine.overlaps;
  variant.bucket_bytes = layer_bytes(model_of(variant));
  return variant;
}

ResultFile run_on(const Machine& machine, const RunContext& context) {
  const ParallelVariant variant = variant_of(machine);
  RunContext shaped = context;
  // Each of two ranks sends as many bytes as the tensor has.
  shaped.world.link = stated_link(1e-5, static_cast<double>(variant.bucket_bytes) / machine.sum_seconds);
  PairInputs inputs = inputs_of(variant, context);
  inputs.steps = 5;
  inputs.data = std::make_shared<SlowSource>(inputs.data, machine.batch_seconds);
  inputs.injected_seconds = [pass = machine.pass_seconds](const Operation& op) {
    if (op.phase == Phase::forward && op.part == Part::mlp_merge) return pass;
    return op.phase == Phase::backward_input && op.part == Part::norm_1 ? 2 * pass : 0.0;
  };
  CaseResult result;
  result.name = "gap";
  result.model = inputs.model;
  result.plan = inputs.plan;
  result.verdict.status = Status::pass;
  result.measurements = derive(engine_run(inputs, shaped).measured, context.pitfalls);
  ResultFile file;
  file.cases.push_back(std::move(result));
  return file;
}

Property belongs_to(Cause cause, const ResultFile& a, const ResultFile& b) {
  const Attribution gap = attribute_gap(a, b);
  double share = 0;
  for (const CauseShare& part : gap.causes) {
    if (part.cause == cause) share = part.share;
  }
  // A verdict that is another one is no proof, whatever the share.
  return {fmt::format("share_of_the_gap_where_{}_is_slower", name(cause)),
          gap.verdict == cause ? share : 0,
          Relation::at_least,
          kLeastShare,
          gap.sentence,
          -1,
          ""};
}

}  // namespace

void add_gap_case(CaseList& cases) {
  const PairInputs shown = inputs_of(variant_of({}), {});
  Case result = property_case("harness", "gap", "a planted slowdown of computing, links, overlap and data, each found again",
                              shown.model, shown.plan);
  result.timed = true;
  result.unavailable = cannot_time_links;
  result.execute = [](const RunContext& context) {
    const std::pair<Cause, Machine> planted[] = {
        {Cause::compute, {.pass_seconds = 2 * kPassSeconds}},
        {Cause::link, {.sum_seconds = 5 * kPassSeconds}},
        {Cause::overlap, {.overlaps = false}},
        {Cause::storage, {.batch_seconds = 0.03}},
    };
    // Whatever else this machine does meanwhile is a gap too.
    CaseEvidence evidence;
    for (int round = 0; round < 3; ++round) {
      evidence.properties.clear();
      const ResultFile base = run_on({}, context);
      for (const auto& [cause, machine] : planted) {
        evidence.properties.push_back(belongs_to(cause, base, run_on(machine, context)));
      }
      if (std::ranges::all_of(evidence.properties, &Property::holds)) break;
    }
    return evidence;
  };
  cases.push_back(std::move(result));
}

}  // namespace tandem
