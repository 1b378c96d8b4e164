// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/output.h"
#include "harness/text_table.h"
#include "optimized/data_pipeline/prepare.h"

namespace tandem {
namespace {

struct DataArguments {
  std::vector<std::string> inputs;
  std::string tokenizer = "bytes";
  std::string documents = "file";
  std::string prefix;
  std::string json;
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
  fmt::print("tokenizer {}, vocabulary {}, stored as {}; .bin {}, .idx {}\n", summary.tokenizer, summary.vocabulary,
             name(summary.dtype), human_bytes(summary.bin_bytes), human_bytes(summary.idx_bytes));
}

int finish(const DataSummary& summary, const std::string& json) {
  print(summary);
  if (!json.empty()) write_output(json, as_json(summary));
  return kGood;
}

void add_prepare(CLI::App& parent, CommandLine& line) {
  auto* command = parent.add_subcommand("prepare", "Tokenize text files into an indexed .bin/.idx pair");
  const auto arguments = std::make_shared<DataArguments>();
  command->add_option("--input", arguments->inputs, "text files (UTF-8)")->required();
  command->add_option("--tokenizer", arguments->tokenizer, "bytes")->capture_default_str();
  command->add_option("--documents", arguments->documents, "what one document is: file, paragraph or line")
      ->capture_default_str();
  command->add_option("--out", arguments->prefix, "PREFIX of PREFIX.bin, PREFIX.idx and PREFIX.json")->required();
  command->add_option("--json", arguments->json, "write the summary as JSON");
  command->footer("Example:\n  tandem data prepare --input README.md --tokenizer bytes --out build/readme");
  command->callback([&line, arguments] {
    line.action = [arguments] {
      const std::vector<std::filesystem::path> inputs(arguments->inputs.begin(), arguments->inputs.end());
      require_writable(arguments->json, "--json");
      return finish(prepare_data(inputs, arguments->tokenizer, arguments->prefix, parse_document_rule(arguments->documents)),
                    arguments->json);
    };
  });
}

void add_inspect(CLI::App& parent, CommandLine& line) {
  auto* command = parent.add_subcommand("inspect", "Check a prepared data set and say what it holds");
  const auto arguments = std::make_shared<DataArguments>();
  command->add_option("PREFIX", arguments->prefix, "of PREFIX.bin and PREFIX.idx")->required();
  command->add_option("--json", arguments->json, "write the summary as JSON");
  command->footer(
      "Example (after: tandem data prepare --input README.md --tokenizer bytes --out build/readme):\n  tandem data inspect "
      "build/readme");
  command->callback(
      [&line, arguments] { line.action = [arguments] { return finish(inspect_data(arguments->prefix), arguments->json); }; });
}

}  // namespace

void add_data_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("data", "Prepare and inspect data sets");
  command->require_subcommand(1);
  add_prepare(*command, line);
  add_inspect(*command, line);
}

}  // namespace tandem
