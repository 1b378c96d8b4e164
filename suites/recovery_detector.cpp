// SPDX-License-Identifier: Apache-2.0
// The detector on a simulated clock: random traces, judged by the definition.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/rng.h"
#include "reference/recovery.h"
#include "suites/recovery_cases.h"

namespace tandem {
namespace {

constexpr double kTick = 0.05;          // of the simulated clock, seconds
constexpr double kBetweenLooks = 0.25;  // of the detector
constexpr double kLongestWay = 0.3;     // of a beat, seconds
constexpr std::uint64_t kTraces = 200;

std::int64_t to_ns(double seconds) { return std::llround(seconds * 1e9); }

// ---- simulated ranks

struct SimulatedRank {
  Heartbeat beat{};  // as it would be sent now
  double next_beat = 0;
  double mute_until = 0;
  int lost = 0;  // beats in a row
};

// Ranks that work in step, through phases of random length, some of them long without a sign of progress; one stalls and the
// others wait for it, all wait for each other, beats are lost one by one and for a while, and arrive late.
class SimulatedRun {
 public:
  SimulatedRun(std::uint64_t seed, std::uint64_t trace) : random_(seed * 100000 + trace, "recovery traces") {
    ranks_.resize(static_cast<std::size_t>(1 + random_.next_below(4)));
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].beat.rank = static_cast<int>(i);
      ranks_[i].next_beat = uniform(0.1, 1);
    }
    enter(RunPhase::start, uniform(1, 40));
  }

  std::vector<reference::HeardBeat> run(double seconds) {
    for (int tick = 0; tick * kTick < seconds; ++tick) {
      now_ = tick * kTick;
      advance();
      for (SimulatedRank& rank : ranks_) send(rank);
    }
    std::ranges::stable_sort(trace_, {}, &reference::HeardBeat::seconds);
    return trace_;
  }
  [[nodiscard]] int ranks() const { return static_cast<int>(ranks_.size()); }

 private:
  double uniform(double from, double to) { return from + (to - from) * random_.next_unit(); }
  bool chance(double probability) { return random_.next_unit() < probability; }

  void enter(RunPhase phase, double seconds) {
    phase_ends_ = now_ + seconds;
    next_progress_ = now_;
    for (SimulatedRank& rank : ranks_) {
      rank.beat.phase = phase;
      ++rank.beat.progress;
    }
  }

  void advance() {
    const RunPhase phase = ranks_.front().beat.phase;
    if (phase == RunPhase::finished) return;
    // Reading, saving and starting say nothing while they last; elsewhere ranks wait for each other now and then.
    const bool tells = phase == RunPhase::train || phase == RunPhase::evaluate;
    if (now_ < stuck_until_) {
      for (SimulatedRank& rank : ranks_) rank.beat.waiting = rank.beat.rank != stuck_rank_;
      phase_ends_ = tells ? phase_ends_ + kTick : stuck_until_;
      return;
    }
    for (SimulatedRank& rank : ranks_) rank.beat.waiting = tells && chance(0.3);
    if (now_ >= phase_ends_) return next_phase(phase);
    maybe_fault();
    if (!tells || now_ < next_progress_) return;
    next_progress_ = now_ + (phase == RunPhase::train ? 0.3 : 2);
    for (SimulatedRank& rank : ranks_) ++rank.beat.progress;
  }

  void next_phase(RunPhase phase) {
    if (phase == RunPhase::start) return enter(RunPhase::restore, uniform(0.2, 30));
    if (phase == RunPhase::data) return enter(RunPhase::train, uniform(0.5, 4));
    if (phase == RunPhase::train) {
      for (SimulatedRank& rank : ranks_) ++rank.beat.step;
      const std::int64_t step = ranks_.front().beat.step;
      if (step == last_step_) return enter(RunPhase::finished, 0);
      if (step % 11 == 0) return enter(RunPhase::checkpoint, uniform(0.2, 30));
      if (step % 17 == 0) return enter(RunPhase::evaluate, uniform(3, 15));
    }
    enter(RunPhase::data, uniform(0.05, 0.5));
  }

