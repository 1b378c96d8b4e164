// SPDX-License-Identifier: Apache-2.0
// When compression pays: sums and steps over links of stated bandwidth, and the bandwidth from which on the codes take longer
// than the bytes that they save.
#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/rng.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/world.h"
#include "suites/benefits.h"
#include "suites/compression_cases.h"
#include "suites/timing.h"

namespace tandem {
namespace {

constexpr double kLatencySeconds = 5e-5;
constexpr double kNoLimit = 1e12;  // bytes a second
constexpr double kSlowLink = 1e8;
constexpr int kRepetitions = 7;
constexpr int kRepetitionsOfWork = 21;
constexpr int kRanks = 2;

// 4.2 million elements of which nothing is known.
std::vector<CompressedTensor> summed_tensors() {
  std::vector<CompressedTensor> tensors;
  for (int i = 0; i < 4; ++i) tensors.push_back({fmt::format("matrix {}", i), 1024, 1024});
  return tensors;
}

// 1.8 million parameters, of which each rank computes one short row: a step is its communication.
ParallelVariant stepped_variant() {
  return {.degrees = {.data = kRanks}, .rows = 2, .layers = 4, .dropout = 0.0, .hidden = 192, .heads = 12, .mlp_hidden = 768};
}

LinkProfile link_of(double bytes_per_second) {
  LinkProfile link;
  link.name = fmt::format("{:.0f} MB/s", bytes_per_second / 1e6);
  link.description = "stated bandwidth, 50 us";
  link.in_node = link.between_nodes = {kLatencySeconds, bytes_per_second, 0};
  return link;
}

RunContext on_link(const RunContext& context, double bytes_per_second) {
  RunContext shaped = context;
  shaped.world.link = link_of(bytes_per_second);
  return shaped;
}

struct Seconds {
  double plain = std::numeric_limits<double>::infinity();
  double coded = std::numeric_limits<double>::infinity();
};

// Of one sum, in turns; least of the repetitions: what else runs on the machine only adds to it.
Seconds sum_seconds(const CompressionConfig& compression, double bytes_per_second, const RunContext& context) {
  Seconds least;
  const std::vector<CompressedTensor> tensors = summed_tensors();
  const WorldSettings settings = on_link(context, bytes_per_second).world;
  run_world({.ranks = kRanks, .settings = settings}, [&](Communicator& comm) {
    Arena arena;
    CompressedReduction reduction(arena,
                                  {compression, 1, tensors, {{{0, std::ssize(tensors)}, kRanks, comm.rank()}}, context.pitfalls});
    CounterRng rng(static_cast<std::uint64_t>(comm.rank()), "gradients");
    std::vector<float> gradients(4 << 20);
    for (float& value : gradients) value = static_cast<float>(rng.next_normal());
    std::vector<float> memory = gradients;
    const TensorView view = view_of(memory, {std::ssize(memory)});
    const auto timed = [&](double& seconds, const auto& sum) {
      memory = gradients;
      comm.barrier();
      const std::int64_t begin = Timeline::now_ns();
      sum();
      comm.barrier();
      if (comm.rank() == 0) seconds = std::min(seconds, static_cast<double>(Timeline::now_ns() - begin) * 1e-9);
    };
    const int repetitions = bytes_per_second == kNoLimit ? kRepetitionsOfWork : kRepetitions;
    for (int i = 0; i < repetitions; ++i) {
      timed(least.plain, [&] { all_reduce(comm, view, {Purpose::gradient, "plain"}); });
      reduction.begin_step(i, 1);
      timed(least.coded, [&] { reduction.reduce(comm, view, 0); });
      reduction.finish_step(true);
    }
  });
  return least;
}

// By the alpha-beta model: a code goes there and back as an all_reduce of as many bytes does.
double link_seconds(std::int64_t bytes, double bytes_per_second) {
  return expected_seconds(CollectiveAlgorithm::direct, CollectiveKind::all_reduce, bytes, kRanks, link_of(bytes_per_second));
}

// Bytes that are on their way may hide the copies of a plain sum; codes are made before and after.
double saved_seconds(const CompressionConfig& compression, double bytes_per_second, const Seconds& work, bool hides_copies) {
  std::int64_t plain = 0, coded = 0;
  for (const CompressedTensor& tensor : summed_tensors()) {
    plain += 4 * tensor.elements();
    coded += equivalent_bytes(compression, tensor, kRanks);
  }
  const double link = link_seconds(plain, bytes_per_second);
  const double plain_seconds = hides_copies ? std::max(work.plain, link) : work.plain + link;
  return plain_seconds - work.coded - link_seconds(coded, bytes_per_second);
}

// Where a falling difference, known at points of log B, is zero.
double crossing(const std::vector<double>& bandwidths, const std::vector<double>& differences) {
  for (std::size_t i = 1; i < bandwidths.size(); ++i) {
    if (differences[i - 1] < 0 || differences[i] >= 0) continue;
    const double share = differences[i - 1] / (differences[i - 1] - differences[i]);
    return bandwidths[i - 1] * std::pow(bandwidths[i] / bandwidths[i - 1], share);
  }
  return std::nan("");
}

void add_sums(const CompressionConfig& compression, const RunContext& context, std::vector<Property>& properties) {
  const std::vector<double> bandwidths = {kSlowLink, 3e8, 1e9, 3e9, 1e10, 3e10};
  const Seconds work = sum_seconds(compression, kNoLimit, context);
  std::vector<double> measured, predicted, unhidden;
  for (const double bandwidth : bandwidths) {
    const Seconds seconds = sum_seconds(compression, bandwidth, context);
    measured.push_back(seconds.plain - seconds.coded);
    predicted.push_back(saved_seconds(compression, bandwidth, work, true));
    unhidden.push_back(saved_seconds(compression, bandwidth, work, false));
    properties.push_back({fmt::format("seconds_of_sum_saved at {:.0f} MB/s", bandwidth / 1e6), measured.back(),
                          Relation::at_least, predicted.back() - work.coded,
                          fmt::format("16.8 MB: {:.2f} ms plain, {:.2f} ms coded; predicted difference {:.2f} ms; as much as "
                                      "the coded sum takes without a link is left for noise",
                                      1e3 * seconds.plain, 1e3 * seconds.coded, 1e3 * predicted.back()),
                          -1, ""});
  }
  // Between the two: the link's time hides the copies of a plain sum, or none of them.
  const double found = crossing(bandwidths, measured);
  const double low = crossing(bandwidths, predicted), high = crossing(bandwidths, unhidden);
  const std::string derivation = fmt::format(
      "measured {:.0f} MB/s; predicted {:.0f} to {:.0f} from bytes and the work without a link, {:.2f} ms plain and {:.2f} "
      "coded; "
      "measured at half decades, one of which is left",
      found / 1e6, low / 1e6, high / 1e6, 1e3 * work.plain, 1e3 * work.coded);
  properties.push_back(
      {"crossover_over_lower_prediction", found / low, Relation::at_least, 1 / std::sqrt(10.0), derivation, -1, ""});
  properties.push_back({"crossover_over_upper_prediction", found / high, Relation::at_most, std::sqrt(10.0), derivation, -1, ""});
}

// Least of the steps after the first, of the slower rank.
double step_seconds(const CompressionConfig& compression, double bytes_per_second, const RunContext& context) {
  CompressionScript script;
  script.inputs = compressed_inputs(stepped_variant(), compression, context);
  script.inputs.steps = 1 + std::clamp(context.repetitions, 3, 5);
  script.record_tensors = false;
  const CompressionRun run = run_compressed(script, on_link(context, bytes_per_second));
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 1; i < run.steps.front().size(); ++i) {
    least = std::min(least, std::max(run.steps[0][i].seconds, run.steps[1][i].seconds));
  }
  return least;
}

double step_link_seconds(const CompressionConfig& compression, double bytes_per_second, const RunContext& context) {
  const std::vector<StepProgram> programs = programs_of(compressed_inputs(stepped_variant(), compression, context));
  double seconds = 0;
  for (const Operation& op : programs.front()) {
    if (op.kind == OpKind::communicate && op.purpose == Purpose::gradient) seconds += link_seconds(op.bytes, bytes_per_second);
  }
  return seconds;
}

Property step_speed_up(const CompressionConfig& compression, const RunContext& context) {
  const double plain_work = step_seconds({}, kNoLimit, context), coded_work = step_seconds(compression, kNoLimit, context);
  const double plain = step_seconds({}, kSlowLink, context), coded = step_seconds(compression, kSlowLink, context);
  const double expected = (plain_work + step_link_seconds({}, kSlowLink, context)) /
                          (coded_work + step_link_seconds(compression, kSlowLink, context));
  return {fmt::format("step_speed_up at {:.0f} MB/s", kSlowLink / 1e6),
          plain / coded,
          Relation::at_least,
          1 + 0.5 * (expected - 1),
          fmt::format("a step of 1.8 million parameters: {:.1f} ms became {:.1f}; predicted {:.2f} x", 1e3 * plain, 1e3 * coded,
                      expected),
          -1,
          ""};
}

Case timed_case(const std::string& codec, const std::string& name, const std::string& summary, bool quick) {
  CompressionConfig compression = compression_of(codec);
  compression.block = 256;
  compression.density = 0.01;
  compression.rank = 4;
  Case result = compression_case(fmt::format("{}/{}/ranks2", codec, name), summary, stepped_variant(), compression, quick);
  result.timed = true;
  result.unavailable = cannot_time_links;
  const bool sums = !quick;
  result.execute = [=](const RunContext& context) {
    CaseEvidence evidence;
    if (sums) add_sums(compression, context, evidence.properties);
    evidence.properties.push_back(step_speed_up(compression, context));
    return evidence;
  };
  return result;
}

}  // namespace

void add_compression_time_cases(CaseList& cases) {
  cases.push_back(timed_case("int8", "faster", "a step over a slow link takes less time with the code", true));
  for (const char* codec : {"int8", "int4", "sign", "top_k", "power_sgd"}) {
    cases.push_back(
        timed_case(codec, "pays", "time over link bandwidth with and without: the crossover, measured and predicted", false));
  }
}

}  // namespace tandem
