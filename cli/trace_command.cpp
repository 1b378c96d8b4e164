// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <memory>
#include <system_error>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/terminal.h"
#include "suites/trace.h"

namespace tandem {
namespace {

struct CompareTraces {
  std::vector<std::string> traces;
  std::string against = "auto";
  std::string json;
  std::size_t most_rows = 12;
};

struct MergeTraces {
  std::vector<std::string> traces;
  std::string out;
};

struct ReferenceTrace {
  std::string trace, out;
};

TraceProgress shown_on(ProgressLine& line) {
  return [&line](std::int64_t done, std::int64_t total, const std::string& what) { line.show(done, total, what); };
}

std::vector<TraceComparison> comparisons_of(const CompareTraces& arguments) {
  ProgressLine progress;
  std::vector<TraceComparison> comparisons;
  const bool with_reference = arguments.against == "reference" || arguments.traces.size() == 1;
  if (!with_reference) {
    const TraceReader a = open_trace(arguments.traces[0]);
    const TraceReader b = open_trace(arguments.traces[1]);
    TraceComparison comparison = compare_two_traces(a, b, shown_on(progress));
    const bool a_is_truth = a.header().is_reference && !b.header().is_reference;
    comparison.candidate = arguments.traces[a_is_truth ? 1 : 0];
    comparison.truth = arguments.traces[a_is_truth ? 0 : 1];
    comparisons.push_back(std::move(comparison));
    return comparisons;
  }
  for (const std::string& path : arguments.traces) {
    comparisons.push_back(compare_with_own_reference(open_trace(path), shown_on(progress)));
    comparisons.back().candidate = path;
    comparisons.back().truth = "the reference on its weights and batch";
  }
  return comparisons;
}

int compare_action(const CompareTraces& arguments) {
  require_writable(arguments.json, "--json");
  bool good = true;
  const std::vector<TraceComparison> comparisons = comparisons_of(arguments);
  for (const TraceComparison& comparison : comparisons) {
    if (arguments.json != "-") fmt::print("{}", render(comparison, output_style(), arguments.most_rows));
    good = good && comparison.agrees();
  }
  if (!arguments.json.empty()) write_output(arguments.json, to_json(comparisons));
  return good ? kGood : kCheckFailed;
}

// What is written takes the place of what is in the folder: never of what is read.
void require_other_folder(const std::string& out, const std::vector<std::string>& traces) {
  for (const std::string& trace : traces) {
    std::error_code error;
    if (std::filesystem::equivalent(out, trace, error)) {
      throw InputError(fmt::format("--out {}: that is the trace itself, which would be lost; name another folder", out));
    }
  }
}

int merge_action(const MergeTraces& arguments) {
  require_other_folder(arguments.out, arguments.traces);
  require_writable_folder(arguments.out, "--out");
  const std::vector<std::filesystem::path> folders(arguments.traces.begin(), arguments.traces.end());
  const auto merge = [&](const TraceReader& trace) {
    for (const std::string& note : write_merged_trace(trace, arguments.out)) fmt::print("{}\n", note);
    fmt::print("{}: {} entries of {} ranks, joined\n", arguments.out, trace.entries().size(), trace.header().ranks);
  };
  if (folders.size() == 1) {
    merge(open_trace(folders.front()));
  } else {
    merge(TraceReader(folders));
  }
  return kGood;
}

int reference_action(const ReferenceTrace& arguments) {
  require_other_folder(arguments.out, {arguments.trace});
  require_writable_folder(arguments.out, "--out");
  {
    ProgressLine progress;
    write_reference_trace(open_trace(arguments.trace), arguments.out, shown_on(progress));
  }
  fmt::print("{}: the reference's trace of the step in {}\n", arguments.out, arguments.trace);
  return kGood;
}

void add_compare(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("compare", "The first tensor that a run computed wrongly; exit 1: there is one");
  const auto arguments = std::make_shared<CompareTraces>();
  command
      ->add_option("TRACE", arguments->traces, "one trace: against the reference on its own weights and batch; two: A against B")
      ->required()
      ->expected(1, 2);
  command->add_option("--against", arguments->against, "reference: judge each trace by the reference, not by the other one")
      ->check(CLI::IsMember({"auto", "reference"}))
      ->capture_default_str();
  command->add_option("--rows", arguments->most_rows, "lines of the table")->capture_default_str()->check(whole_number);
  command->add_option("--json", arguments->json, "write every tensor's verdict as JSON; - is standard output");
  command->footer(
      "Example (after: python3 harness/interop/record_torch_trace.py --out build/trace):\n  tandem trace compare build/trace");
  command->callback([&line, arguments] { line.action = [arguments] { return compare_action(*arguments); }; });
}

void add_merge(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("merge", "Join the traces of sharded ranks into one with whole tensors");
  const auto arguments = std::make_shared<MergeTraces>();
  command->add_option("TRACE", arguments->traces, "traces of the ranks, or one folder that holds them")->required();
  command->add_option("--out", arguments->out, "folder of the joined trace")->required();
  command->footer(
      "Example (of ranks that wrote build/ranks/0 and build/ranks/1):\n  tandem trace merge build/ranks/0 build/ranks/1 --out "
      "build/joined");
  command->callback([&line, arguments] { line.action = [arguments] { return merge_action(*arguments); }; });
}

void add_reference(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("reference", "Make the reference's trace for the weights and batch of a trace");
  const auto arguments = std::make_shared<ReferenceTrace>();
  command->add_option("TRACE", arguments->trace, "a trace with weights and batch")->required();
  command->add_option("--out", arguments->out, "folder of the reference's trace")->required();
  command->footer(
      "Example (after: python3 harness/interop/record_torch_trace.py --out build/trace):\n"
      "  tandem trace reference build/trace --out build/trace_reference");
  command->callback([&line, arguments] { line.action = [arguments] { return reference_action(*arguments); }; });
}

}  // namespace

void add_trace_command(CommandLine& line) {
  auto* command =
      line.app.add_subcommand("trace", "Find where a run, ours or another framework's, goes wrong (docs/trace_format.md)");
  command->require_subcommand(1);
  add_compare(line, *command);
  add_merge(line, *command);
  add_reference(line, *command);
  command->footer(
      "Example (record a small random GPT-2 with PyTorch, then judge it):\n"
      "  python3 harness/interop/record_torch_trace.py --out build/trace\n"
      "  tandem trace compare build/trace\n"
      "  tandem trace reference build/trace --out build/trace_reference\n"
      "  tandem trace compare build/trace build/trace_reference --json build/trace_verdict.json\n"
      "Ranks that wrote build/ranks/0, build/ranks/1, ...:\n"
      "  tandem trace compare build/ranks\n"
      "  tandem trace merge build/ranks/0 build/ranks/1 --out build/joined");
}

}  // namespace tandem
