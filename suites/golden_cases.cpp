// SPDX-License-Identifier: Apache-2.0
#include "suites/golden_cases.h"

#include <filesystem>

#include <fmt/format.h>

#include "suites/golden.h"
#include "suites/golden_run.h"
#include "suites/machine_of.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct GoldenLayout {
  int ranks = 1;
  int zero_stage = 0;
};

CaseEvidence run_case(const fs::path& folder, TrainingPlan plan, const RunContext& context) {
  const GoldenSet set = read_golden_set(folder);
  plan.batch = golden_batch(set);
  plan.threads_per_rank = context.threads_per_rank;
  const GoldenOutcome yardstick = is_narrow(plan.numerics) ? run_golden_reference(set, plan) : GoldenOutcome();
  CaseEvidence evidence;
  evidence.properties = run_golden_engine(set, plan, machine_of(context), yardstick).properties;
  return evidence;
}

Case golden_case(const fs::path& folder, const std::string& precision, GoldenLayout layout, bool quick) {
  const std::string zero = layout.zero_stage > 0 ? fmt::format("zero{}/", layout.zero_stage) : "";
  Case result;
  result.suite = "training";
  result.name = fmt::format("training/golden/{}/ranks{}/{}{}", folder.filename().string(), layout.ranks, zero, precision);
  result.summary = "eight AdamW steps of an outside program, tensor by tensor";
  result.criterion = Criterion::convergence;
  result.quick = quick;
  result.plan.parallel.data = layout.ranks;
  result.plan.zero_stage = layout.zero_stage;
  result.plan.precision = precision;
  result.plan.numerics = numerics_from_precision(precision);
  result.unavailable = [folder](const RunContext&) -> std::optional<std::string> {
    if (fs::exists(folder / "config.json")) return std::nullopt;
    return "the golden set is not here: " + folder.filename().string();
  };
  result.execute = [folder, plan = result.plan](const RunContext& context) { return run_case(folder, plan, context); };
  return result;
}

}  // namespace

void add_golden_cases(CaseList& cases, const SuiteOptions& options) {
  const fs::path tiny = options.results_folder / "golden" / "tiny";
  for (const std::string precision : {"fp64", "fp32"}) {
    for (const int ranks : {1, 2, 3}) cases.push_back(golden_case(tiny, precision, {ranks}, true));
    for (const int stage : {1, 2, 3}) cases.push_back(golden_case(tiny, precision, {3, stage}, true));
    for (const std::string set : {"odd", "varlen", "deep"}) {
      cases.push_back(golden_case(options.more_golden_folder / set, precision, {2}, set != "deep"));
    }
  }
  for (const int ranks : {1, 2}) cases.push_back(golden_case(tiny, "bf16", {ranks}, true));
  for (const std::string precision : {"fp16", "bf16-autocast", "fp16-autocast", "fp8"}) {
    cases.push_back(golden_case(tiny, precision, {2}, true));
  }
  for (const std::string set : {"odd", "varlen", "deep"}) {
    const fs::path folder = options.more_golden_folder / set;
    for (const std::string precision : {"bf16", "fp16"}) cases.push_back(golden_case(folder, precision, {2}, false));
    for (const std::string precision : {"fp32", "bf16"}) cases.push_back(golden_case(folder, precision, {3, 3}, false));
  }
}

}  // namespace tandem
