// SPDX-License-Identifier: Apache-2.0
// Ranks that are slow, on a simulated clock: judged by the definition on their own work.
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "core/rng.h"
#include "reference/recovery.h"
#include "suites/recovery_cases.h"

namespace tandem {
namespace {

constexpr int kTraces = 200;
constexpr double kBeat = 0.1;  // seconds

std::int64_t to_ns(double seconds) { return std::llround(seconds * 1e9); }

struct WorkTrace {
  std::vector<std::vector<double>> work;  // [ranks][steps]
  std::vector<double> step;               // [steps]
  int slow_rank = -1;                     // nobody
  RunPhase slow_phase = RunPhase::train;
};

// A rank that works 2.5 to 4 times as long, always or in a few steps, in one phase; or nobody.
WorkTrace make_work(CounterRng& random, int steps) {
  WorkTrace trace;
  const auto ranks = static_cast<std::size_t>(2 + random.next_below(5));
  const std::uint64_t kind = random.next_below(3);  // nobody, always, a few steps
  const auto chosen = static_cast<std::size_t>(random.next_below(ranks));
  const double factor = 2.5 + 1.5 * random.next_unit();
  trace.slow_phase = random.next_below(2) == 0 ? RunPhase::train : RunPhase::data;
  if (kind == 1) trace.slow_rank = static_cast<int>(chosen);
  trace.work.resize(ranks);
  for (int step = 0; step < steps; ++step) {
    double longest = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const bool slow = rank == chosen && (kind == 1 || (kind == 2 && step % 8 < 2));
      const double seconds = (0.25 + 0.1 * random.next_unit()) * (slow ? factor : 1);
      trace.work[rank].push_back(seconds);
      longest = std::max(longest, seconds);
    }
    trace.step.push_back(longest + 0.05);
  }
  return trace;
}

// A beat every tenth of a second; in a step a rank first works, then waits for the slowest.
std::map<int, RankEvent> detect_slow(const WorkTrace& trace, const PitfallSet& pitfalls) {
  DetectorOptions options;
  options.ranks = static_cast<int>(trace.work.size());
  options.beat_seconds = kBeat;
  options.stall_seconds.fill(0);
  options.patience = 0;
  options.pitfalls = pitfalls;
  options.stall_seconds[static_cast<std::size_t>(RunPhase::train)] = 1e6;
  FailureDetector detector(options);
  detector.begin_attempt(0, options.ranks, 0);
  std::map<int, RankEvent> told;
  std::vector<double> busy(trace.work.size());
  std::uint64_t sequence = 1;
  double begin = 0;
  for (std::size_t step = 0; step < trace.step.size(); ++step) {
    const double end = begin + trace.step[step];
    for (; static_cast<double>(sequence) * kBeat < end; ++sequence) {
      const double now = static_cast<double>(sequence) * kBeat;
      for (std::size_t rank = 0; rank < busy.size(); ++rank) {
        const double worked = std::min(now - begin, trace.work[rank][step]);
        const bool waits = now - begin > trace.work[rank][step];
        const bool loads = trace.slow_phase == RunPhase::data && now - begin < trace.work[rank][step] - kBeat;
        detector.hear({.rank = static_cast<int>(rank),
                       .sequence = sequence,
                       .step = static_cast<std::int64_t>(step),
                       .phase = loads ? RunPhase::data : RunPhase::train,
                       .progress = sequence,
                       .waiting = waits,
                       .busy_ns = to_ns(busy[rank] + worked)},
                      to_ns(now));
      }
      for (const RankEvent& event : detector.check(to_ns(now))) {
        if (event.state == RankState::slow) told.emplace(event.rank, event);
      }
    }
    for (std::size_t rank = 0; rank < busy.size(); ++rank) busy[rank] += trace.work[rank][step];
    begin = end;
  }
  return told;
}

Case stragglers_case() {
  Case result =
      recovery_case("detector/stragglers", "slow ranks on simulated traces: named by rank and phase, the others not", {});
  result.execute = [](const RunContext& context) {
    constexpr int kSteps = 40;
    CounterRng random(context.seed, "stragglers");
    double missed = 0, wrong = 0, other_phase = 0, slow = 0, not_by_definition = 0;
    for (int i = 0; i < kTraces; ++i) {
      const WorkTrace trace = make_work(random, kSteps);
      const std::vector<int> truth = reference::stragglers(trace.work, trace.step, {});
      const std::vector<int> made = trace.slow_rank < 0 ? std::vector<int>() : std::vector<int>{trace.slow_rank};
      not_by_definition += truth == made ? 0 : 1;
      const std::map<int, RankEvent> told = detect_slow(trace, context.pitfalls);
      for (const int rank : truth) {
        ++slow;
        missed += told.contains(rank) ? 0 : 1;
        other_phase += told.contains(rank) && told.at(rank).phase != trace.slow_phase ? 1 : 0;
      }
      for (const auto& [rank, event] : told) wrong += std::ranges::find(truth, rank) == truth.end() ? 1 : 0;
    }
    CaseEvidence evidence;
    evidence.properties = {
        {"traces_made_otherwise", not_by_definition, Relation::equal, 0.0, "the definition says what the maker did", -1, ""},
        {"stragglers", slow, Relation::at_least, kTraces / 5.0, "a third of the traces has one", -1, ""},
        {"missed", missed, Relation::equal, 0.0, "by the definition on each rank's own work", -1, ""},
        {"told_without_cause", wrong, Relation::equal, 0.0, "who waits for a straggler takes as long as it does", -1, ""},
        {"in_another_phase", other_phase, Relation::equal, 0.0, "data or train: where the rank was found at work most often", -1,
         ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_recovery_straggler_cases(CaseList& cases) { cases.push_back(stragglers_case()); }

}  // namespace tandem
