// SPDX-License-Identifier: Apache-2.0
// What a supervisor says.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/recovery/supervision.h"

namespace tandem::supervision {

void Supervision::resumed(std::int64_t now_ns) {
  std::int64_t lost_steps = accounting_.lost_steps();
  report_.lost_steps += lost_steps;
  Incident line = {.kind = "resumed", .step = accounting_.steps(), .attempt = number_, .lost_steps = lost_steps};
  line.seconds_to_first_new_step = static_cast<double>(now_ns - unresolved_.front().detected_ns) / 1e9;
  line.what = fmt::format("attempt {} has done its first step {:.1f} s after the failure; {} step{} done again", number_,
                          *line.seconds_to_first_new_step, lost_steps, lost_steps == 1 ? " is" : "s are");
  for (const Unresolved& failure : unresolved_) {
    Incident& incident = report_.incidents[failure.incident];
    // What a second failure on the way has cost was lost by the first.
    incident.lost_steps = std::exchange(lost_steps, 0);
    incident.seconds_to_first_new_step = static_cast<double>(now_ns - failure.detected_ns) / 1e9;
  }
  unresolved_.clear();
  tell(std::move(line));
}

// Tells what is no reason to do anything, and returns what is.
std::vector<RankEvent> Supervision::tell_changes(std::int64_t now_ns) {
  std::vector<RankEvent> faults;
  std::vector<RankEvent> stragglers;
  for (const RankEvent& event : detector_.check(now_ns)) {
    if (event.state == RankState::dead || event.state == RankState::hung) {
      faults.push_back(event);
    } else if (event.state == RankState::slow && options_.replace_slow) {
      stragglers.push_back(event);
    } else {
      Incident incident = {.kind = event.state == RankState::slow ? "slow" : "recovered", .what = event.describe()};
      incident.rank = event.rank;
      incident.step = event.step;
      incident.phase = name(event.phase);
      incident.attempt = number_;
      incident.action = "none";
      if (event.state == RankState::slow) incident.detected_after_seconds = event.detected_after_seconds;
      tell(std::move(incident));
    }
  }
  return faults.empty() ? stragglers : faults;
}

Outcome Supervision::failed(const std::vector<RankEvent>& faults, std::int64_t now_ns) const {
  constexpr std::size_t kMostNamed = 4;
  const RankEvent& first = faults.front();
  Outcome outcome;
  outcome.kind = Outcome::Kind::failed;
  outcome.detected_ns = now_ns;
  outcome.end = {.status = 0, .signal = kKilled, .what = first.describe()};
  Incident& incident = outcome.incident;
  incident.kind = name(first.state);
  incident.rank = faults.size() == 1 ? first.rank : -1;
  incident.step = accounting_.steps();
  incident.phase = name(first.phase);
  incident.attempt = number_;
  incident.detected_after_seconds = first.detected_after_seconds;
  for (std::size_t i = 0; i < std::min(faults.size(), kMostNamed); ++i) {
    incident.what += (i > 0 ? "; " : "") + faults[i].describe();
  }
  if (faults.size() > kMostNamed) incident.what += fmt::format("; and {} ranks more", faults.size() - kMostNamed);
  return outcome;
}

Outcome Supervision::ended(WorkerEnd end, const std::vector<RankEvent>& faults, std::int64_t now_ns) const {
  Outcome outcome;
  if (!faults.empty() && faults.front().state != RankState::slow) {
    outcome = failed(faults, now_ns);
    outcome.incident.what += "; the workers have ended: " + end.what;
  } else {
    outcome.incident = {.kind = "exit", .what = end.what, .step = accounting_.steps(), .attempt = number_, .said = end.said};
    // It happened since then, if not later.
    outcome.incident.detected_after_seconds = static_cast<double>(now_ns - accounting_.last_beat_ns()) / 1e9;
  }
  outcome.kind = Outcome::Kind::ended;
  outcome.detected_ns = now_ns;
  outcome.end = std::move(end);
  return outcome;
}

void Supervision::close(SupervisorReport::End end, const char* kind, std::string what, bool said) {
  accounting_.end_attempt();
  report_.end = end;
  if (end != SupervisorReport::End::finished) report_.why = what;
  tell({.kind = kind, .what = std::move(what), .step = accounting_.steps(), .attempt = number_, .action = "none", .said = said});
}

// A log that cannot be written is no reason to give a run up; it is said once.
void Supervision::tell(Incident incident) {
  try {
    log_.append(incident);
  } catch (const IoError& error) {
    if (!std::exchange(log_has_failed_, true) && say_) {
      say_({.kind = "log", .what = error.what(), .attempt = number_, .action = "none"});
    }
  }
  if (say_) say_(incident);
  report_.incidents.push_back(std::move(incident));
}

}  // namespace tandem::supervision
