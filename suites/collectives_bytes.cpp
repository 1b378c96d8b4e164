// SPDX-License-Identifier: Apache-2.0
// Bytes that collectives put on the wire are those of the formulas. docs/techniques/collectives.md
#include <cstdint>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/io/binary.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "reference/collectives.h"
#include "suites/collectives_cases.h"

namespace tandem {
namespace {

using Algorithm = CollectiveAlgorithm;

constexpr std::int64_t kElements = 840;  // equal parts on up to 8 ranks
constexpr double kBytes = 4.0 * kElements;

// What all ranks together sent of each operation.
struct Sent {
  std::vector<std::int64_t> bytes;
};

template <class Archive>
void serialize(Archive& archive, Sent& sent) {
  archive(sent.bytes);
}

using Operation = std::function<void(Communicator&)>;

std::vector<double> bytes_of_all_ranks(const RunContext& context, Algorithm algorithm, int ranks,
                                       const std::vector<Operation>& operations) {
  Sent here{std::vector<std::int64_t>(operations.size(), 0)};
  std::mutex mutex;
  run_world({.ranks = ranks, .settings = message_settings(context, algorithm), .pitfalls = context.pitfalls},
            [&](Communicator& comm) {
              for (std::size_t i = 0; i < operations.size(); ++i) {
                const std::int64_t before = comm.bytes_sent(Purpose::other);
                operations[i](comm);
                const std::scoped_lock lock(mutex);
                here.bytes[i] += comm.bytes_sent(Purpose::other) - before;
              }
            });
  std::vector<double> sums(operations.size(), 0);
  for (const std::string& of_process : all_gather_bytes(context.world, to_bytes(here))) {
    const Sent there = from_bytes<Sent>(of_process);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += static_cast<double>(there.bytes[i]);
  }
  return sums;
}

struct Buffers {
  explicit Buffers(int ranks) : counts(static_cast<std::size_t>(ranks), kElements / ranks) {}
  [[nodiscard]] TensorView whole() { return {values.data(), DType::f32, {kElements}}; }
  [[nodiscard]] TensorView second() { return {others.data(), DType::f32, {kElements}}; }
  [[nodiscard]] TensorView part() { return {others.data(), DType::f32, {counts[0]}}; }

  std::vector<std::int64_t> counts;
  std::vector<float> values = std::vector<float>(kElements), others = std::vector<float>(kElements);
};

std::vector<Operation> all_operations() {
  const CommOptions options{.name = "bytes"};
  return {
      [=](Communicator& comm) {
        Buffers of(comm.size());
        comm.all_reduce(of.whole(), options).wait_host();
      },
      [=](Communicator& comm) {
        Buffers of(comm.size());
        comm.reduce_scatter(of.whole(), of.part(), of.counts, options).wait_host();
      },
      [=](Communicator& comm) {
        Buffers of(comm.size());
        comm.all_gather(of.part(), of.whole(), of.counts, options).wait_host();
      },
      [=](Communicator& comm) {
        Buffers of(comm.size());
        comm.all_to_all(of.whole(), of.counts, of.second(), of.counts, options).wait_host();
      },
      [=](Communicator& comm) {
        Buffers of(comm.size());
        comm.broadcast(of.whole(), 0, options).wait_host();
      },
  };
}

// Of all ranks together: in whatever order the parts travel, each arrives at n - 1 ranks once.
std::vector<double> expected_bytes(Algorithm algorithm, int ranks) {
  const double parts = kBytes * (ranks - 1);
  const double all_reduce =
      algorithm == Algorithm::tree ? 2 * kBytes * (ranks - 1) : ranks * reference::least_all_reduce_bytes(ranks, kBytes);
  // Dealt out before the parts go around.
  const double broadcast = algorithm == Algorithm::ring ? parts + kBytes * (ranks - 1) / ranks : parts;
  return {all_reduce, parts, parts, parts, broadcast};
}

std::vector<Property> bytes_as_predicted(const RunContext& context, Algorithm algorithm, int ranks) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"};
  const std::vector<double> sent = bytes_of_all_ranks(context, algorithm, ranks, all_operations());
  const std::vector<double> expected = expected_bytes(algorithm, ranks);
  std::vector<Property> properties;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    properties.push_back({fmt::format("{}_bytes_on_the_wire", kNames[i]), sent[i], Relation::equal, expected[i],
                          "all ranks together: (n-1) b for parts and copies; all_reduce twice that", -1, ""});
  }
  return properties;
}

}  // namespace

void add_collective_bytes_cases(CaseList& cases) {
  for (const int ranks : {3, 4}) {
    for (const Algorithm algorithm : all_algorithms()) {
      if (algorithm == Algorithm::automatic) continue;
      if (algorithm == Algorithm::recursive && ranks == 3) continue;  // pairs meet: more than the least
      if (algorithm == Algorithm::hierarchical && ranks == 3) continue;
      Case result = collectives_case(fmt::format("bytes/{}/ranks{}", name(algorithm), ranks),
                                     fmt::format("bytes on the wire of {} are those of its formulas", name(algorithm)), ranks);
      result.execute = [algorithm, ranks](const RunContext& context) {
        CaseEvidence evidence;
        evidence.properties = bytes_as_predicted(context, algorithm, ranks);
        return evidence;
      };
      cases.push_back(std::move(result));
    }
  }
}

}  // namespace tandem
