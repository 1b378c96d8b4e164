// SPDX-License-Identifier: Apache-2.0
// Where tokens are kept must not matter: prepared files, subwords, a token file of llm.c, a store behind its caches.
#include <fstream>

#include <fmt/format.h>

#include "core/rng.h"
#include "optimized/data_pipeline/llmc_file.h"
#include "optimized/data_pipeline/prepare.h"
#include "optimized/data_pipeline/remote_tokens.h"
#include "optimized/data_pipeline/tokenizer.h"
#include "optimized/storage/folder_store.h"
#include "suites/data_pipeline_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> made_up_lines(std::uint64_t seed, int lines) {
  static const std::vector<std::string> kWords = {"to be", "or not", "über", "東京", "x", "a longer run of words"};
  CounterRng rng(seed, "suite/lines");
  std::vector<std::string> result;
  for (int i = 0; i < lines; ++i) {
    std::string line = "l";
    for (std::uint64_t words = rng.next_below(9); words > 0; --words) line += " " + kWords[rng.next_below(kWords.size())];
    result.push_back(std::move(line));
  }
  return result;
}

fs::path write_lines(const fs::path& file, const std::vector<std::string>& lines) {
  std::ofstream out(file, std::ios::binary);
  for (const std::string& line : lines) out << line << '\n';
  return file;
}

std::vector<std::int32_t> read_all(const TokenStore& store) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(store.num_tokens()));
  store.read(0, tokens);
  return tokens;
}

std::string bytes_of_file(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Documents whose tokens, decoded, are not the line they were made of, or that do not end with the token for it.
double documents_that_differ(const TokenStore& store, const TextTokenizer& tokenizer, const std::vector<std::string>& lines) {
  if (store.num_documents() != std::ssize(lines)) return static_cast<double>(lines.size());
  double differ = 0;
  for (std::int64_t i = 0; i < store.num_documents(); ++i) {
    const std::int64_t begin = store.document_begin(i);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(store.document_begin(i + 1) - begin));
    store.read(begin, tokens);
    const bool ends = !tokens.empty() && tokens.back() == tokenizer.end_of_document();
    if (ends) tokens.pop_back();
    differ += ends && tokenizer.decode(tokens) == lines[static_cast<std::size_t>(i)] ? 0 : 1;
  }
  return differ;
}

Case prepared_case(const std::string& tokenizer) {
  Case result = data_pipeline_case("prepared/" + tokenizer.substr(0, tokenizer.find(':')),
                                   "prepared text gives its lines back, by whatever threads and pieces it was encoded");
  result.unavailable = [tokenizer](const RunContext&) -> std::optional<std::string> {
    if (tokenizer == "bytes") return std::nullopt;
    try {
      const ScratchFolder scratch("data-pipeline-bpe");
      static_cast<void>(make_tokenizer(tokenizer, {write_lines(scratch.path() / "text", made_up_lines(1, 200))}));
    } catch (const std::exception& error) {
      return error.what();
    }
    return std::nullopt;
  };
  result.execute = [tokenizer](const RunContext& context) {
    const ScratchFolder scratch("data-pipeline-prepared");
    const std::vector<std::string> lines = made_up_lines(context.seed, 400);
    const std::vector<fs::path> files = {write_lines(scratch.path() / "a", {lines.begin(), lines.begin() + 150}),
                                         write_lines(scratch.path() / "b", {lines.begin() + 150, lines.end()})};
    const fs::path prefix = scratch.path() / "one", other = scratch.path() / "three";
    const DataSummary summary = prepare_data(files, tokenizer, prefix, DocumentRule::line);
    prepare_data(files, tokenizer, other, DocumentRule::line, {.threads = 3, .chunk_bytes = 700});
    const PreparedTokens store(prefix);
    double unequal = 0;
    for (const char* ending : {".bin", ".idx"}) {
      unequal += bytes_of_file(prefix.string() + ending) == bytes_of_file(other.string() + ending) ? 0 : 1;
    }
    return of_properties(
        {exactly("documents_that_differ", documents_that_differ(store, *tokenizer_of(prefix), lines), 0,
                 "decoded by the tokenizer that is kept beside them"),
         exactly("documents", static_cast<double>(summary.documents), static_cast<double>(lines.size()), "one of each line"),
         exactly("tokens_counted_wrongly", static_cast<double>(inspect_data(prefix).tokens - store.num_tokens()), 0, "as read"),
         exactly("files_that_differ", unequal, 0, "one thread, or three that are given other pieces"),
         exactly("files_left_behind", static_cast<double>(fs::exists(other.string() + ".bin.tmp")), 0, "all have their names")});
  };
  return result;
}

