// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/prepare.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <span>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/indexed_dataset.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/token_store.h"

namespace tandem {
namespace {

// The format has 31 bits for the length of a sequence: a longer document becomes several sequences.
constexpr std::size_t kSequenceBytes = std::size_t{1} << 30;

void add_document(IndexedDatasetWriter& writer, Hasher128& hasher, std::string_view document) {
  constexpr std::array kEnd = {static_cast<std::uint8_t>(kEndOfDocument)};
  const auto append = [&](std::span<const std::uint8_t> tokens) {
    writer.append(tokens);
    hasher.update(std::as_bytes(tokens));
  };
  while (document.size() > kSequenceBytes) {
    append({reinterpret_cast<const std::uint8_t*>(document.data()), kSequenceBytes});
    writer.end_sequence();
    document.remove_prefix(kSequenceBytes);
  }
  append({reinterpret_cast<const std::uint8_t*>(document.data()), document.size()});
  append(kEnd);
  writer.end_sequence();
  writer.end_document();
}

void describe_documents(const IndexedDataset& dataset, DataSummary& summary) {
  for (std::int64_t d = 0; d < dataset.num_documents(); ++d) {
    const std::int64_t tokens = dataset.document_begin(d + 1) - dataset.document_begin(d);
    summary.shortest_document_tokens = d == 0 ? tokens : std::min(summary.shortest_document_tokens, tokens);
    summary.longest_document_tokens = std::max(summary.longest_document_tokens, tokens);
  }
}

void check_against(const DataManifest& manifest, const DataSummary& summary, std::int32_t largest) {
  const std::string bin = bin_path(summary.prefix).string();
  if (manifest.documents != summary.documents || manifest.tokens != summary.tokens) {
    throw InputError(fmt::format("{} describes {} documents and {} tokens, the index {} and {}; prepare the data again",
                                 manifest_path(summary.prefix).string(), manifest.documents, manifest.tokens, summary.documents,
                                 summary.tokens));
  }
  if (manifest.bin_hash != summary.bin_hash) {
    throw InputError(fmt::format("{} was altered: its hash is {}, {} when it was prepared", bin, to_hex(summary.bin_hash),
                                 to_hex(manifest.bin_hash)));
  }
  if (largest >= manifest.vocabulary) {
    throw InputError(fmt::format("{} has token {}, the vocabulary is {}", bin, largest, manifest.vocabulary));
  }
}

}  // namespace

DataSummary prepare_data(const std::vector<std::filesystem::path>& inputs, std::string_view tokenizer_name,
                         const std::filesystem::path& prefix, DocumentRule rule) {
  const Tokenizer tokenizer = find_tokenizer(tokenizer_name);
  IndexedDatasetWriter writer(prefix, DType::u8);
  AtomicFile manifest_file(manifest_path(prefix));
  Hasher128 hasher;
  for_each_document(inputs, rule, [&](std::string_view document) { add_document(writer, hasher, document); });
  const DataManifest manifest = {tokenizer.name,          tokenizer.vocabulary,   tokenizer.end_of_document,
                                 std::string(name(rule)), writer.num_documents(), writer.num_tokens(),
                                 hasher.digest()};
  manifest_file.write(to_json(manifest));
  manifest_file.finish();
  writer.finish();
  // An old description beside new data would be wrong; missing, it is only less.
  (void)::unlink(manifest_file.path().c_str());
  writer.commit();
  manifest_file.commit();
  return inspect_data(prefix);
}

DataSummary inspect_data(const std::filesystem::path& prefix) {
  const IndexedDataset dataset(prefix);
  DataSummary summary;
  summary.prefix = prefix;
  summary.dtype = dataset.dtype();
  summary.documents = dataset.num_documents();
  summary.sequences = dataset.num_sequences();
  summary.tokens = dataset.num_tokens();
  summary.bin_bytes = static_cast<std::int64_t>(dataset.bin_bytes().size());
  summary.idx_bytes = static_cast<std::int64_t>(std::filesystem::file_size(idx_path(prefix)));
  summary.bin_hash = hash128(dataset.bin_bytes());
  describe_documents(dataset, summary);
  const std::int32_t largest = largest_token(dataset);
  const std::optional<DataManifest> manifest = read_manifest(prefix);
  if (manifest) check_against(*manifest, summary, largest);
  summary.tokenizer = manifest ? manifest->tokenizer : "unknown";
  summary.document_rule = manifest ? manifest->document_rule : "unknown";
  summary.vocabulary = manifest ? manifest->vocabulary : std::int64_t{largest} + 1;
  return summary;
}

}  // namespace tandem
