// SPDX-License-Identifier: Apache-2.0
// What a run sees and when: every pair once an epoch, also when it is interrupted; buckets that bias nothing; places of any size.
#include <algorithm>
#include <cmath>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "optimized/data_pipeline/epoch_order.h"
#include "optimized/data_pipeline/prefetcher.h"
#include "optimized/data_pipeline/text_source.h"
#include "suites/data_pipeline_cases.h"

namespace tandem {
namespace {

constexpr std::int64_t kRows = 6;

// A run from one step to another, on ranks that take their rows of each batch from one loader.
struct Segment {
  std::int64_t first_step, last_step;
  int ranks;
  int loader_threads;  // 0: batches are made when they are asked for
};

// What each step of a run trained on: the pairs of all ranks together, in order.
using StepPairs = std::vector<std::int32_t>;
using Ledger = std::map<std::int64_t, StepPairs>;

// Token i of the data is i, so that an id names its pair. One whose target is not the token behind it is no pair of the data.
void note(const Batch& batch, StepPairs& pairs) {
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    if (batch.targets[i] == kIgnoredTarget) continue;
    pairs.push_back(batch.targets[i] == batch.ids[i] + 1 ? batch.ids[i] : -1);
  }
}

void run_segment(const TextSource& source, const Segment& segment, const PitfallSet& pitfalls, Ledger& ledger) {
  Prefetcher loader(source, {.rows = kRows,
                             .first_step = segment.first_step,
                             .last_step = segment.last_step,
                             .batches = segment.loader_threads == 0 ? 0 : 3,
                             .threads = std::max(1, segment.loader_threads),
                             .consumers = segment.ranks,
                             .pitfalls = pitfalls});
  std::mutex mutex;
  const auto steps_of = [&](int rank) {
    for (std::int64_t step = segment.first_step; step < segment.last_step; ++step) {
      const std::shared_ptr<const Batch> batch = loader.take(step);
      const Interval rows = balanced_part(kRows, segment.ranks, rank);
      const std::lock_guard lock(mutex);
      note(slice_rows(*batch, rows.begin, rows.size()), ledger[step]);
    }
  };
  std::vector<std::future<void>> ranks;
  for (int rank = 0; rank < segment.ranks; ++rank) ranks.push_back(std::async(std::launch::async, steps_of, rank));
  for (std::future<void>& rank : ranks) rank.get();
}

Ledger run_segments(const TextSource& source, const std::vector<Segment>& segments, const PitfallSet& pitfalls) {
  Ledger ledger;
  for (const Segment& segment : segments) run_segment(source, segment, pitfalls, ledger);
  for (auto& [step, pairs] : ledger) std::sort(pairs.begin(), pairs.end());
  return ledger;
}

// The steps after which each pair has been seen equally often: whole epochs, and whole windows of buckets.
std::int64_t steps_of_whole_epochs(const TextSource& source, const TextDataOptions& options, std::int64_t epochs) {
  const std::int64_t samples = *source.epoch_rows();
  std::int64_t steps = samples / std::gcd(samples, kRows);
  if (options.batching == Batching::bucketed) steps = std::lcm(steps, options.bucket_batches);
  return steps * ((epochs * samples + steps * kRows - 1) / (steps * kRows));
}

TextDataOptions ledger_options(Batching batching, std::uint64_t seed) {
  return {.sequence = 8, .validation_fraction = 0.1, .seed = seed, .batching = batching, .bucket_batches = 4};
}

// Pairs that were seen more or less often than in `epochs` whole epochs, and what is no pair of the data.
double off_the_ledger(const Ledger& ledger, double epochs) {
  std::map<std::int32_t, double> times;
  for (const auto& [step, pairs] : ledger) {
    for (const std::int32_t pair : pairs) ++times[pair];
  }
  double off = 0;
  for (const auto& [pair, count] : times) off += pair < 0 ? count : std::abs(count - epochs);
  return off;
}

double steps_that_differ(const Ledger& a, const Ledger& b) {
  double differ = std::abs(static_cast<double>(std::ssize(a)) - static_cast<double>(std::ssize(b)));
  for (const auto& [step, pairs] : a) {
    const auto found = b.find(step);
    differ += found == b.end() || found->second != pairs ? 1 : 0;
  }
  return differ;
}

Case epochs_case() {
  Case result =
      data_pipeline_case("ledger/epochs", "each pair of tokens exactly once an epoch, for every batching; none is held out");
  result.execute = [](const RunContext& context) {
    std::vector<Property> properties;
    const auto store = documents_of(skewed_lengths(90, 40, context.seed));
    for (const Batching batching : kBatchings) {
      const TextDataOptions options = ledger_options(batching, context.seed);
      const TextSource source(store, options, context.pitfalls);
      const std::int64_t steps = steps_of_whole_epochs(source, options, 3);
      const Ledger ledger = run_segments(source, {{0, steps, 1, 0}}, context.pitfalls);
      const auto epochs = static_cast<double>(steps * kRows / *source.epoch_rows());
      double pairs = 0;
      for (const auto& [step, seen] : ledger) pairs += static_cast<double>(seen.size());
      // Training documents have one pair less than tokens; the stream has all of its own but what is left of the last sample.
      const std::int64_t training = *source.training_tokens();
      const std::int64_t documents = store->documents - store->documents / 10;
      const std::int64_t expected = batching == Batching::stream ? *source.epoch_rows() * options.sequence : training - documents;
      const std::string what = fmt::format(" {}", name(batching));
      // Where one document follows another in the stream of training, held-out ones between them, ids do not follow each other.
      if (batching != Batching::stream) {
        properties.push_back(exactly("pairs_off_the_ledger" + what, off_the_ledger(ledger, epochs), 0, "once in each epoch"));
      }
      properties.push_back(exactly("pairs_an_epoch" + what, pairs / epochs, static_cast<double>(expected),
                                   "tokens of training documents less one a document, or of whole samples"));
    }
    return of_properties(std::move(properties));
  };
  return result;
}

// Where a run stops and how it goes on. `epoch` are the steps of one.
std::vector<std::vector<Segment>> interruptions(std::int64_t epoch, std::int64_t steps, int threads) {
  const auto cut = [&](const std::vector<std::int64_t>& at) {
    std::vector<Segment> segments;
    std::int64_t first = 0;
    int ranks = 3;
    for (const std::int64_t stop : at) {
      segments.push_back({first, stop, ranks, threads});
      first = stop;
      ranks = ranks == 3 ? 2 : 5;
    }
    segments.push_back({first, steps, ranks, threads});
    return segments;
  };
  return {cut({0}), cut({1}), cut({epoch / 2}), cut({epoch - 1}), cut({epoch + 2, 2 * epoch + 1})};
}

Case resume_case(Batching batching) {
  Case result =
      data_pipeline_case(fmt::format("ledger/resume/{}", name(batching)),
                         "interrupted at batch 0, 1, in the middle, at the last and twice, continued by another number of "
                         "ranks, with 0, 1 and 4 loader threads: each step sees what it would have seen");
  result.execute = [batching](const RunContext& context) {
    const TextDataOptions options = ledger_options(batching, context.seed);
    const TextSource source(documents_of(skewed_lengths(60, 40, context.seed)), options, context.pitfalls);
    const std::int64_t epoch = *source.epoch_rows() / kRows;
    const std::int64_t steps = steps_of_whole_epochs(source, options, 4);
    const Ledger whole = run_segments(source, {{0, steps, 1, 0}}, {});
    const auto epochs = static_cast<double>(steps * kRows / *source.epoch_rows());
    double differ = 0, off = 0, runs = 0;
    for (const int threads : {0, 1, 4}) {
      for (const std::vector<Segment>& segments : interruptions(epoch, steps, threads)) {
        const Ledger ledger = run_segments(source, segments, context.pitfalls);
        differ += steps_that_differ(whole, ledger);
        if (batching != Batching::stream) off += off_the_ledger(ledger, epochs);
        ++runs;
      }
    }
    return of_properties({exactly("interrupted_runs", runs, 15, "five interruptions, three loaders"),
                          {"epochs", epochs, Relation::at_least, 4, "at least two behind every interruption", -1, ""},
                          exactly("steps_that_differ", differ, 0, "the position of a run is its step"),
                          exactly("pairs_off_the_ledger", off, 0, "none lost, none repeated")});
  };
  return result;
}

// ---- what buckets do to the order

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  const auto count = static_cast<double>(a.size());
  const double mean_a = std::accumulate(a.begin(), a.end(), 0.0) / count;
  const double mean_b = std::accumulate(b.begin(), b.end(), 0.0) / count;
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean_a) * (b[i] - mean_b);
    aa += (a[i] - mean_a) * (a[i] - mean_a);
    bb += (b[i] - mean_b) * (b[i] - mean_b);
  }
  return ab / std::sqrt(aa * bb);
}

