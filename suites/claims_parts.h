// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "suites/claims.h"
#include "suites/pair.h"
#include "suites/parallel_cases.h"
#include "suites/timing.h"

namespace tandem {

// The claims by what they are about; each function makes those of one file.
[[nodiscard]] std::vector<Claim> memory_claims(ClaimEffort effort);         ///< C01, C02, C13, C14
[[nodiscard]] Claim recomputation_claim(ClaimEffort effort);                ///< C13
[[nodiscard]] std::vector<Claim> communication_claims(ClaimEffort effort);  ///< C04, C15, C16
[[nodiscard]] std::vector<Claim> parallel_claims(ClaimEffort effort);       ///< C06, C07, C08
[[nodiscard]] std::vector<Claim> scale_claims(ClaimEffort effort);          ///< C03, C09
[[nodiscard]] std::vector<Claim> precision_claims(ClaimEffort effort);      ///< C10, C11, C12
[[nodiscard]] std::vector<Claim> reliability_claims(ClaimEffort effort);    ///< C05, C17, C18, C19
[[nodiscard]] std::vector<Claim> data_claims(ClaimEffort effort);           ///< C20, C21

// ---- figures that suites measure already

/// The properties of a suite's case, executed now.
class CaseFigures {
 public:
  /// `add` makes the suite's cases, or a part of them. Throws ContractError where none of them has the name.
  CaseFigures(const std::function<void(CaseList&)>& add, const std::string& case_name, const RunContext& context);

  /// Properties that were found otherwise.
  CaseFigures(std::string case_name, std::vector<Property> properties)
      : case_(std::move(case_name)), properties_(std::move(properties)) {}

  /// Value of the property. Throws ContractError where the case has none of that name.
  [[nodiscard]] double operator()(std::string_view property) const { return at(property).value; }
  [[nodiscard]] const Property& at(std::string_view property) const;
  [[nodiscard]] const std::vector<Property>& all() const noexcept { return properties_; }
  /// Of the properties whose names begin so: their values, the largest, the least, the sum. Throws ContractError where there are
  /// none.
  [[nodiscard]] std::vector<double> values(std::string_view beginning) const;
  [[nodiscard]] double largest(std::string_view beginning) const;
  [[nodiscard]] double least(std::string_view beginning) const;
  [[nodiscard]] double sum(std::string_view beginning) const;

 private:
  std::string case_;
  std::vector<Property> properties_;
};

// ---- runs of the engine in stated time

/// Layers that take a stated time, asleep, so that few cores show what many would: a pass over one layer and all rows of the
/// global batch takes `forward_seconds` on one rank, its backward pass twice as long; a rank takes its part of it, by rows,
/// micro-batches and tensor degree.
[[nodiscard]] std::function<double(const Operation&)> stated_work(const TrainingPlan& plan, double forward_seconds);

/// Nodes of `ranks_per_node`, the links between them `slower` times slower in latency and bandwidth.
[[nodiscard]] LinkProfile stated_nodes(int ranks_per_node, double latency_seconds, double bytes_per_second, double slower);

struct StatedRun {
  PairInputs inputs;
  EngineRun run;
  double predicted_step_seconds = 0;     ///< the step programs replayed in time, by the link's own rules
  double predicted_exposed_seconds = 0;  ///< mean over ranks
  double step_seconds = 0;               ///< least of the measured steps: what else the machine does only adds to it
  double exposed_seconds = 0;            ///< mean over ranks, least over steps
};
/// Two measured steps of the engine behind the link, its layers in stated time.
[[nodiscard]] StatedRun stated_run(const ParallelVariant& variant, double forward_seconds, const LinkProfile& link,
                                   const RunContext& context);
/// The same without running anything.
[[nodiscard]] StatedRun stated_prediction(const ParallelVariant& variant, double forward_seconds, const LinkProfile& link,
                                          const RunContext& context);

// ---- layouts

/// One of the planner's two ways of reasoning against its exhaustive search.
struct PathOutcome {
  double over_best = kNoFigure;  ///< step seconds over the best's; no figure: it found nothing that fits
  int best_tensor = 0;           ///< tensor degree of the best
  double search_seconds = 0;
};
[[nodiscard]] PathOutcome follow_path(const std::string& path, const std::string& model, const std::string& cluster, int devices);

// ---- of a run

/// Bytes of one category on the fullest rank between steps, and at their peak.
[[nodiscard]] double rest_bytes(const EngineRun& run, MemoryCategory category);
[[nodiscard]] double peak_bytes(const EngineRun& run, MemoryCategory category);
/// Sent in one step by one rank, on average, for all purposes but `other`, and the operations that sent it; by the timeline and
/// by the step programs.
[[nodiscard]] double bytes_per_rank_and_step(const PairInputs& inputs, const EngineRun& run);
[[nodiscard]] double programmed_bytes_per_rank(const PairInputs& inputs);
[[nodiscard]] double operations_of(const StatedRun& run);
[[nodiscard]] double operations_per_rank(const PairInputs& inputs);
/// That a rank computed in the measured steps, on average.
[[nodiscard]] double busy_seconds(const StatedRun& run);

}  // namespace tandem
