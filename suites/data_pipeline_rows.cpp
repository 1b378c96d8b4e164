// SPDX-License-Identifier: Apache-2.0
// What rows mean to a model: padding changes nothing, documents of one row do not see each other, a target is the next token.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "optimized/data_pipeline/text_source.h"
#include "optimized/training/trainer.h"
#include "suites/data_pipeline_cases.h"
#include "suites/data_pipeline_steps.h"

namespace tandem {
namespace {

// Short documents of a small vocabulary, in rows that are as long as the model allows.
PairInputs inputs_with(const std::string& precision, std::int64_t sequence, double dropout, const RunContext& context) {
  ParallelVariant variant;
  variant.precision = precision;
  variant.dropout = dropout;
  variant.layers = 1;
  variant.hidden = 24;
  variant.heads = 4;
  PairInputs inputs = inputs_of(variant, context);
  inputs.model.sequence = sequence;
  return inputs;
}

// 4 eps sqrt(K), K the tokens that a gradient is summed over.
double rounding_of(const PairInputs& inputs, const Batch& batch) {
  return 4 * candidate_roundoff(inputs.plan) * std::sqrt(static_cast<double>(batch.rows * batch.sequence));
}
constexpr const char* kRoundingWhy = "4 eps sqrt(K): the same sums over K tokens, cut into other blocks";

// ---- padding

// The same three documents, padded to their longest, by one more and by 64 more.
std::vector<Batch> padded_batches(const PairInputs& inputs, const RunContext& context) {
  constexpr std::int64_t kLongest = 63;
  std::vector<Batch> batches;
  for (const std::int64_t padding : {0, 1, 64}) {
    const std::int64_t multiple = kLongest + padding;
    TextDataOptions options{
        .sequence = 63 * 64 * 127, .validation_fraction = 0, .seed = context.seed, .batching = Batching::padded};
    options.pad_multiple = multiple;
    const TextSource source(documents_of({21, kLongest + 1, 6}, inputs.model.vocabulary), options, context.pitfalls);
    batches.push_back(source.training_batch(0, 3));
  }
  return batches;
}

Case padding_case() {
  Case result = data_pipeline_case(
      "padding_invariance", "0, 1 and 64 tokens of padding: the same loss, gradients and number of tokens, reference and engine");
  result.execute = [](const RunContext& context) {
    std::vector<Property> properties;
    for (const std::string precision : {"fp32", "fp64"}) {
      const PairInputs inputs = inputs_with(precision, 127, 0.1, context);
      const std::vector<Batch> batches = padded_batches(inputs, context);
      const std::vector<StepOutcome> truth = reference_outcomes(inputs, batches);
      const std::vector<StepOutcome> engine = engine_outcomes(inputs, batches, context);
      for (std::size_t i = 0; i < batches.size(); ++i) {
        const std::string what = fmt::format(" {} length {}", precision, batches[i].sequence);
        properties.push_back(exactly("counted_tokens" + what, engine[i].valid_tokens, 20 + 63 + 5, "pairs of the documents"));
        properties.push_back(exactly("reference_tensors_that_differ" + what, tensors_that_differ(truth[i], truth[0]), 0,
                                     "padding adds exact zeros to sums that are made token by token"));
        properties.push_back({"engine_difference" + what, largest_difference(engine[i], engine[0]), Relation::at_most,
                              precision == "fp64" ? 1e-13 : 1e-5, "rounding: sums over tokens are cut into other blocks", -1,
                              ""});
      }
    }
    return of_properties(std::move(properties));
  };
  return result;
}

// ---- packing

struct Document {
  std::int64_t row, begin, end;  // tokens of its row
};

std::vector<Document> documents_in(const Batch& batch) {
  std::vector<Document> documents;
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    for (std::int64_t t = 0; t < batch.sequence; ++t) {
      const auto at = static_cast<std::size_t>(row * batch.sequence + t);
      if (batch.targets[at] == kIgnoredTarget) continue;
      // Positions say where a document begins, whatever attention is told.
      if (batch.positions[at] == 0) documents.push_back({row, t, t});
      documents.back().end = t + 1;
    }
  }
  return documents;
}

// Only this document has targets, so that loss and gradients are its own.
Batch only(const Batch& batch, const Document& document) {
  Batch result = batch;
  for (std::int64_t i = 0; i < batch.rows * batch.sequence; ++i) {
    const std::int64_t row = i / batch.sequence, t = i % batch.sequence;
    const bool inside = row == document.row && t >= document.begin && t < document.end;
    if (!inside) result.targets[static_cast<std::size_t>(i)] = kIgnoredTarget;
  }
  return result;
}

Batch with_others_changed(const Batch& batch, const Document& document, std::int64_t vocabulary) {
  Batch result = batch;
  for (std::int64_t i = 0; i < batch.rows * batch.sequence; ++i) {
    const std::int64_t row = i / batch.sequence, t = i % batch.sequence;
    std::int32_t& id = result.ids[static_cast<std::size_t>(i)];
    if (row != document.row || t < document.begin || t >= document.end) id = static_cast<std::int32_t>((id + 7) % vocabulary);
  }
  return result;
}

Batch alone(const Batch& batch, const Document& document) {
  Batch result = make_batch(1, document.end - document.begin);
  for (std::int64_t t = 0; t < result.sequence; ++t) {
    const auto from = static_cast<std::size_t>(document.row * batch.sequence + document.begin + t);
    result.ids[static_cast<std::size_t>(t)] = batch.ids[from];
    result.targets[static_cast<std::size_t>(t)] = batch.targets[from];
  }
  result.row_ids = {batch.row_ids[static_cast<std::size_t>(document.row)]};
  return result;
}

struct Isolation {
  double documents = 0, engine_differ = 0, reference_differ = 0, reference_alone = 0, engine_alone = 0, bound = 0;
};

void isolate(const PairInputs& inputs, const Batch& batch, const RunContext& context, Isolation& found) {
  found.bound = rounding_of(inputs, batch);
  for (const Document& document : documents_in(batch)) {
    const Batch as_is = only(batch, document);
    const std::vector<Batch> batches = {as_is, with_others_changed(as_is, document, inputs.model.vocabulary),
                                        alone(batch, document)};
    const std::vector<StepOutcome> truth = reference_outcomes(inputs, batches);
    const std::vector<StepOutcome> engine = engine_outcomes(inputs, batches, context);
    ++found.documents;
    found.engine_differ += tensors_that_differ(engine[1], engine[0]);
    found.reference_differ += tensors_that_differ(truth[1], truth[0]);
    found.reference_alone += tensors_that_differ(truth[2], truth[0]);
    const double difference = largest_difference(engine[2], engine[0]);
    if (!(difference <= found.engine_alone)) found.engine_alone = difference;
  }
}

Case packed_case(std::int64_t rows, const std::string& precision) {
  Case result = data_pipeline_case(fmt::format("packed_documents/rows{}/{}", rows, precision),
                                   "documents of a packed row do not see each other, wherever one ends: another's tokens change "
                                   "no bit, and alone it is the same");
  result.execute = [rows, precision](const RunContext& context) {
    constexpr std::int64_t kSequence = 29;
    const PairInputs inputs = inputs_with(precision, kSequence, 0, context);
    Isolation found;
    // Documents of n tokens have n - 1 pairs: two fill a row, the longer one first, so that it ends at every offset.
    for (std::int64_t first = 1; first <= kSequence / 2; first += rows) {
      std::vector<std::int64_t> lengths;
      for (std::int64_t row = 0; row < rows; ++row) {
        lengths.push_back(kSequence - first - row + 1);
        lengths.push_back(first + row + 1);
      }
      const TextDataOptions options{
          .sequence = kSequence, .validation_fraction = 0, .seed = context.seed, .batching = Batching::packed};
      const TextSource source(documents_of(lengths, inputs.model.vocabulary), options, context.pitfalls);
      isolate(inputs, source.training_batch(0, rows), context, found);
    }
    return of_properties(
        {{"documents", found.documents, Relation::at_least, 28, "two a row, ends at each offset of half a row", -1, ""},
         exactly("engine_tensors_that_differ", found.engine_differ, 0,
                 "other documents' tokens changed: loss and gradients of one"),
         exactly("reference_tensors_that_differ", found.reference_differ, 0, "the same"),
         exactly("reference_tensors_that_differ alone", found.reference_alone, 0,
                 "the same sums, without what added exact zeros"),
         {"engine_difference alone", found.engine_alone, Relation::at_most, found.bound, kRoundingWhy, -1, ""}});
  };
  return result;
}

// ---- targets

constexpr std::int64_t kSymbols = 16;

SyntheticCorpus bigram_corpus(std::uint64_t seed) {
  return SyntheticCorpus({.vocabulary = kSymbols, .branching = 4, .sequence = 200, .seed = seed});
}

// Documents from a source whose table of pairs is known.
std::shared_ptr<const TokenStore> bigram_documents(const SyntheticCorpus& corpus, std::int64_t documents) {
  std::vector<std::int32_t> tokens;
  std::vector<std::int64_t> lengths;
  const Batch batch = corpus.training_batch(0, documents);
  for (std::int64_t row = 0; row < documents; ++row) {
    // Of lengths that divide nothing.
    const std::int64_t length = 40 + 7 * row % 150;
    const auto first = batch.ids.begin() + row * batch.sequence;
    tokens.insert(tokens.end(), first, first + length);
    lengths.push_back(length);
  }
  auto store = documents_of(lengths, kSymbols);
  store->token_at = [tokens](std::int64_t place) { return tokens.at(static_cast<std::size_t>(place)); };
  return store;
}

Case targets_case() {
  Case result = data_pipeline_case("targets",
                                   "a source of known entropy: targets are its next tokens, a row takes none of its neighbour's");
  result.execute = [](const RunContext& context) {
    const SyntheticCorpus corpus = bigram_corpus(context.seed);
    const auto store = bigram_documents(corpus, 120);
    std::vector<Property> properties;
    for (const Batching batching : kBatchings) {
      const TextDataOptions options{
          .sequence = 24, .validation_fraction = 0, .seed = context.seed, .respect_documents = true, .batching = batching};
      const TextSource source(store, options, context.pitfalls);
      double sum = 0, squares = 0, count = 0, impossible = 0, neighbours = 0;
      for (std::int64_t step = 0; step < 60; ++step) {
        const Batch batch = source.training_batch(step, 8);
        for (std::size_t i = 0; i < batch.ids.size(); ++i) {
          if (batch.targets[i] == kIgnoredTarget) continue;
          const double probability = corpus.probability(batch.ids[i], batch.targets[i]);
          ++count;
          impossible += probability > 0 ? 0 : 1;
          if (!(probability > 0)) continue;
          sum -= std::log(probability);
          squares += std::log(probability) * std::log(probability);
        }
        for (std::int64_t row = 0; row < batch.rows; ++row) {
          neighbours += same_batch(source.training_rows(step, 8, {row, row + 1}), slice_rows(batch, row, 1)) ? 0 : 1;
        }
      }
      const double mean = sum / count;
      const double error = std::sqrt((squares / count - mean * mean) / count);
      const std::string what = fmt::format(" {}", name(batching));
      properties.push_back(exactly("impossible_pairs" + what, impossible, 0, "the source never makes them"));
      properties.push_back({"cost_from_entropy" + what, std::abs(mean - corpus.entropy_rate_nats()), Relation::at_most, 5 * error,
                            fmt::format("the best predictor pays {:.4f} nats; five standard errors of {} pairs",
                                        corpus.entropy_rate_nats(), count),
                            -1, ""});
      properties.push_back(exactly("rows_that_depend_on_others" + what, neighbours, 0, "a row is the same alone"));
    }
    return of_properties(std::move(properties));
  };
  return result;
}

// A model that is trained on packed rows learns the table, and nothing beyond it.
Case entropy_case() {
  Case result =
      data_pipeline_case("entropy/packed", "trained on packed documents, a model reaches the entropy of their source within 4 %");
  RunConfig config;
  config.model = {.vocabulary = kSymbols, .sequence = 32, .layers = 1, .hidden = 32, .heads = 2};
  config.plan.batch = {16, 1};
  config.optimizer.learning_rate = 1e-2;
  config.optimizer.weight_decay = 0.0;
  config.schedule = {ScheduleKind::cosine, 20, 0, 0.05};
  config.steps = 250;
  config.evaluate_every_steps = 0;
  config.evaluate_batches = 16;
  result.model = config.model;
  result.plan = config.plan;
  result.execute = [config](const RunContext& context) {
    const SyntheticCorpus corpus = bigram_corpus(context.seed);
    const TextDataOptions options{.sequence = 32, .validation_fraction = 0.1, .seed = context.seed, .batching = Batching::packed};
    const TextSource source(bigram_documents(corpus, 900), options, context.pitfalls);
    TrainOptions train_options;
    train_options.config = config;
    train_options.config.seed = context.seed;
    train_options.data = &source;
    train_options.pitfalls = context.pitfalls;
    train_options.backend = context.backend;
    const double loss = train(train_options).validation_losses.back().second;
    const std::string why = fmt::format("entropy rate {:.4f} nats", corpus.entropy_rate_nats());
    return of_properties(
        {{"validation_loss_over_entropy", loss / corpus.entropy_rate_nats(), Relation::at_most, 1.04, why, -1, ""},
         {"validation_loss_over_entropy (lower end)", loss / corpus.entropy_rate_nats(), Relation::at_least, 0.95,
          why + ", less the sampling error of the held-out documents", -1, ""}});
  };
  return result;
}

}  // namespace

void add_data_pipeline_row_cases(CaseList& cases) {
  cases.push_back(padding_case());
  for (const std::int64_t rows : {1, 3}) {
    for (const std::string precision : {"fp32", "fp64"}) cases.push_back(packed_case(rows, precision));
  }
  cases.push_back(targets_case());
  cases.push_back(entropy_case());
}

}  // namespace tandem
