// SPDX-License-Identifier: Apache-2.0
#include "cli/scale_command.h"

#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/job.h"
#include "cli/output.h"
#include "cli/scaling_report.h"
#include "cli/usage.h"
#include "core/error.h"

namespace tandem {
namespace {

void require(const std::string& value, const char* option, const char* why) {
  if (value.empty()) throw InputError(fmt::format("{} is missing: {}", option, why));
}

// What the command does, and the options that have a meaning for it, with a space around each.
struct Mode {
  std::string name, says, options;
};

Mode mode_of(const ScaleArguments& arguments) {
  const std::string rows = " --global-batch --per-gpu-batch ", layout = " --micro-batch --plan --set ";
  const std::string cluster = " --model --cluster --gpus --sequence --precision " + rows;
  if (arguments.measured) {
    return {"--measured", "runs ranks for real, in the layout and on the rows that it is given",
            " --measured --model --gpus --precision --steps --transport --link --algorithm --adversary --deadline --json " +
                rows + layout};
  }
  if (!arguments.published.empty()) {
    return {"--published", "takes models, clusters, sizes and layouts from its table", " --published --json "};
  }
  if (!arguments.chakra.empty() || !arguments.programs_file.empty()) {
    return {arguments.chakra.empty() ? "--export-programs" : "--chakra", "writes the step of one layout",
            " --chakra --export-programs " + cluster + layout};
  }
  if (arguments.clusters.size() > 1) {
    return {"--clusters", "compares the best layout of each, as it is simulated", " --best --json " + cluster};
  }
  if (arguments.best) return {"--best", "searches the layout itself, and simulates it", " --best --json " + cluster};
  return {"tandem scale", "simulates without --measured", " --json " + cluster + layout};
}

void check(const ScaleArguments& arguments) {
  if (arguments.global_batch > 0 && arguments.per_gpu_batch > 0) {
    throw InputError("--global-batch is strong scaling, --per-gpu-batch is weak scaling: give one of them");
  }
  for (const std::string& setting : arguments.settings) {
    if (setting.starts_with("data=") || setting.starts_with("plan.data=")) {
      throw InputError(fmt::format("--set {}: the data degree follows from --gpus and the other degrees; leave it out", setting));
    }
  }
  const Mode mode = mode_of(arguments);
  for (const std::string& option : arguments.given) {
    if (mode.options.find(fmt::format(" {} ", option)) != std::string::npos) continue;
    throw InputError(fmt::format("{} {}: leave {} out", mode.name, mode.says, option));
  }
  if (!arguments.published.empty() || arguments.measured) return;
  require(arguments.model, "--model", "a file, or a name that tandem list shows");
  if (arguments.clusters.empty()) require({}, "--cluster", "a file, or a name that tandem list shows");
  if (arguments.devices.empty()) require({}, "--gpus", "sizes such as 8,16,32");
}

ScaleResult result_of(const ScaleArguments& arguments) {
  if (arguments.measured) return scale_measured(arguments);
  if (!arguments.published.empty()) return scale_published(arguments);
  return arguments.clusters.size() > 1 ? scale_clusters(arguments) : scale_sweep(arguments);
}

int scale_action(const ScaleArguments& arguments) {
  check(arguments);
  require_writable(arguments.json, "--json");
  if (!arguments.chakra.empty() || !arguments.programs_file.empty()) {
    require_writable(arguments.programs_file, "--export-programs");
    require_writable_prefix(arguments.chakra, {".groups.json"}, "--chakra");
    fmt::print("{}", export_step(arguments));
    return kGood;
  }
  const ScaleResult result = result_of(arguments);
  if (*arguments.stop) return kInterrupted;
  if (result.text.empty()) return kGood;  // of a job's other processes
  if (arguments.json != "-") fmt::print("{}", result.text);
  if (!arguments.json.empty()) {
    write_output(arguments.json, with_sections(nlohmann::ordered_json::parse(result.document), result.sections));
  }
  return kGood;
}

void add_options(CLI::App& command, ScaleArguments& arguments) {
  command.add_option("--model", arguments.model, "file, or a name that tandem list shows")->check(not_empty);
  command.add_option("--cluster,--clusters", arguments.clusters, "file, or a name that tandem list shows; several: compared")
      ->delimiter(',')
      ->check(not_empty);
  command.add_option("--gpus", arguments.devices, "sizes, such as 8,16,32 (--measured: ranks, default 1,2,4)")
      ->delimiter(',')
      ->check(at_least_one);
  command
      .add_option("--global-batch", arguments.global_batch,
                  "rows of a step at every size (strong scaling); default: by the model")
      ->check(at_least_one);
  command.add_option("--per-gpu-batch", arguments.per_gpu_batch, "rows of a step for each GPU (weak scaling)")
      ->check(at_least_one);
  command.add_option("--micro-batch", arguments.micro_batch, "rows of a micro-batch; default: the plan's, or 1")
      ->check(at_least_one);
  command.add_option("--sequence", arguments.sequence, "tokens of a row; default: the model's")->check(at_least_one);
  command.add_option("--precision", arguments.precision,
                     "arithmetic of the step; default: the usual of the cluster, --measured: fp32");
  command.add_option("--plan", arguments.plan_file, "layout: a training configuration, or what tandem plan --json wrote");
  command.add_option("--set", arguments.settings, "key=value of the layout, may be repeated; default: plain data parallelism")
      ->type_size(1)
      ->allow_extra_args(false);
  command.add_flag("--best", arguments.best, "the best layout of each size (tandem plan)");
  command.add_option("--published", arguments.published,
                     "predict a published table's own configurations; 'all': a summary of each set");
  command.add_flag("--measured", arguments.measured, "run ranks for real, on this machine or job, and predict them");
  command.add_option("--steps", arguments.steps, "measured at each size")->capture_default_str()->check(at_least_one);
  add_world_options(command, arguments.world);
  command.add_option("--chakra", arguments.chakra, "write the layout's step as execution traces PREFIX.RANK.et, for ASTRA-sim")
      ->check(not_empty);
  command
      .add_option("--export-programs", arguments.programs_file,
                  "write the layout's step programs with their seconds and bytes, for other simulators")
      ->check(not_empty);
  command.add_option("--json", arguments.json, "write all that was found, for tandem report; - is standard output");
}

}  // namespace

void add_scale_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("scale", "Step time and its shares against the number of GPUs");
  const auto arguments = std::make_shared<ScaleArguments>();
  arguments->stop = &line.stop;
  add_options(*command, *arguments);
  command->footer(
      "rows: of a micro-batch x micro-batches. Shares are of the step; communication is what nothing hides; stall is the\n"
      "share of the wall time that checkpoints and failures take; efficiency is tokens a second of a GPU over that of the\n"
      "first size.\n"
      "Examples:\n"
      "  tandem scale --model gpt2-1558m --cluster pcie-a100-100gbe --gpus 4,8,16,32,64,128 --global-batch 512\n"
      "  tandem scale --model gpt-22b --cluster dgx-h100 --gpus 64,128,256 --per-gpu-batch 4 --best\n"
      "  tandem scale --model gpt-22b --clusters dgx-a100,gb200-nvl72,pcie-a100-100gbe --gpus 64\n"
      "  tandem scale --published sc21\n"
      "  tandem scale --measured --link pcie-25gbe,dilation=20");
  command->callback([&line, arguments, command] {
    arguments->given = given_options(*command);
    line.action = [arguments] { return scale_action(*arguments); };
  });
}

}  // namespace tandem
