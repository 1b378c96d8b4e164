// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/run_options.h"
#include "core/config.h"
#include "optimized/machine.h"
#include "suites/golden.h"

namespace tandem {
namespace {

struct GoldenArguments {
  std::vector<std::string> folders;
  std::string precision = "fp64";
  std::vector<std::string> settings;
  bool all = false;
  std::string backend = "cpu";
};

void print_outcome(const GoldenSet& set, const GoldenOutcome& outcome, bool all) {
  const Property& worst = outcome.worst();
  fmt::print("{:<8} {:<24} {}  worst {} {} at step {}: {:.2e} of {:.2e} allowed\n", set.name, outcome.side,
             outcome.passed() ? "pass" : "FAIL", worst.name, worst.tensor, worst.step, worst.value, worst.limit);
  for (const Property& property : outcome.properties) {
    if (property.holds() && !all) continue;
    fmt::print("  {} {:<22} {:<28} step {}: {:.3e} of {:.2e}{}\n", property.holds() ? "ok  " : "FAIL", property.name,
               property.tensor, property.step, property.value, property.limit,
               property.relation == Relation::equal && !property.holds() ? " (" + property.derivation + ")" : "");
  }
}

TrainingPlan plan_for(const GoldenArguments& arguments, const GoldenSet& set) {
  RunConfig config;
  config.model = set.model;
  config.plan.batch = golden_batch(set);
  set_option(config, "precision=" + arguments.precision);
  RunConfig unchanged = config;
  for (const std::string& setting : arguments.settings) set_option(config, setting);
  unchanged.plan = config.plan;
  if (to_json(unchanged) != to_json(config)) {
    throw InputError("--set may change the plan only; model, optimizer and data are those of the golden set");
  }
  if (config.plan.batch.rows != golden_batch(set).rows) {
    throw InputError(fmt::format("a step of this set has {} rows; --set rows cannot change that", golden_batch(set).rows));
  }
  require_legal(config.plan, set.model);
  return config.plan;
}

// Whether reference and engine agree with the set. Throws InputError where there is no set or the plan does not fit it.
bool check_set(const GoldenArguments& arguments, const std::string& folder) {
  const GoldenSet set = read_golden_set(folder);
  std::optional<TrainingPlan> plan;
  try {
    plan = plan_for(arguments, set);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", folder, error.what()));
  }
  const GoldenOutcome reference = run_golden_reference(set, *plan);
  print_outcome(set, reference, arguments.all);
  const GoldenOutcome engine = run_golden_engine(set, *plan, {.backend = arguments.backend}, reference);
  print_outcome(set, engine, arguments.all);
  return reference.passed() && engine.passed();
}

// One set that cannot be run says nothing about the others.
int golden_action(const GoldenArguments& arguments) {
  require_backend(arguments.backend);
  bool good = true;
  bool refused = false;
  for (const std::string& folder : arguments.folders) {
    try {
      good = check_set(arguments, folder) && good;
    } catch (const InputError& error) {
      (void)std::fflush(stdout);
      fmt::print(stderr, "tandem: {}\n", error.what());
      refused = true;
    }
  }
  if (!good) return kCheckFailed;
  return refused ? kBadInput : kGood;
}

}  // namespace

void add_golden_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("golden", "Run golden sets against the reference and against the engine");
  const auto arguments = std::make_shared<GoldenArguments>();
  command->add_option("DIR", arguments->folders, "folders of golden sets")->required();
  command
      ->add_option(
          "--precision", arguments->precision,
          "fp64, fp32, bf16, fp16, bf16-autocast, fp16-autocast or fp8; 16 bits are judged by bounds that follow from the "
          "number of roundings, and by the error of the reference in the same precision")
      ->capture_default_str();
  command->add_option("--set", arguments->settings, "key=value of the engine's plan, e.g. data=3")
      ->type_size(1)
      ->allow_extra_args(false);
  add_backend_option(*command, arguments->backend);
  command->add_flag("--all", arguments->all, "show every deviation, not only those beyond their limit");
  command->footer(
      "Example:\n  tandem golden results/golden/tiny --precision fp32 --set data=3\n"
      "Exit status: 1 when a deviation is beyond its limit; otherwise 2 when a folder holds no set or the plan does not fit one\n"
      "(the others are run all the same); otherwise 0.");
  command->callback([&line, arguments] { line.action = [arguments] { return golden_action(*arguments); }; });
}

}  // namespace tandem
