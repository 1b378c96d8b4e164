// SPDX-License-Identifier: Apache-2.0
// Every collective by every algorithm gives what reference/collectives.h says, to the last bit. docs/techniques/collectives.md
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/io/binary.h"
#include "core/io/hash.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "reference/collectives.h"
#include "suites/collectives_cases.h"
#include "suites/suites.h"

namespace tandem {
namespace {

using Counts = std::vector<std::int64_t>;

// What ranks have seen; processes add theirs up.
struct Tally {
  std::int64_t compared = 0, wrong = 0, altered_inputs = 0, other_bits = 0;
  std::string first_wrong;

  void add(const Tally& other) {
    if (first_wrong.empty()) first_wrong = other.first_wrong;
    compared += other.compared;
    wrong += other.wrong;
    altered_inputs += other.altered_inputs;
    other_bits += other.other_bits;
  }
};

template <class Archive>
void serialize(Archive& archive, Tally& tally) {
  archive(tally.compared, tally.wrong, tally.altered_inputs, tally.other_bits, tally.first_wrong);
}

// Small integers that differ by rank and by index: their sums are exact in every dtype, and swapped ranks or shifted elements
// show.
std::int64_t value_at(std::uint64_t seed, int rank, std::int64_t index) {
  return (rank + 1) * 1000 + (index * 7 + rank * rank * 13 + static_cast<std::int64_t>(seed % 1000)) % 911;
}

// The operations of one rank in one dtype, each compared with the reference.
template <class Real>
class RankCheck {
 public:
  RankCheck(Communicator& comm, std::uint64_t seed, Tally& tally) : comm_(comm), seed_(seed), tally_(tally) {}

  void all_reduce(std::int64_t elements) {
    const reference::PerRank<Real> inputs = inputs_of(Counts(ranks(), elements));
    Buffer data(inputs[own()]);
    comm_.all_reduce(data.view(), {.name = "check"}).wait_host();
    compare("all_reduce", data, reference::all_reduce(inputs)[own()]);
  }

  void reduce_scatter(const Counts& counts) {
    const reference::PerRank<Real> inputs = inputs_of(Counts(ranks(), total(counts)));
    Buffer input(inputs[own()]), output(std::vector<Real>(static_cast<std::size_t>(counts[own()])));
    comm_.reduce_scatter(input.view(), output.view(), counts, {.name = "check"}).wait_host();
    compare("reduce_scatter", output, reference::reduce_scatter(inputs, counts)[own()]);
    tally_.altered_inputs += input.holds(inputs[own()]) ? 0 : 1;
  }

  void all_gather(const Counts& counts) {
    const reference::PerRank<Real> inputs = inputs_of(counts);
    Buffer input(inputs[own()]), output(std::vector<Real>(static_cast<std::size_t>(total(counts))));
    comm_.all_gather(input.view(), output.view(), counts, {.name = "check"}).wait_host();
    compare("all_gather", output, reference::all_gather(inputs)[own()]);
  }

  void all_to_all(std::int64_t scale) {
    std::vector<Counts> counts(ranks(), Counts(ranks()));
    Counts sent, received;
    for (std::size_t s = 0; s < ranks(); ++s) {
      for (std::size_t r = 0; r < ranks(); ++r) counts[s][r] = static_cast<std::int64_t>((s * 3 + r * 5 + s * r) % 4) * scale;
      sent.push_back(total(counts[s]));
    }
    for (std::size_t s = 0; s < ranks(); ++s) received.push_back(counts[s][own()]);
    const reference::PerRank<Real> inputs = inputs_of(sent);
    Buffer input(inputs[own()]), output(std::vector<Real>(static_cast<std::size_t>(total(received))));
    comm_.all_to_all(input.view(), counts[own()], output.view(), received, {.name = "check"}).wait_host();
    compare("all_to_all", output, reference::all_to_all(inputs, counts)[own()]);
  }

