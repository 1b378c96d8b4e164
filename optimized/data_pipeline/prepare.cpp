// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/prepare.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/indexed_dataset.h"
#include "optimized/data_pipeline/encode_chunks.h"
#include "optimized/data_pipeline/llmc_file.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/token_store.h"
#include "optimized/data_pipeline/tokenizer.h"

namespace tandem {
namespace {

constexpr const char* kEndOfTextRule = "end_of_text";

/// Writes encoded chunks as sequences and documents.
class SequenceWriter {
 public:
  SequenceWriter(const std::filesystem::path& prefix, DType dtype, std::int64_t sequence_tokens)
      : writer_(prefix, dtype), sequence_tokens_(sequence_tokens) {}

  void add(std::span<const std::byte> stored, std::span<const EncodedChunk::Piece> pieces) {
    hasher_.update(stored);
    const auto token_bytes = static_cast<std::int64_t>(size_bytes(writer_.dtype()));
    const auto append = [&](std::int64_t tokens) {
      const auto bytes = static_cast<std::size_t>(tokens * token_bytes);
      writer_.append_stored(stored.first(bytes));
      stored = stored.subspan(bytes);
    };
    for (const EncodedChunk::Piece& piece : pieces) {
      for (std::int64_t left = piece.tokens; left > 0;) {
        if (writer_.open_tokens() == sequence_tokens_) writer_.end_sequence();
        const std::int64_t part = std::min(left, sequence_tokens_ - writer_.open_tokens());
        append(part);
        left -= part;
      }
      if (!piece.ends_document) continue;
      append(1);
      writer_.end_sequence();
      writer_.end_document();
    }
  }

  [[nodiscard]] IndexedDatasetWriter& writer() noexcept { return writer_; }
  [[nodiscard]] Hash128 bin_hash() const { return hasher_.digest(); }

