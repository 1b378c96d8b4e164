// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/terminal.h"
#include "core/error.h"
#include "core/usable_cores.h"
#include "harness/text_table.h"
#include "optimized/data_pipeline/prepare.h"

namespace tandem {
namespace {

struct DataArguments {
  std::vector<std::string> inputs;
  std::string tokenizer;
  std::string documents = "file";
  std::string prefix;
  std::string json;
  int threads = usable_cores();
};

std::string as_json(const DataSummary& summary) {
  const nlohmann::json json = {{"prefix", summary.prefix.string()},
                               {"tokenizer", summary.tokenizer},
                               {"document_rule", summary.document_rule},
                               {"vocabulary", summary.vocabulary},
                               {"dtype", std::string(name(summary.dtype))},
                               {"documents", summary.documents},
                               {"sequences", summary.sequences},
                               {"tokens", summary.tokens},
                               {"shortest_document_tokens", summary.shortest_document_tokens},
                               {"longest_document_tokens", summary.longest_document_tokens},
                               {"bin_bytes", summary.bin_bytes},
                               {"idx_bytes", summary.idx_bytes},
                               {"bin_xxh128", to_hex(summary.bin_hash)}};
  return json.dump(2) + "\n";
}

void print(const DataSummary& summary) {
  fmt::print("{}: {} tokens in {} document(s) of {} to {} tokens\n", summary.prefix.string(), summary.tokens, summary.documents,
             summary.shortest_document_tokens, summary.longest_document_tokens);
  fmt::print("tokenizer {}, vocabulary {}, stored as {}; .bin {}", summary.tokenizer, summary.vocabulary, name(summary.dtype),
             human_bytes(summary.bin_bytes));
  if (summary.idx_bytes > 0) fmt::print(", .idx {}", human_bytes(summary.idx_bytes));
  if (summary.has_model) fmt::print(", tokenizer's model {}.model", summary.prefix.string());
  fmt::print("\n");
}

/// The summary would take the place of the data that it is about.
void require_no_part(const std::string& json, const std::string& prefix) {
  const auto whole = [](const std::string& file) { return std::filesystem::weakly_canonical(std::filesystem::absolute(file)); };
  for (const char* const suffix : {".bin", ".idx", ".json", ".model"}) {
    if (json.empty() || whole(json) != whole(prefix + suffix)) continue;
    throw InputError(fmt::format("--json {}: a file of the prepared data has this name; name another", json));
  }
}

int finish(const DataSummary& summary, const std::string& json) {
  print(summary);
  if (!json.empty()) write_output(json, as_json(summary));
  return kGood;
}

/// Leaves prepare_data() between two chunks of text; the files that it has begun go with it.
struct Interrupted : std::exception {};

DataSummary prepare(const DataArguments& arguments, const std::atomic<bool>& stop) {
  ProgressLine line;
  PrepareOptions options;
  options.threads = arguments.threads;
  options.progress = [&](const PrepareProgress& progress) {
    if (stop) throw Interrupted();
    line.show(progress.text_bytes, progress.text_bytes_total, fmt::format("{} tokens", progress.tokens));
  };
  const std::vector<std::filesystem::path> inputs(arguments.inputs.begin(), arguments.inputs.end());
  return prepare_data(inputs, arguments.tokenizer, arguments.prefix, parse_document_rule(arguments.documents), options);
}

void add_prepare(CLI::App& parent, CommandLine& line) {
  auto* command = parent.add_subcommand("prepare", "Tokenize text into an indexed .bin/.idx pair, with all cores");
  const auto arguments = std::make_shared<DataArguments>();
  command->add_option("--input", arguments->inputs, "text files (UTF-8), or token files of llm.c (GPT-2)")->required();
  command->add_option("--tokenizer", arguments->tokenizer,
                      "bytes (default); bpe:N, N pieces trained on the input; FILE.model, of SentencePiece");
  command->add_option("--documents", arguments->documents, "what one document is: file, paragraph or line")
      ->capture_default_str();
  command->add_option("--out", arguments->prefix, "PREFIX of PREFIX.bin, PREFIX.idx, PREFIX.json and, with bpe, PREFIX.model")
      ->required();
  command->add_option("--threads", arguments->threads, "that tokenize; the result does not depend on it")
      ->capture_default_str()
      ->check(number_between(1, 1024));
  command->add_option("--json", arguments->json, "write the summary as JSON");
  command->footer("Example:\n  tandem data prepare --input README.md --tokenizer bytes --out build/readme");
  command->callback([&line, arguments] {
    line.action = [&line, arguments] {
      require_writable(arguments->json, "--json");
      require_writable_prefix(arguments->prefix, {".bin", ".idx", ".json", ".model"}, "--out");
      require_no_part(arguments->json, arguments->prefix);
      try {
        return finish(prepare(*arguments, line.stop), arguments->json);
      } catch (const Interrupted&) {
        fmt::print(stderr, "tandem: interrupted; nothing was written\n");
        return static_cast<int>(kInterrupted);
      }
    };
  });
}

void add_inspect(CLI::App& parent, CommandLine& line) {
  auto* command = parent.add_subcommand("inspect", "Check a prepared data set and say what it holds");
  const auto arguments = std::make_shared<DataArguments>();
  command->add_option("PREFIX", arguments->prefix, "of PREFIX.bin and PREFIX.idx, or a token file of llm.c")->required();
  command->add_option("--json", arguments->json, "write the summary as JSON");
  command->footer(
      "Example (after: tandem data prepare --input README.md --tokenizer bytes --out build/readme):\n  tandem data inspect "
      "build/readme");
  command->callback([&line, arguments] {
    line.action = [arguments] {
      // Nothing is written that would have to be put in order.
      std::signal(SIGINT, SIG_DFL);
      std::signal(SIGTERM, SIG_DFL);
      require_no_part(arguments->json, arguments->prefix);
      return finish(inspect_data(arguments->prefix), arguments->json);
    };
  });
}

}  // namespace

void add_data_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("data", "Prepare and inspect data sets");
  command->require_subcommand(1);
  add_prepare(*command, line);
  add_inspect(*command, line);
}

}  // namespace tandem