  void broadcast(std::int64_t elements) {
    const reference::PerRank<Real> inputs = inputs_of(Counts(ranks(), elements));
    for (int root = 0; root < comm_.size(); ++root) {
      Buffer data(inputs[own()]);
      comm_.broadcast(data.view(), root, {.name = "check"}).wait_host();
      compare("broadcast", data, reference::broadcast(inputs, root)[own()]);
    }
  }

 private:
  // One element more than is used, so that none are somewhere.
  class Buffer {
   public:
    explicit Buffer(std::vector<Real> values) : count_(static_cast<std::int64_t>(values.size())), values_(std::move(values)) {
      values_.push_back(Real{77});
    }
    [[nodiscard]] TensorView view() { return {values_.data(), dtype_of<Real>, {count_}}; }
    [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(count_); }
    [[nodiscard]] bool holds(const std::vector<Real>& expected) const {
      return expected.size() == size() && values_.back() == Real{77} &&
             (expected.empty() || std::memcmp(values_.data(), expected.data(), size() * sizeof(Real)) == 0);
    }

   private:
    std::int64_t count_;
    std::vector<Real> values_;
  };

  [[nodiscard]] std::size_t own() const { return static_cast<std::size_t>(comm_.rank()); }
  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(comm_.size()); }
  static std::int64_t total(const Counts& counts) {
    std::int64_t sum = 0;
    for (const std::int64_t count : counts) sum += count;
    return sum;
  }
  [[nodiscard]] reference::PerRank<Real> inputs_of(const Counts& counts) const {
    reference::PerRank<Real> inputs;
    for (int rank = 0; rank < comm_.size(); ++rank) {
      inputs.emplace_back();
      for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(rank)]; ++i) {
        inputs.back().push_back(static_cast<Real>(value_at(seed_, rank, i)));
      }
    }
    return inputs;
  }
  void compare(const char* operation, const Buffer& got, const std::vector<Real>& expected) {
    tally_.compared += 1;
    if (got.holds(expected)) return;
    tally_.wrong += 1;
    if (!tally_.first_wrong.empty()) return;
    tally_.first_wrong = fmt::format("{} of {} {} on rank {}", operation, expected.size(), name(dtype_of<Real>), comm_.rank());
  }

  Communicator& comm_;
  std::uint64_t seed_;
  Tally& tally_;
};

template <class Real>
void check_operations(Communicator& comm, std::uint64_t seed, Tally& tally) {
  RankCheck<Real> check(comm, seed, tally);
  for (const std::int64_t elements : {0, 1, 5, 61, 1009, 20011}) {
    check.all_reduce(elements);
    check.broadcast(elements);
  }
  for (const std::int64_t scale : {0, 1, 3, 997}) {
    Counts counts;
    for (int rank = 0; rank < comm.size(); ++rank) counts.push_back((rank * 2 + 1) % 5 * scale);
    check.reduce_scatter(counts);
    check.all_gather(counts);
    check.all_to_all(scale);
  }
}

// Values whose sum depends on the order of addition: every rank must have formed the same sums, `direct` in order of ranks.
std::vector<float> rough_values(int rank, std::int64_t count) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const float fraction = 1.0F + 0.013F * static_cast<float>((i * 31 + rank * 17) % 71);
    const auto exponent = static_cast<int>((i * 13 + rank * 29) % 23) - 11;
    values.push_back(std::ldexp((i + rank) % 3 == 0 ? -fraction : fraction, exponent));
  }
  return values;
}

void check_order_of_sums(Communicator& comm, bool in_rank_order, Tally& tally) {
  constexpr std::int64_t kElements = 4099;
  reference::PerRank<float> inputs;
  for (int rank = 0; rank < comm.size(); ++rank) inputs.push_back(rough_values(rank, kElements));
  std::vector<float> sum = inputs[static_cast<std::size_t>(comm.rank())];
  all_reduce(comm, TensorView(sum.data(), DType::f32, {kElements}), {.name = "order of sums"});
  const std::uint64_t hash = hash64(std::as_bytes(std::span(sum)));
  for (const std::uint64_t other : all_gather_u64(comm, hash)) tally.other_bits += other == hash ? 0 : 1;
  if (in_rank_order) tally.other_bits += sum == reference::all_reduce(inputs)[0] ? 0 : 1;
}