 private:
  IndexedDatasetWriter writer_;
  Hasher128 hasher_;
  std::int64_t sequence_tokens_;
};

std::int64_t total_bytes(const std::vector<std::filesystem::path>& inputs) {
  std::int64_t total = 0;
  for (const std::filesystem::path& input : inputs) {
    std::error_code ignored;  // what cannot be read is refused where it is read
    const auto bytes = std::filesystem::file_size(input, ignored);
    if (!ignored) total += static_cast<std::int64_t>(bytes);
  }
  return total;
}

void encode_all(const std::vector<std::filesystem::path>& inputs, DocumentRule rule, const TextTokenizer& tokenizer,
                const PrepareOptions& options, SequenceWriter& out) {
  const DType dtype = out.writer().dtype();
  PrepareProgress progress = {0, total_bytes(inputs), 0};
  ChunkEncoder encoder(
      options.threads, [&](const TextChunk& chunk) { return encode_chunk(chunk, tokenizer, dtype); },
      [&](EncodedChunk&& chunk) {
        out.add(chunk.tokens, chunk.pieces);
        progress.text_bytes += static_cast<std::int64_t>(chunk.text_bytes);
        progress.tokens = out.writer().num_tokens() + out.writer().open_tokens();
        if (options.progress) options.progress(progress);
      });
  try {
    for_each_chunk(inputs, rule, options.chunk_bytes, [&](TextChunk chunk) { encoder.submit(std::move(chunk)); });
  } catch (const InputError&) {
    // A file that cannot be read comes behind the texts before it.
    encoder.finish();
    throw;
  }
  encoder.finish();
}

bool has_model(const std::filesystem::path& prefix) {
  try {
    const std::optional<DataManifest> manifest = read_manifest(prefix);
    return manifest && manifest->model_hash;
  } catch (const InputError&) {
    return false;
  }
}

/// Makes everything durable, then shows it: at no moment does new data stand beside an old description.
void commit(SequenceWriter& out, const std::filesystem::path& prefix, DataManifest manifest, std::string_view model) {
  AtomicFile manifest_file(manifest_path(prefix));
  std::optional<AtomicFile> model_file;
  if (!model.empty()) {
    model_file.emplace(model_path(prefix));
    model_file->write(model);
    model_file->finish();
    manifest.model_hash = hash128(std::as_bytes(std::span(model)));
  }
  IndexedDatasetWriter& writer = out.writer();
  writer.finish();
  manifest.documents = writer.num_documents();
  manifest.tokens = writer.num_tokens();
  manifest.bin_hash = out.bin_hash();
  manifest.idx_hash = writer.idx_hash();
  manifest_file.write(to_json(manifest));
  manifest_file.finish();
  if (!model_file && has_model(prefix)) (void)::unlink(model_path(prefix).c_str());
  (void)::unlink(manifest_file.path().c_str());
  if (model_file) model_file->commit();
  writer.commit();
  manifest_file.commit();
}

/// What is written must have a name, and must not take the place of what is read.
void require_own_files(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& prefix) {
  const std::filesystem::path name = prefix.filename();
  if (name.empty() || name == "." || name == "..") {
    throw InputError(fmt::format("'{}' is no prefix for the names of files; name one, as in FOLDER/NAME", prefix.string()));
  }
  for (const std::filesystem::path& input : inputs) {
    for (const std::filesystem::path& output : {bin_path(prefix), idx_path(prefix), manifest_path(prefix), model_path(prefix)}) {
      std::error_code missing;
      if (!std::filesystem::equivalent(input, output, missing)) continue;
      throw InputError(fmt::format("{} is an input, and would be overwritten; choose another prefix", output.string()));
    }
  }
}

/// True for token files of llm.c, false for text.
bool are_llmc(const std::vector<std::filesystem::path>& inputs, std::string_view tokenizer) {
  const auto other = std::find_if_not(inputs.begin(), inputs.end(), &LlmcTokens::is_one);
  if (other != inputs.end()) {
    if (std::none_of(inputs.begin(), inputs.end(), &LlmcTokens::is_one)) return false;
    throw InputError(fmt::format("{} is no token file of llm.c, another input is; prepare them one by one", other->string()));
  }
  if (!inputs.empty() && !tokenizer.empty() && tokenizer != LlmcTokens::kTokenizer) {
    throw InputError(fmt::format("{} holds tokens of {} already, tokenizer '{}' cannot be used; leave --tokenizer out",
                                 inputs.front().string(), LlmcTokens::kTokenizer, tokenizer));
  }
  return !inputs.empty();
}

void prepare_llmc(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& prefix,
                  const PrepareOptions& options) {
  SequenceWriter out(prefix, DType::u16, options.sequence_tokens);
  for (const std::filesystem::path& input : inputs) {
    const LlmcTokens tokens(input);
    for (std::int64_t d = 0; d < tokens.num_documents(); ++d) {
      const std::int64_t begin = tokens.document_begin(d);
      const std::int64_t count = tokens.document_begin(d + 1) - begin;
      const EncodedChunk::Piece piece = {count - 1, true};  // its last token takes the place of the end
      out.add(tokens.stored().subspan(static_cast<std::size_t>(begin) * 2, static_cast<std::size_t>(count) * 2), {&piece, 1});
    }
  }
  if (out.writer().num_documents() == 0) throw InputError(fmt::format("{} has no tokens", inputs.front().string()));
  commit(out, prefix, {LlmcTokens::kTokenizer, LlmcTokens::kVocabulary, LlmcTokens::kEndOfText, kEndOfTextRule, 0, 0, {}}, {});
}

void check_against(const DataManifest& manifest, const DataSummary& summary, std::int32_t largest) {
  const std::string bin = bin_path(summary.prefix).string();
  if (manifest.documents != summary.documents || manifest.tokens != summary.tokens) {
    throw InputError(fmt::format("{} describes {} documents and {} tokens, the index {} and {}; prepare the data again",
                                 manifest_path(summary.prefix).string(), manifest.documents, manifest.tokens, summary.documents,
                                 summary.tokens));
  }
  if (manifest.bin_hash != summary.bin_hash) {
    throw InputError(fmt::format("{} was altered: its hash is {}, {} when it was prepared; prepare the data again", bin,
                                 to_hex(summary.bin_hash), to_hex(manifest.bin_hash)));
  }
  if (largest >= manifest.vocabulary) {
    throw InputError(fmt::format("{} has token {}, the vocabulary is {}", bin, largest, manifest.vocabulary));
  }
}

void check_model(const std::filesystem::path& prefix, const DataManifest& manifest) {
  if (!manifest.model_hash) return;
  const std::filesystem::path file = model_path(prefix);
  const std::string model = read_text_file(file);
  if (hash128(std::as_bytes(std::span(model))) != *manifest.model_hash) {
    throw InputError(fmt::format("{} was altered or is of other data; prepare the data again", file.string()));
  }
}

template <class Tokens>
void describe_documents(const Tokens& tokens, DataSummary& summary) {
  summary.documents = tokens.num_documents();
  summary.tokens = tokens.num_tokens();
  for (std::int64_t d = 0; d < summary.documents; ++d) {
    const std::int64_t length = tokens.document_begin(d + 1) - tokens.document_begin(d);
    summary.shortest_document_tokens = d == 0 ? length : std::min(summary.shortest_document_tokens, length);
    summary.longest_document_tokens = std::max(summary.longest_document_tokens, length);
  }
}

DataSummary inspect_llmc(const std::filesystem::path& file) {
  const LlmcTokens tokens(file);
  DataSummary summary;
  summary.prefix = file;
  summary.dtype = DType::u16;
  summary.tokenizer = LlmcTokens::kTokenizer;
  summary.document_rule = kEndOfTextRule;
  summary.vocabulary = LlmcTokens::kVocabulary;
  describe_documents(tokens, summary);
  summary.sequences = summary.documents;
  summary.bin_bytes = static_cast<std::int64_t>(std::filesystem::file_size(file));
  summary.bin_hash = hash128(tokens.stored());
  return summary;
}

DataSummary inspect_prepared(const std::filesystem::path& prefix) {
  const IndexedDataset dataset(prefix);
  dataset.check();
  DataSummary summary;
  summary.prefix = prefix;
  summary.dtype = dataset.dtype();
  summary.sequences = dataset.num_sequences();
  summary.bin_bytes = static_cast<std::int64_t>(dataset.bin_bytes().size());
  summary.idx_bytes = static_cast<std::int64_t>(std::filesystem::file_size(idx_path(prefix)));
  summary.bin_hash = hash128(dataset.bin_bytes());
  describe_documents(dataset, summary);
  const std::int32_t largest = largest_token(dataset);
  const std::optional<DataManifest> manifest = read_manifest(prefix);
  if (manifest) {
    check_against(*manifest, summary, largest);
    check_model(prefix, *manifest);
    summary.has_model = manifest->model_hash.has_value();
  }
  summary.tokenizer = manifest ? manifest->tokenizer : "unknown";
  summary.document_rule = manifest ? manifest->document_rule : "unknown";
  summary.vocabulary = manifest ? manifest->vocabulary : std::int64_t{largest} + 1;
  return summary;
}

}  // namespace

DataSummary prepare_data(const std::vector<std::filesystem::path>& inputs, std::string_view tokenizer_name,
                         const std::filesystem::path& prefix, DocumentRule rule, const PrepareOptions& options) {
  require_own_files(inputs, prefix);
  if (are_llmc(inputs, tokenizer_name)) {
    prepare_llmc(inputs, prefix, options);
    return inspect_data(prefix);
  }
  const auto tokenizer = make_tokenizer(tokenizer_name.empty() ? "bytes" : tokenizer_name, inputs);
  SequenceWriter out(prefix, token_dtype(tokenizer->vocabulary()), options.sequence_tokens);
  encode_all(inputs, rule, *tokenizer, options, out);
  commit(out, prefix,
         {tokenizer->name(), tokenizer->vocabulary(), tokenizer->end_of_document(), std::string(name(rule)), 0, 0, {}},
         tokenizer->model());
  return inspect_data(prefix);
}

DataSummary inspect_data(const std::filesystem::path& prefix) {
  if (LlmcTokens::is_one(prefix)) return inspect_llmc(prefix);
  return inspect_prepared(std::filesystem::exists(idx_path(prefix)) ? prefix : prepared_prefix(prefix));
}

}  // namespace tandem
