// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/batch_source.h"
#include "core/config.h"
#include "optimized/data_pipeline/remote_tokens.h"
#include "optimized/data_pipeline/tokenizer.h"

namespace tandem {

/// Where data of a store is kept on this machine (--data-cache, --data-cache-gib).
struct DataCache {
  std::string folder;  ///< empty: tandem/data in the user's folder for cached files
  double gib = 16;
  std::shared_ptr<const RemoteTokens> tokens = {};  ///< set by open_data() where the data is in a store
};

/// What --data names: "synthetic", a text file, the prefix of a prepared .bin/.idx pair, a token file of llm.c, or
/// s3://BUCKET/PREFIX and file:///FOLDER/PREFIX for a pair in a store. Throws InputError where it is none of these or does not
/// fit the model (vocabulary, sequence).
[[nodiscard]] std::unique_ptr<BatchSource> open_data(const std::string& data, const RunConfig& config, DataCache& cache);

/// The tokenizer for text that a model of `vocabulary` reads and writes which was trained on `data`: `which`, as make_tokenizer()
/// has it, or where that is empty the one that the data was prepared with. Throws InputError where it is not known.
[[nodiscard]] std::shared_ptr<const TextTokenizer> open_tokenizer(const std::string& data, std::int64_t vocabulary,
                                                                  const std::string& which);

}  // namespace tandem
