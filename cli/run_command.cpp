// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <memory>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/job.h"
#include "cli/output.h"
#include "cli/run_options.h"
#include "cli/terminal.h"
#include "harness/chrome_trace.h"
#include "harness/junit.h"
#include "harness/registry.h"
#include "harness/result_file.h"
#include "harness/table.h"
#include "optimized/comm/nccl/nccl_world.h"
#include "optimized/machine.h"
#include "optimized/probe/probe.h"

namespace tandem {
namespace {

struct RunArguments {
  std::vector<std::string> patterns;
  bool quick = false, full = false, without_peak = false;
  int ranks = 0;
  RunOptions options;
  std::string out, junit, trace;
};

CaseList chosen_cases(const CommandLine& line, const RunArguments& arguments) {
  CaseList cases = select_cases(all_cases(line.suites), arguments.patterns, arguments.full ? Tier::full : Tier::quick);
  if (arguments.ranks == 0) return cases;
  std::erase_if(cases, [&](const Case& entry) { return entry.plan.parallel.world_size() != arguments.ranks; });
  if (cases.empty()) throw InputError(fmt::format("--ranks {}: none of the chosen cases has that many ranks", arguments.ranks));
  return cases;
}

int largest_rank_count(const CaseList& cases) {
  int ranks = 0;
  for (const Case& entry : cases) ranks = std::max(ranks, entry.plan.parallel.world_size());
  return ranks;
}

// What a reader must know before the numbers: fallbacks that the kernels took on this machine.
void print_machine(const RunContext& context, const Job& job) {
  const KernelsInfo info = machine_kernels({.backend = context.backend, .device = device_of(context.world.transport)});
  if (context.world != WorldSettings()) fmt::print("world: {}", context.world.describe());
  if (job.processes() > 1) fmt::print(", {} processes", job.processes());
  if (context.world != WorldSettings()) fmt::print("\n");
  if (context.world.transport != "threads" && job.processes() == 1)
    fmt::print("note: a job of one process; mpirun -n N starts more\n");
  if (context.world.transport == "nccl") fmt::print("note: {}\n", nccl_description());
  if (context.world.link) fmt::print("note: times are those of the shaped link, not of this machine\n");
  fmt::print("kernels: {}, {}, {}", info.backend, info.instruction_set, info.matrix_library);
  for (std::size_t i = 0; i < context.peak_flops_by_threads.size(); ++i) {
    fmt::print("{} {:.0f}", i == 0 ? "; fp32 matrix peak by threads, GFLOP/s:" : ",", context.peak_flops_by_threads[i] * 1e-9);
  }
  if (const std::optional<GpuPeaks>& peaks = context.gpu_peaks) {
    fmt::print("; matrix peak of a GPU, TFLOP/s: bf16 {:.0f}, fp32 {:.0f}", peaks->bf16_flops_per_second * 1e-12,
               peaks->fp32_flops_per_second * 1e-12);
  }
  fmt::print("\n");
  for (const std::string& note : info.notes) fmt::print("note: {}\n", note);
  std::fflush(stdout);
}

void keep(const CommandLine& line, const RunArguments& arguments, const RunContext& context, const CaseList& cases,
          const RunOutcome& outcome) {
  ResultFile file;
  const KernelsInfo info = machine_kernels({.backend = context.backend, .device = device_of(context.world.transport)});
  EnvironmentInputs inputs;
  inputs.libraries = line.libraries;
  inputs.libraries["matrix"] = info.matrix_library;
  inputs.libraries["instruction_set"] = info.instruction_set;
  if (context.world.transport == "nccl") inputs.libraries.emplace("nccl", nccl_description());
  if (context.backend == "cuda") inputs.gpus = node_inventory().gpus;
  inputs.ranks = largest_rank_count(cases);
  file.environment = collect_environment(context, inputs);
  file.interrupted = outcome.interrupted;
  file.cases = outcome.results;
  if (!arguments.out.empty()) {
    if (arguments.out == "-") {
      write_output("-", to_json(file));
    } else {
      write_result_file(arguments.out, file);
    }
  }
  if (!arguments.junit.empty()) write_junit(arguments.junit, outcome.results);
  if (arguments.trace.empty()) return;
  std::vector<TraceGroup> groups;
  for (const CaseResult& result : outcome.results) {
    if (!result.spans_by_rank.empty()) groups.push_back({result.name, result.spans_by_rank});
  }
  write_chrome_trace(arguments.trace, groups);
}

// Of the first process where there are several: they would measure each other.
void measure_peaks(const RunArguments& arguments, const Job& job, RunContext& context) {
  if (arguments.without_peak) return;
  if (context.backend == "cpu") {
    context.peak_flops_by_threads = job.of_leader(job.leads() ? matrix_peaks_by_threads() : std::vector<double>());
    return;
  }
  if (context.backend != "cuda") return;
  std::vector<double> peaks;
  if (job.leads()) {
    const GpuPeaks own = *measure_gpus(context.backend, context.world.transport);
    peaks = {own.fp32_flops_per_second, own.bf16_flops_per_second, static_cast<double>(own.gpus)};
  }
  peaks = job.of_leader(peaks);
  context.gpu_peaks = GpuPeaks{peaks[0], peaks[1], static_cast<int>(peaks[2])};
}

// What was done before a rank died or hung, saved where the run was to be saved.
void keep_broken(const CommandLine& line, const RunArguments& arguments, const RunContext& context, const CaseList& cases,
                 RunOutcome outcome, const std::exception& reason) {
  fmt::print(stderr, "tandem: {}\n", reason.what());
  outcome.interrupted = true;
  if (arguments.out.empty()) return;
  keep(line, arguments, context, cases, outcome);
  fmt::print(stderr, "tandem: {} of {} cases were done; those are in {}\n", outcome.results.size(), cases.size(), arguments.out);
}

int finish(const CommandLine& line, const RunArguments& arguments, const RunContext& context, const CaseList& cases,
           const RunOutcome& outcome) {
  if (arguments.out != "-") fmt::print("{}", render_table(outcome.results, output_style()));
  keep(line, arguments, context, cases, outcome);
  if (outcome.interrupted) {
    fmt::print(stderr, "tandem: interrupted after {} of {} cases{}\n", outcome.results.size(), cases.size(),
               arguments.out.empty() ? "" : "; those are in " + arguments.out);
    return kInterrupted;
  }
  return count(outcome.results).good() ? kGood : kCheckFailed;
}

int run_action(const CommandLine& line, const RunArguments& arguments) {
  if (arguments.quick && arguments.full) throw InputError("--quick and --full exclude each other");
  CaseList cases = chosen_cases(line, arguments);
  RunnerOptions options;
  options.context = to_context(arguments.options);
  const Job job(options.context.world);
  job.on_leader([&] {
    require_writable(arguments.out, "--out");
    require_writable(arguments.junit, "--junit");
    require_writable(arguments.trace, "--trace");
  });
  const bool over_processes = options.context.world.transport != "threads";
  if (over_processes) skip_what_does_not_fit(cases, job);
  measure_peaks(arguments, job, options.context);
  if (job.leads() && arguments.out != "-") print_machine(options.context, job);
  ProgressLine progress;
  std::atomic<bool> stop = false;
  options.interrupted = over_processes ? &stop : &line.stop;
  options.keep_spans = !arguments.trace.empty();
  RunOutcome done;
  if (over_processes) {
    options.agree = [&](CaseResult& result) {
      if (line.stop) stop = true;
      job.agree(result, stop);
      done.results.push_back(result);
    };
  }
  if (job.leads()) {
    options.on_progress = [&](const RunProgress& now) {
      progress.show(static_cast<std::int64_t>(now.index), static_cast<std::int64_t>(now.total), now.name);
    };
  }
  RunOutcome outcome;
  try {
    outcome = run_cases(cases, options);
  } catch (const Error& error) {
    progress.clear();
    if (!over_processes || !job.leads()) throw;
    keep_broken(line, arguments, options.context, cases, std::move(done), error);
    return kRunBroke;
  }
  progress.clear();
  const int status = job.leads() ? finish(line, arguments, options.context, cases, outcome) : kGood;
  return job.agree_on_status(status);
}

}  // namespace

void add_run_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("run", "Run suites: prove the pairs equal, measure what they cost and buy");
  const auto arguments = std::make_shared<RunArguments>();
  command->add_option("SUITE[/CASE]", arguments->patterns, "suites, cases or beginnings of case names; all without");
  command->add_flag("--quick", arguments->quick, "the quick cases (default)");
  command->add_flag("--full", arguments->full, "all cases");
  command->add_option("--ranks", arguments->ranks, "only cases with this many ranks")->check(at_least_one);
  add_run_options(*command, arguments->options);
  command->add_flag("--without-peak", arguments->without_peak,
                    "do not measure the machine's matrix peak first; shares of it are left out");
  command->add_option("--out", arguments->out, "write the result file (JSON, results/schema.json); - is standard output");
  command->add_option("--junit", arguments->junit, "write JUnit XML");
  command->add_option("--trace", arguments->trace, "write the timelines as Chrome trace JSON (opens in Perfetto)");
  command->footer("Example:\n  tandem run data_parallel/ranks2 --out build/result.json");
  command->callback([&line, arguments] { line.action = [&line, arguments] { return run_action(line, *arguments); }; });
}

}  // namespace tandem
