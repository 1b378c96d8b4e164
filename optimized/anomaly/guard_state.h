// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "optimized/anomaly/activation_ranges.h"
#include "optimized/anomaly/guard.h"
#include "optimized/anomaly/monitors.h"
#include "optimized/anomaly/performance.h"
#include "optimized/anomaly/policy.h"
#include "optimized/anomaly/replica_hash.h"
#include "optimized/anomaly/state_ranges.h"

namespace tandem {

/// What an AnomalyGuard is made of: the step at hand (guard_step.cpp), the looks at the whole state (guard_checks.cpp), and what
/// follows from a finding (guard_incident.cpp).
class AnomalyGuard::State {
 public:
  State(AnomalyGuardOptions options, Engine& engine);

  void begin_step(std::int64_t step, std::int64_t batch);
  void see_activation(int layer, TensorView values);
  [[nodiscard]] UpdateDecision before_update(const UpdateSigns& signs);
  [[nodiscard]] AnomalyDecision after_step(const StepResult& result, double step_seconds, const std::vector<Span>& spans);
  [[nodiscard]] AnomalyDecision before_save();
  void saved(std::int64_t steps_done) { unconfirmed_.try_emplace(steps_done, 0); }
  [[nodiscard]] std::int64_t rollback_step() const noexcept;
  void rolled_back();

  [[nodiscard]] const AnomalyLedger& ledger() const noexcept { return ledger_; }
  [[nodiscard]] const std::vector<AnomalyIncident>& incidents() const noexcept { return incidents_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] bool vouches_for_state();
  [[nodiscard]] bool is_on() const noexcept { return config_.action != AnomalyAction::off; }

  double seconds = 0;

 private:
  using Findings = std::vector<AnomalyFinding>;

  // The step at hand.
  [[nodiscard]] bool samples(std::int64_t step) const;
  [[nodiscard]] Findings look_at_step(const UpdateSigns& signs);
  void name_origins(const UpdateSigns& signs, Findings& findings);
  [[nodiscard]] Findings look_behind_step(const StepResult& result, double step_seconds, const std::vector<Span>& spans);
  void count_step(const StepResult& result, bool clean);

  // The state. Collective.
  [[nodiscard]] Findings look_at_state();
  void append_state_findings(const std::vector<std::string>& said, Findings& findings);
  void name_divergence(const CopyDivergence& divergence, Findings& findings);
  [[nodiscard]] std::string own_state();

  // Consequences. Collective.
  [[nodiscard]] PolicyVerdict judge(const Findings& findings, bool retried);
  void conclude(const Findings& findings, const PolicyVerdict& verdict, bool unsaved = false);
  void confirm();
  [[nodiscard]] std::optional<std::int64_t> find_target() const;
  void resolve_target();
  [[nodiscard]] std::string write_down(AnomalyIncident& incident, bool with_bundle);
  [[nodiscard]] std::int64_t bundle_start() const;
  [[nodiscard]] std::filesystem::path bundle_of(const AnomalyIncident& incident);
  void share_ledger();
  [[nodiscard]] bool leads() const { return world_.rank() == 0; }
  [[nodiscard]] bool is_new(const Findings& findings);

  AnomalyGuardOptions options_;
  AnomalyConfig config_;
  Engine& engine_;
  Communicator& world_;
  FileOperations& files_;
  AnomalyLedger ledger_;
  std::vector<AnomalyIncident> incidents_;
  std::int64_t bytes_ = 0;

  StepMonitor monitor_;
  ScaleMonitor scale_;
  PerformanceMonitor performance_;
  ActivationRanges activations_;
  WeightRanges weights_;

  std::int64_t step_ = -1, batch_ = -1;
  bool sampled_ = false;
  bool vouches_ = false;    // the state after it was looked at and is sound
  bool retrying_ = false;   // the step is being computed a second time
  bool asked_ = false;      // before_update() has been called for it
  Findings first_, found_;  // the first time; the last time
  PolicyVerdict verdict_;   // on `found_`
  double loss_ = 0, norm_ = 0, applied_norm_ = 0;
  double token_seconds_ = 0;  // of the step before; 0: not known

  bool was_unusual_ = false;                          // the step before had findings that stayed
  std::string ledger_problem_;                        // why it could not be written the last time
  std::set<std::string> known_;                       // findings about the state that have been told
  std::optional<std::int64_t> target_;                // as last resolved
  std::map<std::int64_t, std::int64_t> unconfirmed_;  // checkpoints: steps without a finding since
};

}  // namespace tandem
