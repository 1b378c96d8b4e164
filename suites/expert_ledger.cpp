// SPDX-License-Identifier: Apache-2.0
#include "suites/expert_ledger.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "suites/kept_training.h"
#include "suites/one_step.h"

namespace tandem {

std::vector<Property> expert_ledger(const PairInputs& inputs, const EngineRun& run) {
  const auto truth_record = kept_training<double>(reference_run(inputs));
  const reference::TrainingRecord<double>& truth = *truth_record;
  const std::int64_t assignments =
      inputs.plan.batch.rows * inputs.data->sequence() * inputs.model.expert_choices * inputs.model.layers;
  std::int64_t unaccounted = 0;
  std::int64_t otherwise = 0;
  std::int64_t dropped = 0;
  double auxiliary_error = 0;
  for (std::size_t step = 0; step < truth.losses.size(); ++step) {
    unaccounted += std::abs(run.kept_assignments[step] + run.dropped_assignments[step] - assignments);
    otherwise += std::abs(run.kept_assignments[step] - truth.kept_assignments[step]);
    dropped += run.dropped_assignments[step];
    const double error = std::abs(run.auxiliary_losses[step] - truth.auxiliary_losses[step]) / truth.auxiliary_losses[step];
    if (!(error <= auxiliary_error)) auxiliary_error = std::isnan(auxiliary_error) ? auxiliary_error : error;  // NaN stays
  }
  return {{"unaccounted_assignments", static_cast<double>(unaccounted), Relation::equal, 0,
           "kept + dropped = tokens * choices * layers, in every step", -1, ""},
          {"assignments_kept_otherwise", static_cast<double>(otherwise), Relation::equal, 0, "as many as the reference keeps", -1,
           ""},
          {"dropped_assignments", static_cast<double>(dropped), Relation::at_least, 1, "capacity is short: some must be", -1, ""},
          {"auxiliary_loss_error", auxiliary_error, Relation::at_most, 4 * 0x1p-24 * std::sqrt(2.0 * 36 * 17) * 4,
           "4 eps sqrt(K) after up to 4 steps; mean over the rows of the global batch", -1, ""}};
}

}  // namespace tandem
