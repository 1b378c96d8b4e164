// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/gpu_peaks.h"
#include "core/model_config.h"
#include "core/pitfall.h"
#include "core/plan.h"
#include "core/world_settings.h"
#include "harness/evidence.h"
#include "harness/localisation.h"

namespace tandem {

/// How a case is judged (DESIGN: derived bounds, never tuned ones).
///   bitwise      every value equal to the last bit
///   rounding     err(x) = |x - truth| / |truth|; err(candidate) <= 4 max(err(yardstick), eps sqrt(K))
///   convergence  properties only (losses over seeds within a stated gap; exact identities)
enum class Criterion : std::uint8_t { bitwise, rounding, convergence };
[[nodiscard]] std::string_view name(Criterion criterion);

/// What the caller of a case decides.
struct RunContext {
  std::uint64_t seed = 1;
  PitfallSet pitfalls;
  int repetitions = 5;  ///< measured steps
  int threads_per_rank = 1;
  /// Measured matrix-product peak of this machine with 1, 2, ... threads; empty: not measured, shares of peak are left out.
  std::vector<double> peak_flops_by_threads;
  std::string backend = "cpu";
  std::optional<GpuPeaks> gpu_peaks;  ///< instead of those, where ranks compute on GPUs
  WorldSettings world;
};

/// What a case hands to the judge. `truth` is the double reference, `yardstick` the reference in the candidate's precision (its
/// own error is the yardstick), `candidate` the optimized side.
///   rounding     all three; the yardstick may be left out when the candidate computes in the truth's own precision
///   bitwise      truth and candidate; `truth` is the twin
///   convergence  properties; a side that is given as well must be alive, finite and equal on all replicas
struct CaseEvidence {
  std::optional<Evidence> truth;
  std::optional<Evidence> yardstick;
  std::optional<Evidence> candidate;
  std::vector<Property> properties;
  std::optional<Measured> measured;
};

/// One value describes a case; the CTest entry, the result key and the table row derive from it.
struct Case {
  std::string suite;    ///< "data_parallel"
  std::string name;     ///< "data_parallel/ranks4/accum3/fp32": its identity everywhere
  std::string summary;  ///< one line for `tandem list`
  GptConfig model;
  TrainingPlan plan;
  Criterion criterion = Criterion::rounding;
  bool quick = true;   ///< part of --quick
  bool timed = false;  ///< measures time: CTest runs nothing beside it
  /// Reason why it cannot run here ("needs ../shared/golden"), or nothing.
  std::function<std::optional<std::string>(const RunContext&)> unavailable;
  std::function<CaseEvidence(const RunContext&)> execute;
  /// Optional: runs it again with tracing on and says where the failure starts, or nothing where no traced tensor is beyond its
  /// bound. Called once when the case has failed, and only then; what it throws never changes the verdict.
  std::function<std::optional<Localisation>(const RunContext&)> localise;
};

using CaseList = std::vector<Case>;

}  // namespace tandem