Case order_case() {
  Case result = data_pipeline_case("buckets/order", "batches grouped by length come in no order of length");
  result.execute = [](const RunContext& context) {
    constexpr std::int64_t kBatches = 16, kSteps = 2400;
    const TextDataOptions options{.sequence = 64,
                                  .validation_fraction = 0,
                                  .seed = context.seed,
                                  .batching = Batching::bucketed,
                                  .bucket_batches = kBatches};
    const TextSource source(documents_of(skewed_lengths(4000, 64, context.seed)), options, context.pitfalls);
    std::vector<double> means, places;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      means.push_back(static_cast<double>(source.training_batch(step, kRows).valid_tokens()) / kRows);
      places.push_back(static_cast<double>(step % kBatches));
    }
    const double noise = 5 / std::sqrt(double{kSteps});
    const double serial = correlation({means.begin(), means.end() - 1}, {means.begin() + 1, means.end()});
    return of_properties(
        {{"serial_correlation", std::abs(serial), Relation::at_most, 1.0 / (kBatches - 1) + noise,
          fmt::format("batches of a window are drawn without putting back: -1/({} - 1); and five deviations of {} "
                      "steps",
                      kBatches, kSteps),
          -1, ""},
         {"correlation_with_place_in_window", std::abs(correlation(means, places)), Relation::at_most, noise,
          "none; five deviations", -1, ""}});
  };
  return result;
}

