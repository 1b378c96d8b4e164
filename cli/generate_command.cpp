// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "core/text.h"
#include "core/text_data.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/world.h"
#include "optimized/training/generate.h"

namespace tandem {
namespace {

struct GenerateArguments {
  std::string checkpoint;
  std::string prompt;
  GenerateOptions options;
};

int generate_action(const GenerateArguments& arguments, const std::atomic<bool>& stop) {
  const std::filesystem::path folder = find_checkpoint(arguments.checkpoint);
  const CheckpointInfo info = read_checkpoint_info(folder);
  require_text(arguments.prompt, "--prompt");
  if (info.config.model.vocabulary < 256) {
    throw InputError(fmt::format("{}: this model has a vocabulary of {}, so it was not trained on text; text needs 256",
                                 folder.string(), info.config.model.vocabulary));
  }
  if (info.config.model.experts > 0) {
    throw InputError(fmt::format("{}: generation from a model with experts is not implemented", folder.string()));
  }
  fmt::print("{}", arguments.prompt);
  run_world({.ranks = 1}, [&](Communicator& comm) {
    // From the master copies, in fp32 whatever precision they were trained in.
    TrainingPlan plan = on_one_rank(info.config.plan);
    plan.precision = "fp32";
    plan.numerics = {};
    Arena arena;
    const auto kernels = make_cpu_kernels({});
    const RankContext context{&comm, kernels.get(), &arena, nullptr, {}, {}};
    Engine engine(context, {info.config.model, plan, info.config.optimizer, {}, 1, 1});
    load_checkpoint(folder, info, engine);
    GenerateOptions options = arguments.options;
    options.on_token = [](std::int32_t token) {
      const std::int32_t one[] = {token};
      fmt::print("{}", decode_bytes(one));
      std::fflush(stdout);
    };
    options.stop = &stop;
    (void)generate(context, info.config.model, engine.store(), encode_bytes(arguments.prompt), options);
  });
  fmt::print("\n");
  return stop ? kInterrupted : kGood;
}

}  // namespace

void add_generate_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("generate", "Continue a text with a trained model");
  const auto arguments = std::make_shared<GenerateArguments>();
  command->add_option("--checkpoint", arguments->checkpoint, "folder that train --out wrote")->required();
  command->add_option("--prompt", arguments->prompt, "text to continue")->required();
  command->add_option("--tokens", arguments->options.tokens, "tokens to add")->capture_default_str()->check(at_least_one);
  command->add_option("--temperature", arguments->options.temperature, "0 takes the likeliest token")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--seed", arguments->options.seed, "of the draws")->capture_default_str();
  command->footer("Example (after: tandem train --data FILE --out run):\n  tandem generate --checkpoint run --prompt 'The '");
  command->callback([&line, arguments] { line.action = [&line, arguments] { return generate_action(*arguments, line.stop); }; });
}

}  // namespace tandem