std::vector<Property> results_of(const RunContext& context, int ranks, const WorldSettings& settings) {
  std::vector<Tally> by_rank(static_cast<std::size_t>(ranks));
  run_world({.ranks = ranks, .settings = settings, .pitfalls = context.pitfalls}, [&](Communicator& comm) {
    Tally& of_rank = by_rank[static_cast<std::size_t>(comm.rank())];
    check_operations<float>(comm, context.seed, of_rank);
    check_operations<std::int64_t>(comm, context.seed, of_rank);
    check_order_of_sums(comm, settings.algorithm == CollectiveAlgorithm::direct, of_rank);
  });
  Tally tally, all;
  for (const Tally& of_rank : by_rank) tally.add(of_rank);
  for (const std::string& of_process : all_gather_bytes(context.world, to_bytes(tally))) all.add(from_bytes<Tally>(of_process));
  const auto none = [&](const char* property, std::int64_t value, const std::string& derivation, const std::string& tensor = "") {
    return Property{property, static_cast<double>(value), Relation::equal, 0.0, derivation, -1, tensor};
  };
  return {
      none("results_unlike_reference", all.wrong,
           fmt::format("of {} results, integers whose sums are exact, bit for bit", all.compared), all.first_wrong),
      none("inputs_changed", all.altered_inputs, "a reduce_scatter leaves its input as it was"),
      none("sums_with_other_bits", all.other_bits, "every rank has the same bits, and direct those of the sum in order of ranks"),
      {"results_compared", static_cast<double>(all.compared), Relation::at_least, static_cast<double>(ranks) * 2.0,
       "every rank, every dtype", -1, ""}};
}

void add_case(CaseList& cases, const std::string& label, int ranks,
              const std::function<WorldSettings(const RunContext&)>& settings) {
  Case result = collectives_case(fmt::format("{}/ranks{}", label, ranks),
                                 fmt::format("all operations by {} equal the reference bit for bit", label), ranks);
  result.execute = [ranks, settings](const RunContext& context) {
    CaseEvidence evidence;
    evidence.properties = results_of(context, ranks, settings(context));
    return evidence;
  };
  cases.push_back(std::move(result));
}

}  // namespace

Case collectives_case(const std::string& name, const std::string& summary, int ranks) {
  Case result;
  result.suite = "collectives";
  result.name = "collectives/" + name;
  result.summary = summary;
  result.criterion = Criterion::convergence;
  result.plan.parallel.data = ranks;
  return result;
}

WorldSettings message_settings(const RunContext& context, CollectiveAlgorithm algorithm) {
  WorldSettings settings = context.world;
  settings.algorithm = algorithm;
  if (settings.transport == "threads" && !settings.link) {
    settings.link = read_link_profile("unshaped");
    settings.link->ranks_per_node = 2;
  }
  return settings;
}

void add_collective_result_cases(CaseList& cases) {
  for (const int ranks : {2, 3, 4, 5, 7}) {
    add_case(cases, "shared", ranks, [](const RunContext& context) {
      WorldSettings settings = context.world;
      settings.algorithm = CollectiveAlgorithm::direct;
      return settings;
    });
    for (const CollectiveAlgorithm algorithm : all_algorithms()) {
      add_case(cases, std::string(name(algorithm)), ranks,
               [algorithm](const RunContext& context) { return message_settings(context, algorithm); });
    }
  }
}

void add_collectives_cases(CaseList& cases) {
  add_collective_result_cases(cases);
  add_collective_bytes_cases(cases);
  add_collective_time_cases(cases);
}

}  // namespace tandem