// Pieces of as many lengths as there are pieces: each tells which it is.
Case places_case() {
  Case result =
      data_pipeline_case("buckets/places", "over seeds, a piece of any length comes at any step of an epoch equally often");
  result.execute = [](const RunContext& context) {
    constexpr std::int64_t kPieces = 24, kRowsHere = 2, kSteps = kPieces / kRowsHere;
    constexpr int kSeeds = 2400;
    std::vector<std::int64_t> lengths;
    for (std::int64_t i = 0; i < kPieces; ++i) lengths.push_back(2 + (7 * i) % kPieces);
    const auto store = documents_of(lengths);
    std::map<std::pair<std::int64_t, std::int64_t>, double> seen;  // (pairs of the piece, step)
    double lost = 0;
    for (int i = 0; i < kSeeds; ++i) {
      const TextDataOptions options{.sequence = 64,
                                    .validation_fraction = 0,
                                    .seed = context.seed + static_cast<std::uint64_t>(i),
                                    .batching = Batching::bucketed,
                                    .bucket_batches = 4};
      const TextSource source(store, options, context.pitfalls);
      std::map<std::int64_t, int> epoch;
      for (std::int64_t step = 0; step < kSteps; ++step) {
        const Batch batch = source.training_batch(step, kRowsHere);
        for (std::int64_t row = 0; row < kRowsHere; ++row) {
          const std::int64_t pairs = slice_rows(batch, row, 1).valid_tokens();
          ++seen[{pairs, step}];
          ++epoch[pairs];
        }
      }
      lost += static_cast<double>(kPieces - std::ssize(epoch));
    }
    const double mean = double{kSeeds} / kSteps;
    double worst = 0;
    for (std::int64_t pairs = 1; pairs <= kPieces; ++pairs) {
      for (std::int64_t step = 0; step < kSteps; ++step) {
        worst = std::max(worst, std::abs(seen[{pairs, step}] - mean) / std::sqrt(mean * (1 - 1.0 / kSteps)));
      }
    }
    return of_properties(
        {exactly("pieces_missing_in_an_epoch", lost, 0, "three windows are one epoch: each piece once"),
         {"largest_deviation", worst, Relation::at_most, 5,
          fmt::format("standard deviations of a binomial count of mean {:.0f}, {} of them", mean, kPieces * kSteps), -1, ""}});
  };
  return result;
}

