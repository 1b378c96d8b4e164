// SPDX-License-Identifier: Apache-2.0
#include "cli/data_source.h"

#include <fmt/format.h>

#include "core/synthetic_corpus.h"
#include "optimized/data_pipeline/text_source.h"

namespace tandem {

std::unique_ptr<BatchSource> open_data(const std::string& data, const RunConfig& config) {
  std::unique_ptr<BatchSource> source;
  if (data == "synthetic") {
    SyntheticOptions options;
    options.vocabulary = config.model.vocabulary;
    options.branching = std::min(options.branching, options.vocabulary);
    options.sequence = config.model.sequence;
    options.seed = config.seed;
    source = std::make_unique<SyntheticCorpus>(options);
  } else {
    TextDataOptions options;
    options.sequence = config.model.sequence;
    options.validation_fraction = config.validation_fraction;
    options.seed = config.seed;
    source = open_text({data}, options);
  }
  if (source->vocabulary() > config.model.vocabulary) {
    throw InputError(fmt::format("{} has token ids up to {}, the model has a vocabulary of {}; use --set vocabulary={}", data,
                                 source->vocabulary() - 1, config.model.vocabulary, source->vocabulary()));
  }
  return source;
}

}  // namespace tandem
