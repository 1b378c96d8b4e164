// SPDX-License-Identifier: Apache-2.0
// Text becomes batches: the definition's, to the last bit, whichever way they are made. docs/techniques/data_pipeline.md
#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/rng.h"
#include "optimized/data_pipeline/prepare.h"
#include "optimized/data_pipeline/text_source.h"
#include "reference/data_pipeline.h"
#include "suites/data_pipeline_cases.h"
#include "suites/scratch_folder.h"
#include "suites/suites.h"

namespace tandem {

Case data_pipeline_case(const std::string& name, const std::string& summary) {
  Case result;
  result.suite = "data_pipeline";
  result.name = "data_pipeline/" + name;
  result.summary = summary;
  result.criterion = Criterion::convergence;
  return result;
}

CaseEvidence of_properties(std::vector<Property> properties) {
  CaseEvidence evidence;
  evidence.properties = std::move(properties);
  return evidence;
}

std::shared_ptr<FormulaTokens> documents_of(const std::vector<std::int64_t>& lengths, std::int64_t symbols) {
  std::vector<std::int64_t> begins(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), begins.begin() + 1);
  auto store = std::make_shared<FormulaTokens>();
  store->documents = std::ssize(lengths);
  store->symbols = symbols > 0 ? symbols : std::max<std::int64_t>(1, begins.back());
  store->begin = [begins](std::int64_t index) { return begins.at(static_cast<std::size_t>(index)); };
  store->token_at = [symbols](std::int64_t place) {
    if (symbols == 0) return static_cast<std::int32_t>(place);
    const auto word = philox4x32({static_cast<std::uint32_t>(place), static_cast<std::uint32_t>(place >> 32), 0, 0}, {1, 2})[0];
    return static_cast<std::int32_t>(word % static_cast<std::uint64_t>(symbols));
  };
  return store;
}

std::vector<std::int64_t> skewed_lengths(std::int64_t count, std::int64_t longest, std::uint64_t seed) {
  CounterRng rng(seed, "suite/document lengths");
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < count; ++i) {
    const double u = rng.next_unit();
    lengths.push_back(2 + static_cast<std::int64_t>(static_cast<double>(longest - 1) * u * u * u));
  }
  return lengths;
}

bool same_batch(const Batch& a, const Batch& b) {
  return a.rows == b.rows && a.sequence == b.sequence && a.ids == b.ids && a.targets == b.targets && a.positions == b.positions &&
         a.document_starts == b.document_starts && a.row_ids == b.row_ids;
}

double padding_share(const std::vector<Batch>& batches) {
  std::int64_t tokens = 0, valid = 0;
  for (const Batch& batch : batches) {
    tokens += batch.rows * batch.sequence;
    valid += batch.valid_tokens();
  }
  return 1.0 - static_cast<double>(valid) / static_cast<double>(tokens);
}