  void maybe_fault() {
    if (now_ < next_fault_) return;
    next_fault_ = now_ + uniform(8, 25);
    static constexpr std::array<double, 8> kLengths = {1, 2, 6, 9, 14, 30, 60, 110};
    const double length = kLengths[random_.next_below(kLengths.size())] * uniform(0.9, 1.1);
    const auto struck = static_cast<int>(random_.next_below(ranks_.size()));
    SimulatedRank& rank = ranks_[static_cast<std::size_t>(struck)];
    const std::uint64_t kind = random_.next_below(5);
    if (kind <= 1) {  // stalls
      stuck_rank_ = struck;
      stuck_until_ = now_ + length;
    } else if (kind == 2) {  // a deadlock
      stuck_rank_ = -1;
      stuck_until_ = now_ + length;
    } else {  // not heard of for a while, at work (3) or gone (4)
      rank.mute_until = now_ + std::min(length, 20.0);
      if (kind == 4) {
        stuck_rank_ = struck;
        stuck_until_ = rank.mute_until;
      }
    }
    next_fault_ = std::max({next_fault_, stuck_until_ + 8, rank.mute_until + 8});
  }

  void send(SimulatedRank& rank) {
    if (now_ < rank.next_beat || (rank.beat.phase == RunPhase::finished && finished_beats_ > 2 * ranks())) return;
    rank.next_beat += 1;
    ++rank.beat.sequence;
    if (rank.beat.phase == RunPhase::finished) ++finished_beats_;
    // Two in a row are lost without harm, three are death. While all wait none is: the verdict would come later.
    const bool deadlock = stuck_rank_ < 0 && now_ < stuck_until_ + 2;
    const bool is_lost = now_ < rank.mute_until || (!deadlock && rank.lost < 2 && chance(0.05));
    rank.lost = is_lost ? rank.lost + 1 : 0;
    if (is_lost) return;
    trace_.push_back({now_ + uniform(0, kLongestWay), rank.beat});
  }

  CounterRng random_;
  std::vector<SimulatedRank> ranks_;
  std::vector<reference::HeardBeat> trace_;
  double now_ = 0, phase_ends_ = 0, next_progress_ = 0, next_fault_ = 10, stuck_until_ = 0;
  int stuck_rank_ = -1, finished_beats_ = 0;
  std::int64_t last_step_ = 90;
};

// ---- the detector on a trace

using Told = std::tuple<int, RankState, std::int64_t>;  // rank, verdict, since (milliseconds)

// Each verdict, and when it came.
using DetectedTrace = std::map<Told, double>;

DetectedTrace detect(const std::vector<reference::HeardBeat>& trace, double seconds, const DetectorOptions& options) {
  FailureDetector detector(options);
  detector.begin_attempt(0, options.ranks, 0);
  DetectedTrace found;
  std::size_t next = 0;
  for (int look = 1; look * kBetweenLooks < seconds; ++look) {
    const double now = look * kBetweenLooks;
    for (; next < trace.size() && trace[next].seconds <= now; ++next) detector.hear(trace[next].beat, to_ns(trace[next].seconds));
    std::vector<RankEvent> events = detector.check(to_ns(now));
    std::erase_if(events,
                  [](const RankEvent& event) { return event.state == RankState::alive || event.state == RankState::slow; });
    for (const RankEvent& event : events) {
      const Told told(event.rank, event.state, std::llround(1e3 * (now - event.detected_after_seconds)));
      const bool is_new = found.emplace(told, now).second;
      if (!is_new) found.emplace(Told(event.rank, event.state, -std::ssize(found)), now);  // told twice: one that nobody expects
    }
  }
  return found;
}

DetectedTrace by_definition(const std::vector<reference::Stall>& stalls) {
  DetectedTrace due;
  for (const reference::Stall& stall : stalls) {
    const RankState state = stall.kind == reference::StallKind::dead ? RankState::dead : RankState::hung;
    due.emplace(Told(stall.rank, state, std::llround(1e3 * stall.begin_seconds)), stall.due_seconds);
  }
  return due;
}

DetectorOptions detector_options(int ranks, std::uint64_t trace, const PitfallSet& pitfalls) {
  DetectorOptions options;
  options.ranks = ranks;
  options.stall_seconds = {60, 80, 10, 8, 20, 40, 0};
  options.patience = trace % 2 == 0 ? 0 : 4;
  options.pitfalls = pitfalls;
  return options;
}

reference::StallLimits limits_of(const DetectorOptions& options) {
  return {options.silent_beats * options.beat_seconds, 1.5 * options.beat_seconds, options.stall_seconds, options.patience};
}

