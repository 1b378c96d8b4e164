// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/run_options.h"
#include "cli/terminal.h"
#include "core/error.h"
#include "harness/result_file.h"
#include "optimized/machine.h"
#include "suites/composition_checks.h"
#include "suites/composition_draw.h"
#include "suites/composition_minimise.h"

namespace tandem {
namespace {

// So many legal draws show what legal compositions can have; they take half a second.
constexpr std::int64_t kDrawsOfCoverage = 20000;
constexpr std::size_t kMissingShown = 8;

struct ComposeArguments {
  std::int64_t plans = 40;
  std::uint64_t seed = 1;
  std::optional<std::int64_t> only;
  std::string plan;
  std::vector<std::string> settings;
  bool minimise = true;
  bool list = false;
  std::string backend = "cpu";
  std::string out, save_failing;
};

struct Named {
  std::string name;  ///< "seed1/12"
  Composition composition;
};

// What a run of compositions has found so far.
struct Composed {
  std::vector<CaseResult> results;
  std::map<std::string, int> judged;  // checks, by name
  std::int64_t plans = 0, failed = 0;
};

// The composition that --plan and --set describe.
Named described(const ComposeArguments& arguments) {
  Named named{"plan", simplest_composition()};
  if (!arguments.plan.empty()) {
    named.composition = read_composition(arguments.plan);
    named.name = std::filesystem::path(arguments.plan).stem().string();
  }
  for (const std::string& setting : arguments.settings) set_option(named.composition, setting);
  if (const auto reason = refusal(named.composition)) throw InputError(*reason);
  if (const auto reason = undecidable(named.composition))
    throw InputError(fmt::format("nothing could be concluded from this composition: {}; another seed may do", *reason));
  return named;
}

std::string command_of(const Composition& composition) {
  const std::string settings = to_settings(composition);
  return settings.empty() ? "tandem compose --set tensor=1" : "tandem compose " + settings;
}

void save(const ComposeArguments& arguments, std::string name, const std::string& suffix, const Composition& composition) {
  if (arguments.save_failing.empty()) return;
  std::ranges::replace(name, '/', '-');
  const std::string file = (std::filesystem::path(arguments.save_failing) / (name + suffix + ".json")).string();
  write_output(file, to_json(composition));
  fmt::print("  {}\n", file);
}

void report_failure(const ComposeArguments& arguments, const RunnerOptions& options, const Named& named,
                    const CompositionFailure& failure, const std::atomic<bool>& stop) {
  fmt::print("FAIL {} {}: {}\n  {}\n", named.name, failure.check, failure.reason, command_of(named.composition));
  save(arguments, named.name, "", named.composition);
  if (!arguments.minimise) return;
  const auto fails_alike = [&](const Composition& smaller) {
    if (stop) return false;
    const auto found = first_failure(smaller, named.name, options, failure.check);
    return found && found->same_as(failure);
  };
  const Minimised least = minimise(named.composition, fails_alike);
  const auto reason = first_failure(least.composition, named.name, options, failure.check);
  fmt::print("  smallest plan that fails alike ({} tried{}): {}\n  {}\n", least.tried, least.complete ? "" : ", not complete",
             reason ? reason->reason : "it did not fail again", command_of(least.composition));
  save(arguments, named.name, ".minimal", least.composition);
  std::fflush(stdout);
}

void judge_one(const ComposeArguments& arguments, const RunnerOptions& options, const Named& named, ProgressLine& progress,
               const std::atomic<bool>& stop, Composed& composed) {
  const std::size_t before = composed.results.size();
  const auto failure = first_failure(named.composition, named.name, options, "", &composed.results);
  for (std::size_t i = before; i < composed.results.size(); ++i) ++composed.judged[check_of(composed.results[i].name)];
  ++composed.plans;
  if (!failure) return;
  ++composed.failed;
  progress.clear();
  report_failure(arguments, options, named, *failure, stop);
}

void print_coverage(const CompositionCoverage& covered, const DrawCounts& counts) {
  const CompositionCoverage all = reachable_pairs(kDrawsOfCoverage);
  fmt::print("drawn {}: {} refused as illegal, {} legal after options at fault were drawn again, {} undecidable\n", counts.drawn,
             counts.refused, counts.repaired, counts.undecidable);
  fmt::print("met {} of {} option values and {} of {} pairs of values that legal plans can have\n", covered.values(),
             all.values(), covered.pairs_in_common(all), all.pairs());
  const std::vector<std::string> missing = covered.missing(all, kMissingShown);
  for (const std::string& name : missing) fmt::print("  not met: {}{}\n", name, &name == &missing.back() ? ", ..." : "");
}

void keep(const ComposeArguments& arguments, const RunContext& context, const Composed& composed, bool interrupted) {
  if (arguments.out.empty()) return;
  ResultFile file;
  const KernelsInfo info = machine_kernels({.backend = context.backend, .device = device_of(context.world.transport)});
  EnvironmentInputs inputs;
  inputs.libraries = {{"matrix", info.matrix_library}, {"instruction_set", info.instruction_set}};
  for (const CaseResult& result : composed.results) inputs.ranks = std::max(inputs.ranks, result.plan.parallel.world_size());
  file.environment = collect_environment(context, inputs);
  file.interrupted = interrupted;
  file.cases = composed.results;
  if (arguments.out == "-") {
    write_output("-", to_json(file));
  } else {
    write_result_file(arguments.out, file);
  }
}

void print_summary(const Composed& composed) {
  fmt::print("{} plans: {} good, {} failed; checks:", composed.plans, composed.plans - composed.failed, composed.failed);
  for (const auto& [check, count] : composed.judged) fmt::print(" {} {}", check, count);
  fmt::print("\n");
}

int compose_action(const CommandLine& line, const ComposeArguments& arguments) {
  require_writable(arguments.out, "--out");
  require_writable_folder(arguments.save_failing, "--save-failing");
  RunnerOptions options;
  RunOptions run_options;
  run_options.backend = arguments.backend;
  run_options.seed = arguments.seed;
  options.context = to_context(run_options);
  options.interrupted = &line.stop;
  Composed composed;
  ProgressLine progress;
  if (!arguments.plan.empty() || !arguments.settings.empty()) {
    judge_one(arguments, options, described(arguments), progress, line.stop, composed);
    for (const CaseResult& result : composed.results) {
      fmt::print("{:<5} {:<12} {}\n", name(result.verdict.status), check_of(result.name), result.verdict.reason);
    }
  } else {
    CompositionCoverage covered;
    DrawCounts counts;
    const std::int64_t first = arguments.only.value_or(0);
    const std::int64_t end = arguments.only ? first + 1 : arguments.plans;
    for (std::int64_t number = first; number < end && !line.stop; ++number) {
      const DrawnComposition drawn = draw_composition(arguments.seed, number, counts);
      covered.add(drawn.levels);
      const std::string name = fmt::format("seed{}/{}", drawn.seed, number);
      progress.show(number - first, end - first, name);
      if (arguments.list) {
        fmt::print("{:<12} {}\n", name, to_settings(drawn.composition));
        continue;
      }
      judge_one(arguments, options, {name, drawn.composition}, progress, line.stop, composed);
    }
    progress.clear();
    if (!arguments.only) print_coverage(covered, counts);
  }
  if (arguments.list) return kGood;
  if (arguments.out != "-") print_summary(composed);
  keep(arguments, options.context, composed, line.stop);
  if (line.stop) return kInterrupted;
  return composed.failed == 0 ? kGood : kCheckFailed;
}

}  // namespace

void add_compose_command(CommandLine& line) {
  auto* command = line.app.add_subcommand(
      "compose", "Draw random legal plans over all options, judge each against the reference, reduce what fails");
  const auto arguments = std::make_shared<ComposeArguments>();
  command->add_option("--plans", arguments->plans, "so many")->check(at_least_one)->capture_default_str();
  command->add_option("--seed", arguments->seed, "of the draws: the same seed and number, the same plan")->capture_default_str();
  command->add_option("--only", arguments->only, "the plan of this number alone, from 0")->check(CLI::NonNegativeNumber);
  command->add_option("--plan", arguments->plan, "no draws: the plan of this file (of --save-failing, or of tandem train)");
  command
      ->add_option("--set", arguments->settings,
                   "no draws: the simplest plan, or that of --plan, with key=value: every key of tandem train, and row_shape, "
                   "row_tokens, second_row_tokens, algorithm, adversary, overflow_step, overflow_rank (docs/compositions.md)")
      ->type_size(1)
      ->allow_extra_args(false);
  command->add_flag("--minimise,!--no-minimise", arguments->minimise, "reduce each plan that fails to the smallest (default)");
  command->add_flag("--list", arguments->list, "say what is drawn, run nothing");
  add_backend_option(*command, arguments->backend);
  command->add_option("--out", arguments->out, "write the result file (JSON, results/schema.json); - is standard output");
  command->add_option("--save-failing", arguments->save_failing, "write each plan that fails, and its smallest form, for --plan");
  command->footer("Example:\n  tandem compose --plans 5 --seed 3");
  command->callback([&line, arguments] { line.action = [&line, arguments] { return compose_action(line, *arguments); }; });
}

}  // namespace tandem
