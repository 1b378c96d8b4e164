// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/made_up_case.h"
#include "harness/result_file.h"
#include "harness/verdict.h"

namespace tandem::testing {

inline CaseResult made_up_result(const std::string& name, Status status = Status::pass,
                                 std::vector<double> step_seconds = {0.1, 0.11, 0.12, 0.1, 0.11}) {
  CaseResult result;
  result.suite = name.substr(0, name.find('/'));
  result.name = name;
  result.plan.parallel.data = 4;
  result.plan.batch = {12, 3};
  result.model.hidden = 32;
  result.seconds = 1.5;
  result.verdict = judge(Criterion::rounding, MadeUpCase(4).evidence, {});
  result.verdict.status = status;
  if (status != Status::pass) {
    result.verdict.reason = "because of \"this\" & <that>";
    result.verdict.check = "gradients";
    result.verdict.first_bad_tensor = "h.1.mlp.c_fc.weight";
    result.verdict.first_bad_step = 2;
    return result;
  }
  Measured measured;
  measured.wall_seconds = 0;
  for (const double seconds : step_seconds) measured.wall_seconds += seconds;
  measured.step_seconds = std::move(step_seconds);
  measured.tokens_per_step = 1000;
  measured.peak_bytes = {100, 200, 300, 400, 500, 600};
  measured.predicted_peak_bytes = {100, 200, 300, 0, 0, 0};
  measured.predicted_bytes_on_wire = 12;
  result.measurements = derive(measured, {});
  return result;
}

inline ResultFile made_up_file(std::vector<CaseResult> cases) {
  ResultFile file;
  RunContext context;
  context.seed = std::numeric_limits<std::uint64_t>::max();
  file.environment = collect_environment(context, {.libraries = {{"fmt", "9.1.0"}}, .gpus = {}, .ranks = 4});
  file.cases = std::move(cases);
  return file;
}

}  // namespace tandem::testing