// Header and tokens as llm.c's scripts write them.
fs::path write_llmc(const fs::path& file, const std::vector<std::uint16_t>& tokens) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = static_cast<std::int32_t>(tokens.size());
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(header.data()), 1024);
  out.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
  return file;
}

Case llmc_case() {
  Case result = data_pipeline_case("llmc", "a token file of llm.c, as it is and prepared: its tokens, its documents");
  result.execute = [](const RunContext& context) {
    constexpr std::uint16_t kEnd = 50256;
    const ScratchFolder scratch("data-pipeline-llmc");
    CounterRng rng(context.seed, "suite/llmc");
    std::vector<std::uint16_t> tokens;
    std::vector<std::int64_t> begins;
    for (int document = 0; document < 60; ++document) {
      begins.push_back(std::ssize(tokens));
      tokens.push_back(kEnd);
      for (std::uint64_t left = rng.next_below(12); left > 0; --left) {
        tokens.push_back(static_cast<std::uint16_t>(rng.next_below(kEnd)));
      }
    }
    const fs::path file = write_llmc(scratch.path() / "tokens.bin", tokens);
    prepare_data({file}, "", scratch.path() / "prepared");
    double tokens_differ = 0, begins_differ = 0;
    for (const auto& store : {open_stored_tokens(file), open_stored_tokens(scratch.path() / "prepared")}) {
      const std::vector<std::int32_t> found = read_all(*store);
      tokens_differ += std::equal(found.begin(), found.end(), tokens.begin(), tokens.end()) ? 0 : 1;
      begins_differ += store->num_documents() == std::ssize(begins) ? 0 : 1;
      for (std::int64_t i = 0; i < std::min(store->num_documents(), std::ssize(begins)); ++i) {
        begins_differ += store->document_begin(i) == begins[static_cast<std::size_t>(i)] ? 0 : 1;
      }
    }
    return of_properties({exactly("stores_whose_tokens_differ", tokens_differ, 0, "those that were written"),
                          exactly("documents_that_begin_elsewhere", begins_differ, 0, "one begins at each token 50256")});
  };
  return result;
}

// Caches that hold a small part, read in order, backwards and at random, and once more by a process that finds the folder.
Case remote_case() {
  Case result = data_pipeline_case("store", "tokens in a store, behind caches that hold a part of them: those of the files");
  result.execute = [](const RunContext& context) {
    const ScratchFolder scratch("data-pipeline-store");
    const fs::path prefix = scratch.path() / "store" / "tokens";
    fs::create_directory(prefix.parent_path());
    const fs::path text = write_lines(scratch.path() / "text", made_up_lines(context.seed, 900));
    prepare_data({text}, "bytes", prefix, DocumentRule::line);
    const PreparedTokens local(prefix);
    const std::vector<std::int32_t> tokens = read_all(local);
    RemoteCacheOptions options{.folder = scratch.path() / "cache", .disk_bytes = 1 << 20, .blocks = {}};
    options.blocks = {.block_bytes = 1024, .memory_bytes = 8 * 1024, .read_ahead_blocks = 2};
    CounterRng rng(context.seed, "suite/store");
    double differ = 0, fetched_again = 0, read_from_disk = 0;
    std::vector<std::int32_t> part(700);
    const std::int64_t last = local.num_tokens() - std::ssize(part);
    for (int life = 0; life < 2; ++life) {
      const RemoteTokens remote(std::make_shared<FolderStore>(prefix.parent_path()), "tokens", options);
      for (int i = 0; i < 150; ++i) {
        const std::int64_t along = std::min<std::int64_t>(last, i * last / 49);
        const std::int64_t at = i < 50    ? along
                                : i < 100 ? std::max<std::int64_t>(0, last - (i - 50) * last / 49)
                                          : static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(last)));
        remote.read(at, part);
        differ += std::equal(part.begin(), part.end(), tokens.begin() + at) ? 0 : 1;
      }
      differ += remote.identity() == local.identity() && remote.num_documents() == local.num_documents() ? 0 : 1;
      if (life == 0) continue;
      fetched_again = static_cast<double>(remote.cache_counts().fetches);
      read_from_disk = static_cast<double>(remote.cache_counts().disk.hits);
    }
    return of_properties(
        {exactly("reads_that_differ", differ, 0, "a cache changes when tokens come, not which"),
         exactly("fetched_by_the_second_run", fetched_again, 0, "the folder holds every block of the first"),
         {"blocks_found_in_the_folder", read_from_disk, Relation::at_least, 8, "all of them, since memory holds eight", -1, ""}});
  };
  return result;
}

}  // namespace

void add_data_pipeline_stored_cases(CaseList& cases) {
  cases.push_back(prepared_case("bytes"));
  cases.push_back(prepared_case("bpe:300"));
  cases.push_back(llmc_case());
  cases.push_back(remote_case());
}

}  // namespace tandem