// ---- places beyond 32 bits

constexpr std::int32_t kPrime = 2147483629;  // the token at a place is the place modulo this: 2^32 places further it is another

std::shared_ptr<FormulaTokens> equal_documents(std::int64_t documents, std::int64_t tokens) {
  auto store = std::make_shared<FormulaTokens>();
  store->documents = documents;
  store->symbols = kPrime;
  store->begin = [tokens](std::int64_t index) { return index * tokens; };
  store->token_at = [](std::int64_t place) { return static_cast<std::int32_t>(place % kPrime); };
  return store;
}

// Rows of far steps that do not stand where plain arithmetic of 64 bits puts them. `place_of` is the first token of a sample;
// the last token of a document of `document` tokens has no target.
double misplaced_rows(const TextSource& source, std::uint64_t seed, std::int64_t document,
                      const std::function<std::int64_t(std::int64_t)>& place_of) {
  const std::int64_t samples = *source.epoch_rows();
  double misplaced = 0;
  for (const std::int64_t number :
       {std::int64_t{0}, std::int64_t{1} << 31, (std::int64_t{1} << 32) + 5, samples - 1, 3 * samples + 7}) {
    const Batch batch = source.training_batch(number, 1);
    const EpochOrder order(samples, seed, number / samples);
    const std::int64_t place = place_of(order.sample(number % samples));
    for (std::int64_t t = 0; t < batch.sequence; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const std::int64_t next = place + t + 1;
      const std::int64_t target = next % document == 0 ? kIgnoredTarget : next % kPrime;
      if (batch.ids[at] == (place + t) % kPrime && batch.targets[at] == target) continue;
      ++misplaced;
      break;
    }
  }
  return misplaced;
}

Case places_beyond_32_bits_case() {
  Case result = data_pipeline_case("places_beyond_32_bits", "2^42 tokens, 2^39 pieces and 2^34 documents, none of which exists");
  result.execute = [](const RunContext& context) {
    constexpr std::int64_t kDocument = std::int64_t{1} << 40;
    constexpr std::int64_t kSequence = 8;
    std::vector<Property> properties;
    const std::string why = "64-bit arithmetic of this case";
    for (const Batching batching : {Batching::stream, Batching::padded}) {
      const TextDataOptions options{
          .sequence = kSequence, .validation_fraction = 0, .seed = context.seed, .respect_documents = true, .batching = batching};
      const TextSource source(equal_documents(4, kDocument), options, context.pitfalls);
      const std::int64_t pieces = (kDocument - 1 + kSequence - 1) / kSequence;  // of a document; the last has a pair less
      const auto place_of = [=](std::int64_t sample) {
        return batching == Batching::stream ? sample * kSequence : sample / pieces * kDocument + sample % pieces * kSequence;
      };
      properties.push_back(exactly(fmt::format("samples {}", name(batching)), static_cast<double>(*source.epoch_rows()),
                                   static_cast<double>(batching == Batching::stream ? 4 * kDocument / kSequence - 1 : 4 * pieces),
                                   why));
      properties.push_back(exactly(fmt::format("misplaced_rows {}", name(batching)),
                                   misplaced_rows(source, context.seed, kDocument, place_of), 0, why));
    }
    const TextDataOptions options{.sequence = 6, .validation_fraction = 0, .seed = context.seed, .respect_documents = true};
    const TextSource many(equal_documents(std::int64_t{1} << 34, 3), options, context.pitfalls);
    properties.push_back(exactly("misplaced_rows of many documents",
                                 misplaced_rows(many, context.seed, 3, [](std::int64_t sample) { return sample * 6; }), 0, why));
    return of_properties(std::move(properties));
  };
  return result;
}

}  // namespace

void add_data_pipeline_ledger_cases(CaseList& cases) {
  cases.push_back(epochs_case());
  for (const Batching batching : kBatchings) cases.push_back(resume_case(batching));
  cases.push_back(order_case());
  cases.push_back(places_case());
  cases.push_back(places_beyond_32_bits_case());
}

}  // namespace tandem
