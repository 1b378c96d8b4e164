// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/data_source.h"
#include "cli/output.h"
#include "cli/run_options.h"
#include "core/io/safetensors.h"
#include "core/text.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "optimized/training/generate.h"

namespace tandem {
namespace {

struct GenerateArguments {
  std::string checkpoint;
  std::string prompt;
  std::string tokenizer;
  std::string logits;
  std::string backend = "cpu";
  GenerateOptions options;
};

// What the model says of each token that it reads, for a comparison with another program.
class LogitsFile {
 public:
  LogitsFile(std::string file, std::int64_t vocabulary) : file_(std::move(file)), vocabulary_(vocabulary) {}

  void add(std::int32_t token, const std::vector<double>& logits) {
    tokens_.push_back(token);
    logits_.insert(logits_.end(), logits.begin(), logits.end());
  }

  void write() {
    const auto rows = std::ssize(tokens_);
    const NamedTensor tensors[] = {{"tokens", {tokens_.data(), DType::i32, {rows}}},
                                   {"logits", {logits_.data(), DType::f32, {rows, vocabulary_}}}};
    write_safetensors(file_, tensors);
  }

 private:
  std::string file_;
  std::int64_t vocabulary_;
  std::vector<std::int32_t> tokens_;
  std::vector<float> logits_;
};

int generate_action(const GenerateArguments& arguments, const std::atomic<bool>& stop) {
  require_backend(arguments.backend);
  const std::filesystem::path folder = find_checkpoint(arguments.checkpoint);
  const CheckpointInfo info = read_checkpoint_info(folder);
  require_text(arguments.prompt, "--prompt");
  require_writable(arguments.logits, "--logits");
  if (info.config.model.vocabulary < 256) {
    throw InputError(fmt::format("{}: this model has a vocabulary of {}, so it was not trained on text; text needs 256",
                                 folder.string(), info.config.model.vocabulary));
  }
  if (info.config.model.experts > 0) {
    throw InputError(fmt::format("{}: generation from a model with experts is not implemented", folder.string()));
  }
  const auto tokenizer = open_tokenizer(info.data, info.config.model.vocabulary, arguments.tokenizer);
  std::vector<std::int32_t> prompt;
  tokenizer->encode(arguments.prompt, prompt);
  fmt::print("{}", arguments.prompt);
  run_world({.ranks = 1}, [&](Communicator& comm) {
    // From the master copies, in fp32 whatever precision they were trained in.
    TrainingPlan plan = on_one_rank(info.config.plan);
    plan.precision = "fp32";
    plan.numerics = {};
    const auto kernels = make_kernels(plan, MachineChoice{arguments.backend});
    Arena arena({.memory = &kernels->memory()});
    const RankContext context{&comm, kernels.get(), &arena, nullptr, {}, {}};
    Engine engine(context, {info.config.model, plan, info.config.optimizer, {}, 1, 1});
    load_checkpoint(folder, info, engine);
    GenerateOptions options = arguments.options;
    options.on_token = [&](std::int32_t token) {
      // A model may have more tokens than its tokenizer.
      fmt::print("{}", token < tokenizer->vocabulary() ? tokenizer->bytes_of(token) : "\xEF\xBF\xBD");
      std::fflush(stdout);
    };
    options.stop = &stop;
    LogitsFile logits(arguments.logits, info.config.model.vocabulary);
    if (!arguments.logits.empty()) {
      options.on_logits = [&](std::int32_t token, const std::vector<double>& values) { logits.add(token, values); };
    }
    (void)generate(context, info.config.model, engine.store(), prompt, options);
    if (!arguments.logits.empty()) logits.write();
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
      ->check(number_between(0, 1e9));
  command->add_option("--tokenizer", arguments->tokenizer,
                      "bytes or FILE.model, where the data that the model was trained on is not there to say it");
  command->add_option("--seed", arguments->options.seed, "of the draws")->capture_default_str()->check(whole_number);
  add_backend_option(*command, arguments->backend);
  command->add_option("--logits", arguments->logits, "write tokens and logits of all that the model read (safetensors)");
  command->footer(
      "Example (after: tandem train --data README.md --steps 20 --out run):\n  tandem generate --checkpoint run --prompt 'The '");
  command->callback([&line, arguments] { line.action = [&line, arguments] { return generate_action(*arguments, line.stop); }; });
}

}  // namespace tandem
