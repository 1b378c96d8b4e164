// SPDX-License-Identifier: Apache-2.0
// Tokens a second of TextSource and Prefetcher over memory-mapped tokens.
//
//   loader_bench --make PREFIX [--tokens N] [--longest TOKENS]
//   loader_bench --data PREFIX [--batching stream|padded|bucketed|packed] [--sequence T] [--rows N] [--threads N] [--ahead N]
//                [--seconds S]
//
// The first form writes a prepared data set of 16-bit tokens, documents mostly short. The second makes batches as a training run
// does that takes no time itself, and prints one line of JSON: tokens a second (with padding, and without), seconds to open the
// data, share of padding. ci/peers/data_loader.sh runs it beside PyTorch's DataLoader over the same files.
//
// Not Google Benchmark: batches come from other threads, and the clock covers many.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "core/error.h"
#include "core/rng.h"
#include "optimized/data_pipeline/prefetcher.h"
#include "optimized/data_pipeline/text_source.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Settings {
  std::string make, data;
  std::int64_t tokens = std::int64_t{1} << 26;
  std::int64_t longest = 4096;
  Batching batching = Batching::stream;
  std::int64_t sequence = 1024;
  std::int64_t rows = 8;
  std::int64_t ahead = 4;
  int threads = 1;
  double seconds = 2;
};

void make(const Settings& settings) {
  constexpr std::uint64_t kVocabulary = 50257;
  CounterRng rng(1, "loader_bench");
  IndexedDatasetWriter writer(settings.make, DType::u16);
  std::vector<std::int32_t> document;
  for (std::int64_t left = settings.tokens; left > 0; left -= std::ssize(document)) {
    const double u = rng.next_unit();
    const auto length = 2 + static_cast<std::int64_t>(static_cast<double>(settings.longest - 2) * u * u * u);
    document.resize(static_cast<std::size_t>(std::min(left, length)));
    for (std::int32_t& token : document) token = static_cast<std::int32_t>(rng.next_u32() % kVocabulary);
    writer.add_sequence(document);
    writer.end_document();
  }
  writer.commit();
}

void run(const Settings& settings) {
  const Clock::time_point opening = Clock::now();
  const auto source =
      open_text({settings.data}, {.sequence = settings.sequence, .validation_fraction = 0, .batching = settings.batching});
  const double opening_seconds = seconds_since(opening);
  constexpr std::int64_t kWarmUp = 200;
  Prefetcher loader(*source, {.rows = settings.rows,
                              .first_step = 0,
                              .last_step = std::numeric_limits<std::int32_t>::max(),
                              .batches = settings.ahead,
                              .threads = settings.threads,
                              .pitfalls = {}});
  std::int64_t step = 0, tokens = 0, valid = 0;
  for (; step < kWarmUp; ++step) {
    const std::shared_ptr<const Batch> batch = loader.take(step);
    tokens += batch->rows * batch->sequence;
    valid += batch->valid_tokens();
  }
  const double valid_share = static_cast<double>(valid) / static_cast<double>(tokens);
  tokens = 0;
  const Clock::time_point begin = Clock::now();
  const std::clock_t cpu_begin = std::clock();
  double seconds = 0;
  for (; seconds < settings.seconds; ++step) {
    const std::shared_ptr<const Batch> batch = loader.take(step);
    tokens += batch->rows * batch->sequence;
    if (step % 8 == 0) seconds = seconds_since(begin);
  }
  seconds = seconds_since(begin);
  const double cpu_seconds = static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
  const double rate = static_cast<double>(tokens) / seconds;
  fmt::print(
      "{{\"batching\": \"{}\", \"threads\": {}, \"ahead\": {}, \"rows\": {}, \"sequence\": {}, \"tokens_per_second\": {:.0f}, "
      "\"tokens_per_cpu_second\": {:.0f}, \"valid_tokens_per_second\": {:.0f}, \"padding_share\": {:.4f}, \"opening_seconds\": "
      "{:.4f}}}\n",
      name(settings.batching), settings.threads, settings.ahead, settings.rows, settings.sequence, rate,
      static_cast<double>(tokens) / cpu_seconds, rate * valid_share, 1 - valid_share, opening_seconds);
}

int main_of(int argc, char** argv) {
  Settings settings;
  CLI::App app("Tokens a second of the data loader");
  app.add_option("--make", settings.make, "prefix of a data set to write");
  app.add_option("--tokens", settings.tokens)->check(CLI::PositiveNumber);
  app.add_option("--longest", settings.longest, "tokens of a document")
      ->check(CLI::Range(std::int64_t{3}, std::int64_t{1} << 30));
  app.add_option("--data", settings.data, "prefix of a data set to read");
  const std::map<std::string, Batching> batchings = {
      {"stream", Batching::stream}, {"padded", Batching::padded}, {"bucketed", Batching::bucketed}, {"packed", Batching::packed}};
  app.add_option("--batching", settings.batching)->transform(CLI::CheckedTransformer(batchings));
  app.add_option("--sequence", settings.sequence)->check(CLI::PositiveNumber);
  app.add_option("--rows", settings.rows)->check(CLI::PositiveNumber);
  app.add_option("--ahead", settings.ahead)->check(CLI::NonNegativeNumber);
  app.add_option("--threads", settings.threads)->check(CLI::PositiveNumber);
  app.add_option("--seconds", settings.seconds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (settings.make.empty() == settings.data.empty()) throw InputError("either --make PREFIX or --data PREFIX");
  if (!settings.make.empty()) {
    make(settings);
  } else {
    run(settings);
  }
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  try {
    return tandem::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "loader_bench: %s\n", error.what());
    return 2;
  }
}