namespace {

// Words, empty lines, carriage returns and characters of several bytes in an order that the seed decides.
std::string made_up_text(std::uint64_t seed, int words) {
  static const std::vector<std::string> kWords = {
      "to be ", "or\n", "\n", "\n\n", "über", "\r\n", "東京 ", "x", "a longer run of words. "};
  CounterRng rng(seed, "suite/text");
  std::string text = "start";
  for (int i = 0; i < words; ++i) text += kWords[rng.next_below(kWords.size())];
  return text;
}

struct Comparison {
  double compared = 0;
  double differ = 0;
  void add(const Batch& a, const Batch& b) {
    ++compared;
    differ += same_batch(a, b) ? 0 : 1;
  }
};

// About two epochs of training and all of validation.
void compare(const BatchSource& candidate, const BatchSource& truth, Comparison& result) {
  const std::int64_t epoch = truth.epoch_rows().value_or(0);
  if (candidate.epoch_rows() != epoch) ++result.differ;
  const std::int64_t rows = 5 + epoch / 15;
  for (std::int64_t step = 0; step <= 2 * epoch / rows; ++step) {
    result.add(candidate.training_batch(step, rows), truth.training_batch(step, rows));
  }
  for (std::int64_t index = 0;; ++index) {
    const auto expected = truth.validation_batch(index, 7);
    const auto found = candidate.validation_batch(index, 7);
    if (expected.has_value() != found.has_value()) ++result.differ;
    if (!expected || !found) return;
    result.add(*found, *expected);
  }
}

struct TextSetting {
  DocumentRule rule;
  double held_out;
  std::int64_t sequence, multiple;
};
constexpr std::array kSettings = {TextSetting{DocumentRule::file, 0.1, 13, 1}, TextSetting{DocumentRule::paragraph, 0.3, 64, 16},
                                  TextSetting{DocumentRule::line, 0.25, 40, 8}, TextSetting{DocumentRule::line, 0.0, 7, 1}};

Case batches_case(Batching batching) {
  Case result = data_pipeline_case(fmt::format("batches/{}", name(batching)),
                                   "every batch of two epochs and of validation is the definition's to the last bit, from text "
                                   "and from prepared data: seeds, rules of documents, lengths");
  result.execute = [batching](const RunContext& context) {
    const ScratchFolder scratch("data-pipeline-batches");
    Comparison from_text, from_prepared;
    double identities = 0;
    for (std::uint64_t i = 0; i < 2 * kSettings.size(); ++i) {
      const TextSetting& setting = kSettings[i % kSettings.size()];
      const std::uint64_t seed = context.seed + i;
      const auto file = [&](const std::string& name, int words) {
        std::ofstream(scratch.path() / name) << made_up_text(seed * 3 + name.size(), words);
        return scratch.path() / name;
      };
      const std::vector<std::filesystem::path> files = {file("a", 150), file("bb", 8), file("ccc", 90)};
      const TextDataOptions options{.sequence = setting.sequence,
                                    .validation_fraction = setting.held_out,
                                    .seed = seed,
                                    .respect_documents = i % 2 == 1,
                                    .documents = setting.rule,
                                    .batching = batching,
                                    .bucket_batches = static_cast<std::int64_t>(3 + 2 * i),
                                    .pad_multiple = setting.multiple};
      const reference::TextSource truth(files, options);
      const auto text = open_text(files, options, context.pitfalls);
      prepare_data(files, "bytes", scratch.path() / "prepared", setting.rule);
      const auto prepared = open_text({scratch.path() / "prepared"}, options, context.pitfalls);
      compare(*text, truth, from_text);
      compare(*prepared, truth, from_prepared);
      identities += text->identity() == prepared->identity() ? 0 : 1;
    }
    const std::string same = "one function of tokens, options, step and rows (core/text_data.h)";
    return of_properties(
        {{"batches_compared", from_text.compared + from_prepared.compared, Relation::at_least, 200, "8 settings", -1, ""},
         exactly("batches_that_differ from text", from_text.differ, 0, same),
         exactly("batches_that_differ from prepared data", from_prepared.differ, 0, same),
         exactly("identities_that_differ", identities, 0, "the same tokens, wherever they are kept")});
  };
  return result;
}

Case ranks_case() {
  Case result =
      data_pipeline_case("ranks", "the parts of 1, 2, 3, 5 and 7 ranks put together are the global batch, whatever the batching");
  result.execute = [](const RunContext& context) {
    constexpr std::int64_t kRows = 11;
    double differ = 0, parts = 0;
    for (const Batching batching : kBatchings) {
      const TextDataOptions options{.sequence = 24,
                                    .validation_fraction = 0.1,
                                    .seed = context.seed,
                                    .respect_documents = true,
                                    .batching = batching,
                                    .bucket_batches = 4,
                                    .pad_multiple = 4};
      const TextSource source(documents_of(skewed_lengths(150, 60, context.seed)), options, context.pitfalls);
      for (std::int64_t step = 0; step < 30; ++step) {
        const Batch global = source.training_batch(step, kRows);
        for (const int ranks : {1, 2, 3, 5, 7}) {
          for (int rank = 0; rank < ranks; ++rank, ++parts) {
            const Interval rows = balanced_part(kRows, ranks, rank);
            const Batch part = source.training_rows(step, kRows, rows);
            differ += same_batch(part, slice_rows(global, rows.begin, rows.size())) ? 0 : 1;
          }
        }
      }
    }
    return of_properties({exactly("parts", parts, 4 * 30 * 18, "batchings, steps, ranks"),
                          exactly("parts_that_differ", differ, 0, "a row depends on its number, not on its rank")});
  };
  return result;
}

// The longer pieces are, the less there is to save: what is declared holds for lengths of which most are short.
Case padding_case() {
  Case result = data_pipeline_case("padding", "share of padding over an epoch: padded to the longest, bucketed, packed");
  result.execute = [](const RunContext& context) {
    constexpr std::int64_t kRows = 8, kBatches = 16, kLongest = 128;
    const auto store = documents_of(skewed_lengths(3000, kLongest, context.seed));
    const auto share = [&](Batching batching) {
      const TextDataOptions options{
          .sequence = kLongest, .validation_fraction = 0, .seed = context.seed, .batching = batching, .bucket_batches = kBatches};
      const TextSource source(store, options, context.pitfalls);
      std::vector<Batch> batches;
      for (std::int64_t step = 0; step < *source.epoch_rows() / kRows; ++step) {
        batches.push_back(source.training_batch(step, kRows));
      }
      return padding_share(batches);
    };
    const double padded = share(Batching::padded), bucketed = share(Batching::bucketed), packed = share(Batching::packed);
    const double mean = static_cast<double>(store->num_tokens() - store->documents) / static_cast<double>(store->documents);
    return of_properties(
        {{"padding_share padded", padded, Relation::at_least, 0.4, "the longest of 8 of such lengths is over twice the mean", -1,
          ""},
         {"padding_share bucketed", bucketed, Relation::at_most, static_cast<double>(kLongest) / (kBatches * mean),
          fmt::format("rows of a window in order: the differences inside batches add up to at most the longest, {}, times the "
                      "rows of a batch; over {} batches of the mean {:.1f}",
                      kLongest, kBatches, mean),
          -1, ""},
         {"padding_share bucketed over padded", bucketed / padded, Relation::at_most, 1.0 / 3, "declared benefit", -1, ""},
         {"padding_share packed", packed, Relation::at_most, 0.02,
          "declared benefit: short pieces fill what long ones leave, a part of a row of every 1024 pieces is left", -1, ""}});
  };
  return result;
}

}  // namespace

void add_data_pipeline_cases(CaseList& cases) {
  for (const Batching batching : kBatchings) cases.push_back(batches_case(batching));
  cases.push_back(ranks_case());
  cases.push_back(padding_case());
  add_data_pipeline_ledger_cases(cases);
  add_data_pipeline_row_cases(cases);
  add_data_pipeline_layout_cases(cases);
  add_data_pipeline_stored_cases(cases);
  add_data_pipeline_time_cases(cases);
}

}  // namespace tandem
