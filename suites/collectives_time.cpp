// SPDX-License-Identifier: Apache-2.0
// On links that make messages slow, collectives take the time of their closed forms. docs/techniques/collectives.md
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "harness/measurement.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/world.h"
#include "reference/collectives.h"
#include "suites/collectives_cases.h"

namespace tandem {
namespace {

using Algorithm = CollectiveAlgorithm;
using Kind = CollectiveKind;
using reference::AlphaBeta;

constexpr double kTolerance = 0.05;
constexpr int kRounds = 5;

// Slow enough that what two cores do meanwhile takes no time beside it: a step of a ring is some milliseconds.
constexpr AlphaBeta kFlat = {4e-3, 4e6};
constexpr reference::TwoLevels kTwoLevels = {.nodes = 2, .ranks_per_node = 2, .near = {0.5e-3, 16e6}, .far = {4e-3, 2e6}};

LinkLevel level_of(const AlphaBeta& link) {
  LinkLevel level;
  level.latency_seconds = link.latency_seconds;
  level.bytes_per_second = link.bytes_per_second;
  return level;
}

LinkProfile profile_of(const std::string& name, const reference::TwoLevels& link) {
  LinkProfile profile;
  profile.name = name;
  profile.ranks_per_node = link.ranks_per_node;
  profile.in_node = level_of(link.near);
  profile.between_nodes = level_of(link.far);
  return profile;
}

LinkProfile flat_link() { return profile_of("one level", {.nodes = 1, .ranks_per_node = 64, .near = kFlat, .far = kFlat}); }
LinkProfile two_level_link() { return profile_of("two levels", kTwoLevels); }

// One operation to be timed, and what it should take.
struct Timed {
  std::string name;
  std::function<void(Communicator&)> operation;
  double expected_seconds = 0;
};

// Median over repetitions of the slowest rank's seconds, for each operation; the operations take turns. The first turn is not
// counted.
std::vector<double> measure(const LinkProfile& link, int ranks, int repetitions, const std::vector<Timed>& all) {
  WorldSettings settings;
  settings.link = link;
  std::barrier together(ranks);
  std::vector<std::vector<std::vector<double>>> seconds(static_cast<std::size_t>(ranks));  // [rank][operation][repetition]
  run_world({.ranks = ranks, .settings = settings}, [&](Communicator& comm) {
    std::vector<std::vector<double>>& own = seconds[static_cast<std::size_t>(comm.rank())];
    own.resize(all.size());
    try {
      for (int repetition = -1; repetition < repetitions; ++repetition) {
        for (std::size_t i = 0; i < all.size(); ++i) {
          together.arrive_and_wait();
          const auto begin = std::chrono::steady_clock::now();
          all[i].operation(comm);
          const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
          if (repetition >= 0) own[i].push_back(taken.count());
        }
      }
    } catch (...) {
      together.arrive_and_drop();
      throw;
    }
  });
  std::vector<double> medians;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<double> slowest = seconds[0][i];
    for (const auto& of_rank : seconds) {
      for (std::size_t r = 0; r < slowest.size(); ++r) slowest[r] = std::max(slowest[r], of_rank[i][r]);
    }
    medians.push_back(summarise(std::move(slowest)).median);
  }
  return medians;
}

bool is_close(double seconds, double expected_seconds, double tolerance) {
  return std::abs(seconds / expected_seconds - 1) <= tolerance;
}

// Whatever else this machine does only adds time. Measures up to kRounds times until all operations are as expected; of each, the
// smallest median counts.
std::vector<double> measure_quietly(int repetitions, const LinkProfile& link, int ranks, const std::vector<Timed>& all,
                                    double tolerance) {
  std::vector<double> least(all.size(), std::numeric_limits<double>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<double> seconds = measure(link, ranks, repetitions, all);
    bool done = true;
    for (std::size_t i = 0; i < all.size(); ++i) {
      least[i] = std::min(least[i], seconds[i]);
      done = done && is_close(least[i], all[i].expected_seconds, tolerance);
    }
    if (done) break;
  }
  return least;
}

std::function<void(Communicator&)> operation_of(Kind kind, Algorithm algorithm, std::int64_t bytes) {
  return [=](Communicator& comm) {
    const auto ranks = static_cast<std::size_t>(comm.size());
    std::vector<float> whole(static_cast<std::size_t>(bytes / 4)), other(whole.size());
    const auto all = static_cast<std::int64_t>(whole.size());
    const std::vector<std::int64_t> counts(ranks, all / comm.size());
    const TensorView data(whole.data(), DType::f32, {all});
    const TensorView second(other.data(), DType::f32, {all});
    const TensorView part = second.flat(0, counts[0]);
    const CommOptions options{.name = "timed", .progress = Progress::on_wait, .algorithm = algorithm};
    switch (kind) {
      case Kind::all_reduce: return comm.all_reduce(data, options).wait_host();
      case Kind::reduce_scatter: return comm.reduce_scatter(data, part, counts, options).wait_host();
      case Kind::all_gather: return comm.all_gather(part, data, counts, options).wait_host();
      case Kind::all_to_all: return comm.all_to_all(data, counts, second, counts, options).wait_host();
      case Kind::broadcast: return comm.broadcast(data, 0, options).wait_host();
    }
  };
}

// Everybody sends everything to rank 0, which adds it up and sends the sum to everybody.
void naive_all_reduce(Communicator& comm, std::int64_t bytes) {
  std::vector<float> data(static_cast<std::size_t>(bytes / 4));
  const TensorView own(data.data(), DType::f32, {static_cast<std::int64_t>(data.size())});
  const CommOptions options{.name = "naive"};
  if (comm.rank() != 0) {
    comm.send(own, 0, {}, options).wait_host();
    return comm.recv(own, 0, {}, options).wait_host();
  }
  std::vector<std::vector<float>> received(static_cast<std::size_t>(comm.size()), data);
  std::vector<Work> works;
  for (int rank = 1; rank < comm.size(); ++rank) {
    auto& values = received[static_cast<std::size_t>(rank)];
    works.push_back(comm.recv(TensorView(values.data(), DType::f32, {own.num_elements()}), rank, {}, options));
  }
  for (Work& work : works) work.wait_host();
  for (int rank = 1; rank < comm.size(); ++rank) {
    for (std::size_t i = 0; i < data.size(); ++i) data[i] += received[static_cast<std::size_t>(rank)][i];
  }
  works.clear();
  for (int rank = 1; rank < comm.size(); ++rank) works.push_back(comm.send(own, rank, {}, options));
  for (Work& work : works) work.wait_host();
}

bool is_power_of_two(int n) { return (n & (n - 1)) == 0; }

// Closed form of an operation on one level; negative: none for these ranks.
double closed_form(Kind kind, Algorithm algorithm, int ranks, double bytes) {
  const bool halves = is_power_of_two(ranks);
  switch (kind) {
    case Kind::all_reduce:
      if (algorithm == Algorithm::direct) return reference::direct_all_reduce_seconds(ranks, bytes, kFlat);
      if (algorithm == Algorithm::ring) return reference::ring_all_reduce_seconds(ranks, bytes, kFlat);
      if (algorithm == Algorithm::recursive) return reference::recursive_all_reduce_seconds_of_any(ranks, bytes, kFlat);
      if (algorithm == Algorithm::tree && halves) return reference::tree_all_reduce_seconds(ranks, bytes, kFlat);
      return -1;
    case Kind::broadcast:
      if (algorithm == Algorithm::direct) return reference::direct_broadcast_seconds(ranks, bytes, kFlat);
      if (algorithm == Algorithm::ring) return reference::ring_broadcast_seconds(ranks, bytes, kFlat);
      if (algorithm == Algorithm::tree && halves) return reference::tree_broadcast_seconds(ranks, bytes, kFlat);
      return -1;
    default:
      if (algorithm == Algorithm::direct) return reference::direct_parts_seconds(ranks, bytes, kFlat);
      if (algorithm == Algorithm::ring) return reference::ring_parts_seconds(ranks, bytes, kFlat);
      if (algorithm == Algorithm::recursive && halves) return reference::recursive_parts_seconds(ranks, bytes, kFlat);
      return -1;
  }
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return "all_reduce";
    case Kind::reduce_scatter: return "reduce_scatter";
    case Kind::all_gather: return "all_gather";
    case Kind::all_to_all: return "all_to_all";
    case Kind::broadcast: return "broadcast";
  }
  return "?";
}