struct TraceTally {
  double traces = 0, refused = 0, dead = 0, hung = 0, repeated = 0, differing = 0, latest_death = 0, latest_hang = 0,
         earliest = 0;
  std::string first;
};

// The first of `these` that the others do not have.
std::string first_beside(const DetectedTrace& these, const DetectedTrace& others) {
  for (const auto& [told, seconds] : these) {
    const auto& [rank, state, since] = told;
    if (!others.contains(told))
      return fmt::format("rank {} {} since {:.2f} s", rank, name(state), static_cast<double>(since) * 1e-3);
  }
  return "nothing";
}

void judge_trace(std::uint64_t seed, std::uint64_t number, const PitfallSet& pitfalls, TraceTally& tally) {
  constexpr double kSeconds = 240;
  SimulatedRun run(seed, number);
  const std::vector<reference::HeardBeat> trace = run.run(kSeconds);
  const DetectorOptions options = detector_options(run.ranks(), number, pitfalls);
  const reference::StallList truth = reference::stalls(trace, run.ranks(), 0, kSeconds, limits_of(options));
  // What ends as its limit passes may be told or not, by when one looks, and by whose beat comes first.
  if (truth.silence_margin_seconds < 1.5 * kBetweenLooks || truth.stall_margin_seconds < 1.7) {
    ++tally.refused;
    return;
  }
  ++tally.traces;
  const DetectedTrace found = detect(trace, kSeconds, options);
  std::map<std::pair<int, reference::StallKind>, int> times;
  for (const reference::Stall& stall : truth.stalls) {
    ++(stall.kind == reference::StallKind::dead ? tally.dead : tally.hung);
    tally.repeated += ++times[{stall.rank, stall.kind}] > 1 ? 1 : 0;
  }
  const DetectedTrace expected = by_definition(truth.stalls);
  double differs = expected.size() == found.size() ? 0 : 1;
  for (const auto& [told, due] : expected) {
    const auto at = found.find(told);
    if (at == found.end()) {
      differs = 1;
    } else {
      double& latest = std::get<RankState>(told) == RankState::dead ? tally.latest_death : tally.latest_hang;
      latest = std::max(latest, at->second - due);
      tally.earliest = std::min(tally.earliest, at->second - due);
    }
  }
  tally.differing += differs;
  if (differs == 0 || !tally.first.empty()) return;
  tally.first = fmt::format("trace {}: missed {}, told without cause {}", number, first_beside(expected, found),
                            first_beside(found, expected));
}

Case traces_case() {
  Case result =
      recovery_case("detector/traces", "dead and hung on random simulated traces, each told once, none without cause", {});
  result.execute = [](const RunContext& context) {
    TraceTally tally;
    for (std::uint64_t number = 0; tally.traces < static_cast<double>(kTraces) && number < 40 * kTraces; ++number) {
      judge_trace(context.seed, number, context.pitfalls, tally);
    }
    CaseEvidence evidence;
    evidence.properties = {
        {"traces", tally.traces, Relation::equal, static_cast<double>(kTraces),
         fmt::format("{:.0f} more were too near to a limit", tally.refused), -1, ""},
        {"traces_that_differ", tally.differing, Relation::equal, 0.0,
         fmt::format("the definition's list of {:.0f} deaths and {:.0f} hangs; {}", tally.dead, tally.hung, tally.first), -1, ""},
        {"deaths_and_hangs", std::min(tally.dead, tally.hung), Relation::at_least, static_cast<double>(kTraces) / 2,
         "of each, or it is no test", -1, ""},
        {"repeated", tally.repeated, Relation::at_least, static_cast<double>(kTraces) / 4,
         "the same of the same rank, after it was well again", -1, ""},
        {"latest_verdict_seconds (dead)", tally.latest_death, Relation::at_most, kBetweenLooks + 1e-6,
         "after 3.5 beats of silence: one look", -1, ""},
        {"latest_verdict_seconds (hung)", tally.latest_hang, Relation::at_most, 3 + kLongestWay - 1.5 + kBetweenLooks + 1e-6,
         "after the limit of the phase: one look; who has been silent for 1.5 beats may be dying, and is heard of again after 3 "
         "beats and their way at the latest",
         -1, ""},
        {"earliest_verdict_seconds", tally.earliest, Relation::at_least, 0.0, "not before it is", -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_recovery_detector_cases(CaseList& cases) { cases.push_back(traces_case()); }

}  // namespace tandem
