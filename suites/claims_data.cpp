// SPDX-License-Identifier: Apache-2.0
// What the data costs, and what the article advises as a whole: C20, C21.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <memory>

#include <fmt/format.h>

#include "core/checkpoint_interval.h"
#include "core/error.h"
#include "core/rng.h"
#include "optimized/data_pipeline/prepare.h"
#include "optimized/data_pipeline/remote_tokens.h"
#include "optimized/data_pipeline/text_source.h"
#include "optimized/storage/folder_store.h"
#include "suites/anomaly_cases.h"
#include "suites/claims_parts.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

using Of = ClaimCondition::Of;

double seconds_of(const std::function<void()>& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// ---- C20

// Lines of words, the frequent ones short and often.
std::string text_of_words(std::size_t bytes, std::uint64_t seed) {
  CounterRng rng(seed, "words of a claim");
  std::vector<std::string> words;
  for (std::uint64_t w = 0; w < 4000; ++w) {
    std::string word;
    for (std::uint64_t i = 0, length = 2 + rng.next_below(3 + w / 700); i < length; ++i)
      word += static_cast<char>('a' + rng.next_below(26));
    words.push_back(word);
  }
  std::string text;
  while (text.size() < bytes) {
    text += words[rng.next_below(1 + rng.next_below(words.size()))];
    text += rng.next_below(12) == 0 ? ".\n" : " ";
  }
  return text;
}

// Tokens a second of one core, encoding text and reading what was encoded before; requests to a store in two epochs.
struct DataRates {
  double encoded = 0, read = 0;
  double first_epoch_bytes = 0, second_epoch_bytes = 0;
};

DataRates data_rates(std::size_t bytes, std::uint64_t seed) {
  const ScratchFolder scratch("claims-data");
  const std::filesystem::path file = scratch.path() / "text.txt", prefix = scratch.path() / "store" / "tokens";
  const std::string text = text_of_words(bytes, seed);
  std::ofstream(file, std::ios::binary) << text;
  std::filesystem::create_directory(prefix.parent_path());
  static_cast<void>(prepare_data({file}, "bpe:1024", prefix));
  DataRates rates;
  std::vector<std::int32_t> tokens;
  const auto tokenizer = tokenizer_of(prefix);
  rates.encoded = 1 / seconds_of([&] { tokenizer->encode(text, tokens); });
  rates.encoded *= static_cast<double>(tokens.size());
  const TextSource source(std::make_shared<PreparedTokens>(prefix), {.sequence = 256, .validation_fraction = 0}, {});
  constexpr std::int64_t kSteps = 200, kRows = 16;
  const double seconds = seconds_of([&] {
    for (std::int64_t step = 0; step < kSteps; ++step) static_cast<void>(source.training_batch(step, kRows));
  });
  rates.read = static_cast<double>(kSteps * kRows * 256) / seconds;
  RemoteCacheOptions cache;
  cache.folder = scratch.path() / "cache";
  cache.blocks.block_bytes = std::int64_t{1} << 16;
  const RemoteTokens remote(std::make_shared<FolderStore>(prefix.parent_path()), "tokens", cache);
  tokens.resize(4096);
  const auto epoch = [&] {
    const auto before = static_cast<double>(remote.cache_counts().fetched_bytes);
    for (std::int64_t at = 0; at + std::ssize(tokens) <= remote.num_tokens(); at += std::ssize(tokens)) remote.read(at, tokens);
    return static_cast<double>(remote.cache_counts().fetched_bytes) - before;
  };
  rates.first_epoch_bytes = epoch();
  rates.second_epoch_bytes = epoch();
  return rates;
}

// Cores that encode text for a node of 8 A100 at 40 % of 312 TFLOP/s, 6 FLOPs a parameter and token.
double cores_for(double parameters, double encoded_per_second) {
  return 8 * 0.4 * 312e12 / (6 * parameters) / encoded_per_second;
}

void add_data_pipeline(CaseList& cases) { add_data_pipeline_cases(cases); }

ClaimFindings find_data(ClaimEffort effort, const RunContext& context) {
  const CaseFigures padding(add_data_pipeline, "data_pipeline/padding", context);
  const CaseFigures waiting(add_data_pipeline, "data_pipeline/prefetch/hidden", context);
  ClaimFindings found;
  found.figures = {
      {"padding", "padding, rows padded to the longest, lengths 2 + 126 u^3", kNoFigure, kNoFigure,
       padding("padding_share padded"), "share"},
      {"bucketed", "padding, buckets by length", kNoFigure, padding.at("padding_share bucketed").limit,
       padding("padding_share bucketed"), "share"},
      {"packed", "padding, packed rows", kNoFigure, padding.at("padding_share packed").limit, padding("padding_share packed"),
       "share"},
      {"wait", "waiting for data, a source of 8 ms before a step of 12 ms", kNoFigure, 0.4,
       waiting("data_wait_share without prefetching"), "share"},
      {"wait_prefetch", "the same, two batches ahead", kNoFigure, 0, waiting("data_wait_share with prefetching"), "share"}};
  try {
    const DataRates rates = data_rates(effort == ClaimEffort::quick ? 300'000 : 1'000'000, context.seed);
    found.figures.insert(
        found.figures.end(),
        {{"encode", "tokens that one core encodes (BPE) a second", kNoFigure, kNoFigure, rates.encoded, "tokens/s"},
         {"prepared", "rows from prepared tokens over encoding, one core", kNoFigure, kNoFigure, rates.read / rates.encoded, "x"},
         {"cores_small", "cores that encode for 8 A100 training 124 million parameters", kNoFigure, kNoFigure,
          cores_for(124e6, rates.encoded), "cores"},
         {"cores_large", "the same for 7 billion", kNoFigure, kNoFigure, cores_for(7e9, rates.encoded), "cores"},
         {"second_epoch", "bytes from the store in the second epoch over the first, with the cache", kNoFigure, 0,
          rates.second_epoch_bytes / rates.first_epoch_bytes, "x"}});
  } catch (const InputError& error) {
    throw InputError(fmt::format("C20 encodes text by BPE: {}", error.what()));
  }
  found.not_measured = "A shared file system of a cluster under load, and images or audio, whose preprocessing costs far more.";
  return found;
}

Claim data(ClaimEffort effort) {
  return {
      "C20",
      "7",
      "Preprocessing can become the CPU bottleneck, uneven lengths waste padding, storage can starve training; pre-tokenized "
      "files, buckets, caches and prefetching help",
      "tandem run data_pipeline",
      [effort](const RunContext& context) { return find_data(effort, context); },
      {{"padding", Of::measured, Relation::at_least, 0.3, ClaimVerdict::does_not_hold, "Padding wastes little."},
       {"bucketed", Of::measured, Relation::at_most, 0.25, ClaimVerdict::does_not_hold, "Buckets do not help."},
       {"wait", Of::measured, Relation::at_least, 0.15, ClaimVerdict::does_not_hold, "A slow source does not starve training."},
       {"wait_prefetch", Of::measured, Relation::at_most, 0.1, ClaimVerdict::does_not_hold, "Prefetching does not help."},
       {"prepared", Of::measured, Relation::at_least, 3, ClaimVerdict::does_not_hold,
        "Prepared tokens are hardly faster than encoding."},
       {"second_epoch", Of::measured, Relation::at_most, 0.05, ClaimVerdict::does_not_hold, "The cache does not keep the data."},
       {"cores_large", Of::measured, Relation::at_least, 1, ClaimVerdict::holds_within_limits,
        "Limit: encoding text keeps less than one core busy, even for small models; slow storage and heavier preprocessing "
        "starve "
        "training."}},
      [](const ClaimFindings& f) {
        return fmt::format(
            "Padding falls from {:.0f} % to {:.1f} % (buckets) and {:.2f} % (packed), waiting for a slow source from "
            "{:.0f} % to {:.1f} % (prefetching). Prepared tokens are read {:.0f} x as fast as one core encodes; 8 "
            "A100 would keep {:.2g} cores encoding for 124 million parameters, {:.2g} for 7 billion.",
            100 * f.measured("padding"), 100 * f.measured("bucketed"), 100 * f.measured("packed"), 100 * f.measured("wait"),
            100 * f.measured("wait_prefetch"), f.measured("prepared"), f.measured("cores_small"), f.measured("cores_large"));
      }};
}

// ---- C21

// The same layers behind a slow link: what is gained where communication, the larger part, is made twice as fast, and where
// computing is.
void add_bottleneck(const RunContext& context, ClaimFindings& found) {
  const ParallelVariant variant{.degrees = {.data = 4}, .rows = 8, .dropout = 0.0, .row_shape = RowShape::full};
  constexpr double kForward = 0.04;
  const double bytes = 4 * static_cast<double>(num_parameters(model_of(variant)));
  const double rate = 1.5 * bytes / 0.2;  // 0.2 s beside 0.06 s of computing
  const StatedRun slow = stated_run(variant, kForward, stated_link(1e-4, rate), context);
  const StatedRun faster_link = stated_run(variant, kForward, stated_link(1e-4, 2 * rate), context);
  const StatedRun faster_device = stated_run(variant, kForward / 2, stated_link(1e-4, rate), context);
  found.figures.push_back({"right", "speed-up by twice the link where communication is most", kNoFigure,
                           slow.predicted_step_seconds / faster_link.predicted_step_seconds,
                           slow.step_seconds / faster_link.step_seconds, "x"});
  found.figures.push_back({"wrong", "speed-up by twice the device there", kNoFigure,
                           slow.predicted_step_seconds / faster_device.predicted_step_seconds,
                           slow.step_seconds / faster_device.step_seconds, "x"});
  found.figures.push_back({"exposed", "share of communication in that step", kNoFigure,
                           slow.predicted_exposed_seconds / slow.predicted_step_seconds, slow.exposed_seconds / slow.step_seconds,
                           "share"});
}

// Of all kinds of faults, how many numbers tell first: what the property of the first monitor begins with says which it was.
double told_by_numbers(const CaseFigures& values, const CaseFigures& times) {
  double kinds = 0, numbers = 0;
  for (const Property& property : values.all()) {
    if (!property.name.starts_with("first_monitor")) continue;
    kinds += 1;
    numbers += property.derivation.starts_with("slow_") || property.derivation.starts_with("throughput") ? 0 : 1;
  }
  return numbers / (kinds + static_cast<double>(times.values("found (").size()));
}

ClaimFindings find_advice(ClaimEffort effort, const RunContext& context) {
  ClaimFindings found;
  add_bottleneck(context, found);
  const CaseFigures interval(add_checkpoint_cases, "checkpoint/interval", context);
  const CaseFigures account(add_recovery_cases, "recovery/goodput", context);
  const CheckpointCosts costs{.save_seconds = 20, .restart_seconds = 60, .failure_seconds = 4000};
  const double advised = daly_interval_seconds(costs);
  found.figures.push_back({"interval", "waste at four times Daly's interval over that at it, 20000 failures, save 20 s",
                           kNoFigure, (1 - goodput(costs, 4 * advised)) / (1 - goodput(costs, advised)),
                           interval("waste_at_4_times_the_interval_over_waste (save 20 s)"), "x"});
  found.figures.push_back({"goodput_off", "goodput of a simulated run with 176 failures off Daly's model", kNoFigure, 0,
                           account("goodput_of_the_ledger"), "share"});
  const CaseFigures table(add_anomaly_cases, "anomaly/table", context);
  const CaseFigures slow(add_anomaly_cases, "anomaly/slow", context);
  found.figures.push_back({"numbers", "kinds of faults that numbers tell first; the others are slow ranks and links", kNoFigure,
                           kNoFigure, told_by_numbers(table, slow), "share"});
  const auto simple = [&](const std::string& key, const std::string& model, int devices) {
    found.figures.push_back({key, fmt::format("step of DP + recomputation first over the best, {} on {} A100", model, devices), 1,
                             follow_path("simple first", model, "dgx-a100", devices).over_best, kNoFigure, "x"});
  };
  simple("simple_small", "gpt-1.7b", 64);
  simple("simple_large", effort == ClaimEffort::quick ? "gpt-39.1b" : "gpt3-175b", effort == ClaimEffort::quick ? 512 : 1024);
  found.not_measured = "Layouts on the cluster (simulated), and failures of real hardware.";
  return found;
}

Claim advice(ClaimEffort effort) {
  return {
      "C21",
      "8",
      "Find the bottleneck first; start with DP + recomputation; checkpoints and recovery decide effective training time; "
      "anomalies show first in numbers",
      "tandem run checkpoint/interval recovery/goodput anomaly/table; tandem plan --model gpt3-175b --cluster dgx-a100 --gpus "
      "1024",
      [effort](const RunContext& context) { return find_advice(effort, context); },
      {{"right", Of::measured, Relation::at_least, 1.4, ClaimVerdict::does_not_hold, "The named bottleneck is none."},
       {"wrong", Of::measured, Relation::at_most, 1.3, ClaimVerdict::imprecise, "What is no bottleneck helps as much."},
       {"interval", Of::measured, Relation::at_least, 1.3, ClaimVerdict::does_not_hold, "How often is saved decides nothing."},
       {"goodput_off", Of::measured, Relation::at_most, 0.05, ClaimVerdict::imprecise, "Daly's model is off."},
       {"simple_small", Of::predicted, Relation::at_most, 1.25, ClaimVerdict::imprecise,
        "DP and recomputation first is far from the best even for a small model."},
       {"simple_large", Of::predicted, Relation::at_most, 1.25, ClaimVerdict::holds_within_limits,
        "Limit: DP and recomputation first is for models whose state fits; a large one needs TP and PP from the start."},
       {"numbers", Of::measured, Relation::at_least, 0.95, ClaimVerdict::holds_within_limits,
        "Limit: faults of values show first in numbers; slow, hung and dead ranks show in times and heartbeats."}},
      [](const ClaimFindings& f) {
        const auto path = [&](const char* key) {
          return std::isnan(f.predicted(key)) ? std::string("nothing that fits") : fmt::format("{:.2f} x", f.predicted(key));
        };
        return fmt::format(
            "Where {:.0f} % of a step is communication, twice the link gives {:.2f} x and twice the device {:.2f} x; "
            "saving four times too seldom wastes {:.2f} x; DP + recomputation first is {} (1.7B) and {} (large) of "
            "the best step; numbers tell {:.0f} % of the kinds of faults first.",
            100 * f.measured("exposed"), f.measured("right"), f.measured("wrong"), f.measured("interval"), path("simple_small"),
            path("simple_large"), 100 * f.measured("numbers"));
      }};
}

}  // namespace

std::vector<Claim> data_claims(ClaimEffort effort) { return {data(effort), advice(effort)}; }

}  // namespace tandem
