// SPDX-License-Identifier: Apache-2.0
#include "cli/data_source.h"

#include <cstdlib>
#include <optional>

#include <fmt/format.h>

#include "cli/store_options.h"
#include "core/synthetic_corpus.h"
#include "optimized/data_pipeline/llmc_file.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/text_source.h"

namespace tandem {
namespace {

std::filesystem::path cache_folder(const std::string& named) {
  if (!named.empty()) return named;
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) return std::filesystem::path(cache) / "tandem/data";
  if (const std::string home = variable("HOME"); !home.empty()) return std::filesystem::path(home) / ".cache/tandem/data";
  throw InputError(
      "data of a store is kept in a folder, and neither HOME nor XDG_CACHE_HOME says where; name one with --data-cache");
}

std::shared_ptr<const RemoteTokens> open_remote(const RemoteData& remote, const DataCache& cache) {
  RemoteCacheOptions options;
  options.folder = cache_folder(cache.folder);
  options.disk_bytes = static_cast<std::int64_t>(cache.gib * (std::int64_t{1} << 30));
  return std::make_shared<const RemoteTokens>(open_store_from_environment(remote.store), remote.name, options);
}

TextDataOptions text_options(const RunConfig& config) {
  TextDataOptions options;
  options.sequence = config.model.sequence;
  options.validation_fraction = config.validation_fraction;
  options.seed = config.seed;
  options.respect_documents = config.respect_documents;
  options.documents = config.documents;
  options.batching = config.batching;
  options.bucket_batches = config.bucket_batches;
  options.pad_multiple = config.pad_multiple;
  return options;
}

void require_batching(const std::string& data, const RunConfig& config) {
  if (config.batching == Batching::stream) return;
  const std::string_view batching = name(config.batching);
  if (data == "synthetic") {
    throw InputError(
        fmt::format("batching = {} is about documents of text; synthetic data has none: leave it at stream", batching));
  }
  // Experts take tokens as they come, padding too, up to a capacity that grows with the length of a row.
  if (config.model.experts > 0) {
    throw InputError(fmt::format("batching = {} pads rows, and padding would take places of the {} experts: leave it at stream",
                                 batching, config.model.experts));
  }
}

}  // namespace

std::unique_ptr<BatchSource> open_data(const std::string& data, const RunConfig& config, DataCache& cache) {
  require_batching(data, config);
  std::unique_ptr<BatchSource> source;
  if (data == "synthetic") {
    SyntheticOptions options;
    options.vocabulary = config.model.vocabulary;
    options.branching = std::min(options.branching, options.vocabulary);
    options.sequence = config.model.sequence;
    options.seed = config.seed;
    source = std::make_unique<SyntheticCorpus>(options);
  } else {
    const TextDataOptions options = text_options(config);
    if (const std::optional<RemoteData> remote = parse_remote_data(data)) {
      cache.tokens = open_remote(*remote, cache);
      source = std::make_unique<TextSource>(cache.tokens, options);
    } else {
      source = open_text({data}, options);
    }
  }
  if (source->vocabulary() > config.model.vocabulary) {
    throw InputError(fmt::format("{} has token ids up to {}, the model has a vocabulary of {}; use --set vocabulary={}", data,
                                 source->vocabulary() - 1, config.model.vocabulary, source->vocabulary()));
  }
  return source;
}

std::shared_ptr<const TextTokenizer> open_tokenizer(const std::string& data, std::int64_t vocabulary, const std::string& which) {
  const auto open = [&]() -> std::shared_ptr<const TextTokenizer> {
    if (!which.empty()) return make_tokenizer(which, {});
    if (const std::optional<RemoteData> remote = parse_remote_data(data)) {
      return tokenizer_of(*open_store_from_environment(remote->store), remote->name);
    }
    if (std::filesystem::exists(manifest_path(prepared_prefix(data)))) return tokenizer_of(prepared_prefix(data));
    if (data == "synthetic") return bytes_tokenizer();
    const bool is_text = std::filesystem::is_regular_file(data) && !LlmcTokens::is_one(data);
    if (is_text || vocabulary <= bytes_tokenizer()->vocabulary()) return bytes_tokenizer();
    throw InputError(fmt::format(
        "the model was trained on {}, and {} is not there to say with which tokenizer; name it: --tokenizer bytes or FILE.model",
        data, manifest_path(prepared_prefix(data)).string()));
  };
  auto tokenizer = open();
  if (tokenizer->vocabulary() > vocabulary) {
    throw InputError(fmt::format("the tokenizer {} has {} tokens, the model {}: it was not trained on text of this tokenizer",
                                 tokenizer->name(), tokenizer->vocabulary(), vocabulary));
  }
  return tokenizer;
}

}  // namespace tandem