Property deviation(const Timed& timed, double seconds, double tolerance) {
  return {fmt::format("deviation of {}", timed.name),
          std::abs(seconds / timed.expected_seconds - 1),
          Relation::at_most,
          tolerance,
          fmt::format("median {:.2f} ms against {:.2f} ms of the alpha-beta closed form", seconds * 1e3,
                      timed.expected_seconds * 1e3),
          -1,
          ""};
}

// The cost model by which `automatic` chooses, against the closed forms, which know nothing of it.
Property model_agrees(Kind kind, Algorithm algorithm, std::int64_t bytes, int ranks, double expected) {
  const double modelled = expected_seconds(algorithm, kind, bytes, ranks, flat_link());
  return {fmt::format("cost model of {} {}, {} B", name_of(kind), name(algorithm), bytes),
          std::abs(modelled / expected - 1),
          Relation::at_most,
          1e-9,
          "two derivations of one number; rounding",
          -1,
          ""};
}

std::vector<Property> time_of_kind(const RunContext& context, Kind kind, int ranks) {
  std::vector<Timed> all;
  std::vector<Property> properties;
  for (const std::int64_t bytes : {std::int64_t{960}, std::int64_t{48000}}) {
    for (const Algorithm algorithm : all_algorithms()) {
      if (algorithm == Algorithm::automatic || !supports(algorithm, kind)) continue;
      const double expected = closed_form(kind, algorithm, ranks, static_cast<double>(bytes));
      if (expected < 0) continue;
      all.push_back(
          {fmt::format("{} {}, {} B", name_of(kind), name(algorithm), bytes), operation_of(kind, algorithm, bytes), expected});
      properties.push_back(model_agrees(kind, algorithm, bytes, ranks, expected));
    }
  }
  const std::vector<double> seconds = measure_quietly(std::max(context.repetitions, 7), flat_link(), ranks, all, kTolerance);
  for (std::size_t i = 0; i < all.size(); ++i) properties.push_back(deviation(all[i], seconds[i], kTolerance));
  return properties;
}

