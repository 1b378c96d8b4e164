// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "cli/checkpoint_command.h"
#include "cli/output.h"
#include "harness/text_table.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/hugging_face.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/checkpoint/reshard.h"
#include "suites/pair.h"

namespace tandem {
namespace {

struct ConvertArguments {
  std::string from;
  std::string out;
  std::vector<std::string> settings;
  std::string dtype = "fp32";
  double max_file_gib = 4;
};

void print_note(const std::string& note) { fmt::print(stderr, "tandem: {}\n", note); }

// A newer checkpoint that is passed over is no error, but nobody should miss it.
std::filesystem::path checkpoint_of(const std::string& folder) { return find_checkpoint(folder, print_note); }

void require_parent(const std::string& out) {
  std::filesystem::path path = std::filesystem::path(out).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  std::error_code error;
  if (path.parent_path().empty() || std::filesystem::is_directory(path.parent_path(), error)) return;
  throw InputError(fmt::format("--out {}: there is no folder {}", out, path.parent_path().string()));
}

// The configuration's plan after --set, which may change nothing else: the checkpoint is of the same run.
TrainingPlan changed_plan(const RunConfig& saved, const std::vector<std::string>& settings) {
  RunConfig config = saved;
  for (const std::string& setting : settings) {
    set_option(config, setting);
    RunConfig rest = config;
    rest.plan = saved.plan;
    const bool same_rows = config.plan.batch.rows == saved.plan.batch.rows;
    if (to_json(rest) != to_json(saved) || !same_rows) {
      throw InputError(
          fmt::format("--set {}: a checkpoint can be dealt anew by keys of the plan, but for rows; change others "
                      "where the run goes on, with tandem train --resume",
                      setting));
    }
  }
  return config.plan;
}

int reshard_action(const ConvertArguments& arguments) {
  require_parent(arguments.out);
  const std::filesystem::path step_folder = checkpoint_of(arguments.from);
  const TrainingPlan plan = changed_plan(read_manifest_of(step_folder).info.config, arguments.settings);
  const std::filesystem::path made = reshard_checkpoint(step_folder, arguments.out, plan, {.note = print_note});
  const CheckpointManifest manifest = read_manifest_of(made);
  fmt::print("{}: {} in {} file(s) for {} rank(s) ({}), {}\n", made.string(), human_bytes(manifest.total_bytes()),
             manifest.files.size(), plan.parallel.world_size(), describe_layout(plan), plan.precision);
  return kGood;
}

int export_action(const ConvertArguments& arguments) {
  require_parent(arguments.out);
  const std::filesystem::path step_folder = checkpoint_of(arguments.from);
  constexpr double kBytesPerGib = 1 << 30;
  const HuggingFaceSummary summary =
      export_hugging_face(step_folder, arguments.out,
                          {.dtype = parse_dtype(arguments.dtype),
                           .max_file_bytes = static_cast<std::int64_t>(arguments.max_file_gib * kBytesPerGib)});
  fmt::print("{}: {} parameters of {} as {}, {} in {} file{} and config.json\n", arguments.out, summary.parameters,
             step_folder.string(), arguments.dtype, human_bytes(summary.bytes), summary.files, summary.files == 1 ? "" : "s");
  return kGood;
}

int import_action(const ConvertArguments& arguments) {
  require_parent(arguments.out);
  const std::filesystem::path step_folder = import_hugging_face(arguments.from, arguments.out);
  const GptConfig model = read_manifest_of(step_folder).info.config.model;
  fmt::print("{}: {} parameters, {} layers, hidden {}, vocabulary {}\n", step_folder.string(), num_parameters(model),
             model.layers, model.hidden, model.vocabulary);
  return kGood;
}

}  // namespace

void add_checkpoint_reshard(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("reshard", "Write a checkpoint as a run under another plan would have saved it");
  const auto arguments = std::make_shared<ConvertArguments>();
  command->add_option("DIR", arguments->from, "folder that train --out wrote (its newest whole checkpoint), or one of its steps")
      ->required();
  command->add_option("--out", arguments->out, "folder of checkpoints that the step is written to")->required();
  command->add_option("--set", arguments->settings, "key=value of the plan, may be repeated (tandem train --help lists them)")
      ->type_size(1)
      ->allow_extra_args(false)
      ->required();
  command->footer(
      "A run can go on under any plan without this. It is for files that fit the ranks that will read them.\n"
      "Example (after: tandem train --steps 20 --out run):\n"
      "  tandem checkpoint reshard run --out resharded --set tensor=2 --set zero=1 --set data=2");
  command->callback([&line, arguments] { line.action = [arguments] { return reshard_action(*arguments); }; });
}

void add_checkpoint_export(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("export", "Write the parameters as a folder that Hugging Face transformers loads");
  const auto arguments = std::make_shared<ConvertArguments>();
  command->add_option("DIR", arguments->from, "folder that train --out wrote (its newest whole checkpoint), or one of its steps")
      ->required();
  command->add_option("--out", arguments->out, "new folder with config.json and model.safetensors")->required();
  command->add_option("--dtype", arguments->dtype, "of the parameters in the file")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_option("--max-file-gib", arguments->max_file_gib, "larger models are dealt to several files with an index")
      ->check(positive_number)
      ->capture_default_str();
  command->footer(
      "Example (after: tandem train --steps 20 --out run):\n"
      "  tandem checkpoint export run --out exported\n"
      "  python3 -c \"import transformers; transformers.GPT2LMHeadModel.from_pretrained('exported')\"");
  command->callback([&line, arguments] { line.action = [arguments] { return export_action(*arguments); }; });
}

void add_checkpoint_import(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("import", "Make a checkpoint of step 0 from a GPT-2 of Hugging Face transformers");
  const auto arguments = std::make_shared<ConvertArguments>();
  command->add_option("HF", arguments->from, "folder with config.json and model.safetensors, as save_pretrained() writes it")
      ->required();
  command->add_option("--out", arguments->out, "folder of checkpoints, which holds none")->required();
  command->footer(
      "Example (after: tandem train --steps 20 --out run, tandem checkpoint export run --out exported):\n"
      "  tandem checkpoint import exported --out imported\n"
      "  tandem train --resume imported --steps 10");
  command->callback([&line, arguments] { line.action = [arguments] { return import_action(*arguments); }; });
}

}  // namespace tandem
