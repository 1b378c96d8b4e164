// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/guard.h"

#include <algorithm>
#include <functional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "optimized/anomaly/guard_state.h"
#include "optimized/checkpoint/catalogue.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Adds the time of a scope.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() { seconds_ += static_cast<double>(Timeline::now_ns() - begin_ns_) * 1e-9; }

 private:
  double& seconds_;
  std::int64_t begin_ns_ = Timeline::now_ns();
};

constexpr std::string_view kSuspect = "suspect-";

void prune_suspects(const fs::path& folder, FileOperations& files) {
  std::vector<std::pair<std::int64_t, fs::path>> suspects;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kSuspect)) continue;
    if (const auto step = parse_step_folder_name(name.substr(kSuspect.size()))) suspects.emplace_back(*step, entry.path());
  }
  std::sort(suspects.begin(), suspects.end(), std::greater<>());
  try {
    for (std::size_t i = kKeptSuspects; i < suspects.size(); ++i) files.remove(suspects[i].second);
  } catch (const IoError&) {  // the next rollback tries again
  }
}

}  // namespace

AnomalyGuard::AnomalyGuard(AnomalyGuardOptions options, Engine& engine)
    : state_(std::make_unique<State>(std::move(options), engine)) {}
AnomalyGuard::~AnomalyGuard() = default;

const AnomalyLedger& AnomalyGuard::ledger() const noexcept { return state_->ledger(); }
const std::vector<AnomalyIncident>& AnomalyGuard::incidents() const noexcept { return state_->incidents(); }
double AnomalyGuard::seconds() const noexcept { return state_->seconds; }
std::int64_t AnomalyGuard::bytes_looked_at() const noexcept { return state_->bytes(); }
std::int64_t AnomalyGuard::rollback_step() const noexcept { return state_->rollback_step(); }

void AnomalyGuard::begin_step(std::int64_t step, std::int64_t batch) {
  if (state_->is_on()) state_->begin_step(step, batch);
}

void AnomalyGuard::see_activation(int layer, TensorView values) {
  if (!state_->is_on()) return;
  const Stopwatch watch(state_->seconds);
  state_->see_activation(layer, values);
}

UpdateDecision AnomalyGuard::before_update(const UpdateSigns& signs) {
  if (!state_->is_on()) return {};
  const Stopwatch watch(state_->seconds);
  return state_->before_update(signs);
}

AnomalyDecision AnomalyGuard::after_step(const StepResult& result, double step_seconds, const std::vector<Span>& spans) {
  if (!state_->is_on()) return AnomalyDecision::go_on;
  const Stopwatch watch(state_->seconds);
  return state_->after_step(result, step_seconds, spans);
}

AnomalyDecision AnomalyGuard::before_save() {
  if (!state_->is_on()) return AnomalyDecision::go_on;
  const Stopwatch watch(state_->seconds);
  return state_->before_save();
}

bool AnomalyGuard::vouches_for_state() {
  if (!state_->is_on()) return true;
  const Stopwatch watch(state_->seconds);
  return state_->vouches_for_state();
}

void AnomalyGuard::saved(std::int64_t steps_done) {
  if (state_->is_on()) state_->saved(steps_done);
}

void AnomalyGuard::rolled_back() {
  if (state_->is_on()) state_->rolled_back();
}

std::string AnomalyIncident::describe() const {
  std::string text = fmt::format("step {}", step + 1);
  if (batch >= 0) text += fmt::format(" (batch {})", batch);
  for (std::size_t i = 0; i < findings.size(); ++i) text += (i == 0 ? ": " : ", ") + findings[i].describe();
  if (repaired) return text + "; computed again it is as it should be";
  if (retried) text += "; computed again it is the same";
  switch (decision) {
    case AnomalyDecision::go_on: text += "; training goes on"; break;
    case AnomalyDecision::skip_step: text += unsaved ? "; training goes on, this state is not saved" : "; left out"; break;
    case AnomalyDecision::clip_harder: text += "; the gradient is clipped to its usual norm"; break;
    case AnomalyDecision::retry: text += "; computed again"; break;
    case AnomalyDecision::roll_back: text += fmt::format("; back to step {}", rolled_back_to.value_or(0)); break;
    case AnomalyDecision::give_up: text += "; the run ends"; break;
  }
  if (skipped_batch) text += fmt::format(", batch {} is left out from now on", *skipped_batch);
  if (!problem.empty()) text += fmt::format("; but: {}", problem);
  return text;
}

void set_aside_checkpoints_after(const fs::path& folder, std::int64_t step, FileOperations& files) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return;
  std::string latest;
  bool moved = false;
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    const std::string name = step_folder_name(entry.step);
    if (entry.step <= step) {
      if (latest.empty()) latest = name + "\n";
      continue;
    }
    const fs::path aside = folder / (std::string(kSuspect) + name);
    files.remove(aside);
    files.rename(entry.folder, aside);
    moved = true;
  }
  if (!moved) return;
  if (latest.empty()) {
    files.remove(folder / "latest");
  } else {
    replace_file(files, folder / "latest", std::as_bytes(std::span(latest)));
  }
  files.sync_folder(folder);
  prune_suspects(folder, files);
}

}  // namespace tandem