std::vector<Property> hierarchy(const RunContext& context) {
  constexpr int kRanks = kTwoLevels.nodes * kTwoLevels.ranks_per_node;
  constexpr std::int64_t kBytes = 64000;
  const LinkProfile link = two_level_link();
  const auto timed = [&](Algorithm algorithm, double expected) {
    return Timed{fmt::format("all_reduce {}", name(algorithm)), operation_of(Kind::all_reduce, algorithm, kBytes), expected};
  };
  const std::vector<Timed> all = {
      timed(Algorithm::hierarchical, reference::hierarchical_all_reduce_seconds(kBytes, kTwoLevels)),
      timed(Algorithm::ring, expected_seconds(Algorithm::ring, Kind::all_reduce, kBytes, kRanks, link))};
  const std::vector<double> seconds = measure_quietly(std::max(context.repetitions, 7), link, kRanks, all, 0.1);
  const double gain = seconds[1] / seconds[0];
  const double predicted = all[1].expected_seconds / all[0].expected_seconds;
  return {deviation(all[0], seconds[0], 0.1),
          deviation(all[1], seconds[1], 0.1),
          {"ring_over_hierarchical", gain, Relation::at_least, 0.9 * predicted,
           fmt::format("between slow nodes; {:.2f} predicted: a link between nodes carries {:.1f} times as many bytes in a ring",
                       predicted, static_cast<double>(kRanks - 1) / (kTwoLevels.nodes - 1)),
           -1, ""}};
}

std::vector<Property> naive(const RunContext& context) {
  constexpr int kRanks = 4;
  constexpr std::int64_t kBytes = 32000;
  const std::vector<Timed> all = {{"naive all_reduce", [](Communicator& comm) { naive_all_reduce(comm, kBytes); },
                                   reference::naive_all_reduce_seconds(kRanks, kBytes, kFlat)},
                                  {"all_reduce ring", operation_of(Kind::all_reduce, Algorithm::ring, kBytes),
                                   reference::ring_all_reduce_seconds(kRanks, kBytes, kFlat)}};
  const std::vector<double> seconds = measure_quietly(std::max(context.repetitions, 7), flat_link(), kRanks, all, kTolerance);
  const double predicted = all[0].expected_seconds / all[1].expected_seconds;
  return {
      deviation(all[0], seconds[0], 0.1),
      {"naive_over_ring", seconds[0] / seconds[1], Relation::at_least, 0.9 * predicted,
       fmt::format("{:.2f} predicted: all of it through one port, 2 (a + 3 b/B) against 6 (a + b/(4 B))", predicted), -1, ""}};
}

// The algorithm that `automatic` takes is the one measured to be fastest, or as fast.
std::vector<Property> choice(const RunContext& context, Kind kind, const LinkProfile& link) {
  constexpr int kRanks = 4;
  std::vector<Property> properties;
  std::vector<Algorithm> chosen_for;
  for (const std::int64_t bytes : {std::int64_t{16}, std::int64_t{64000}}) {
    std::vector<Timed> all;
    const Algorithm chosen = choose_algorithm(kind, bytes, kRanks, link);
    std::size_t place = 0;
    for (const Algorithm algorithm : all_algorithms()) {
      if (algorithm == Algorithm::automatic || !supports(algorithm, kind)) continue;
      if (algorithm == chosen) place = all.size();
      all.push_back({std::string(name(algorithm)), operation_of(kind, algorithm, bytes),
                     expected_seconds(algorithm, kind, bytes, kRanks, link)});
    }
    all.push_back({"automatic", operation_of(kind, Algorithm::automatic, bytes), all[place].expected_seconds});
    const std::vector<double> seconds = measure_quietly(std::max(context.repetitions / 2, 3), link, kRanks, all, kTolerance);
    const double fastest = *std::min_element(seconds.begin(), seconds.end() - 1);
    const auto as_fast = [&](const std::string& what, double value) {
      properties.push_back({fmt::format("{} over the fastest, {} B", what, bytes), value / fastest, Relation::at_most,
                            1 + kTolerance, fmt::format("{} is chosen on {}", name(chosen), link.name), -1, ""});
    };
    as_fast("the chosen algorithm", seconds[place]);
    as_fast("automatic", seconds.back());
    chosen_for.push_back(chosen);
  }
  properties.push_back({"one_choice_for_all_sizes", chosen_for[0] == chosen_for[1] ? 1.0 : 0.0, Relation::equal, 0.0,
                        "few messages for small tensors, few bytes on slow links for large ones", -1, ""});
  return properties;
}

void add(CaseList& cases, const std::string& name, const std::string& summary, int ranks,
         std::function<std::vector<Property>(const RunContext&)> properties) {
  Case result = collectives_case("time/" + name, summary, ranks);
  result.timed = true;
  result.execute = [properties = std::move(properties)](const RunContext& context) {
    CaseEvidence evidence;
    evidence.properties = properties(context);
    return evidence;
  };
  cases.push_back(std::move(result));
}

}  // namespace

std::vector<double> time_collectives(const LinkProfile& link, int ranks, int repetitions,
                                     const std::vector<TimedCollective>& all) {
  std::vector<Timed> timed;
  for (const TimedCollective& one : all) timed.push_back({"", operation_of(one.kind, one.algorithm, one.bytes), 0});
  return measure(link, ranks, repetitions, timed);
}

void add_collective_time_cases(CaseList& cases) {
  for (const int ranks : {3, 4}) {
    for (const Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::all_to_all, Kind::broadcast}) {
      add(cases, fmt::format("{}/ranks{}", name_of(kind), ranks),
          fmt::format("{} on a shaped link takes the time of its closed forms", name_of(kind)), ranks,
          [kind, ranks](const RunContext& context) { return time_of_kind(context, kind, ranks); });
    }
  }
  add(cases, "hierarchical/ranks4", "all_reduce between slow nodes: hierarchical as predicted, and faster than a ring", 4,
      hierarchy);
  add(cases, "naive/ranks4", "all_reduce through one rank is slower than a ring by the predicted factor", 4, naive);
  add(cases, "automatic/all_reduce/ranks4", "automatic takes the fastest between slow nodes, small and large", 4,
      [](const RunContext& context) { return choice(context, Kind::all_reduce, two_level_link()); });
  add(cases, "automatic/broadcast/ranks4", "automatic takes the fastest on one level, small and large", 4,
      [](const RunContext& context) { return choice(context, Kind::broadcast, flat_link()); });
}

}  // namespace tandem
