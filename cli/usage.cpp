// SPDX-License-Identifier: Apache-2.0
#include "cli/usage.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/nearest_name.h"

namespace tandem {
namespace {

// The command that words name, and the first word that names none where one is due.
struct Named {
  const CLI::App* command = nullptr;
  std::string path = "tandem";
  std::string unknown = {};
};

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

Named find_command(const CLI::App& app, const std::vector<std::string>& words) {
  Named named{.command = &app};
  for (std::size_t i = 1; i < words.size() && !commands_of(*named.command).empty(); ++i) {
    if (words[i].starts_with("-")) break;
    const std::vector<const CLI::App*> next =
        named.command->get_subcommands([&](const CLI::App* command) { return command->get_name() == words[i]; });
    if (next.empty()) {
      named.unknown = words[i];
      break;
    }
    named.command = next.front();
    named.path += " " + words[i];
  }
  return named;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& known) {
  const std::optional<std::string> nearest = nearest_name(word, known);
  return nearest ? fmt::format(", did you mean '{}'?", *nearest) : "";
}

std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_group().empty()) continue;  // between the supervisor and its workers
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

void add_commands_with(const CLI::App& app, const std::string& path, const std::string& option, std::vector<std::string>& found) {
  for (const CLI::App* command : app.get_subcommands({})) {
    const std::string name = path + " " + command->get_name();
    const std::vector<std::string> options = options_of(*command);
    if (std::find(options.begin(), options.end(), option) != options.end()) found.push_back(name);
    add_commands_with(*command, name, option, found);
  }
}

std::string explain_option(const CLI::App& app, const Named& named, const std::string& word) {
  const std::string option = word.substr(0, word.find('='));
  std::string text = fmt::format("{} has no option {}", named.path, option);
  const std::string near = did_you_mean(option, options_of(*named.command));
  if (!near.empty()) return text + near;
  std::vector<std::string> others;
  add_commands_with(app, "tandem", option, others);
  if (!others.empty()) text += fmt::format("; {} {}", fmt::join(others, ", "), others.size() == 1 ? "has one" : "have one");
  return fmt::format("{} ({} --help lists them)", text, named.path);
}

}  // namespace

std::vector<std::string> words_to_parse(int argc, const char* const* argv) {
  std::vector<std::string> words(argv, argv + argc);
  if (words.size() > 1 && words[1] == "help") {
    words.erase(words.begin() + 1);
    words.emplace_back("--help");
  }
  return words;
}

std::string explain(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& words) {
  const Named named = find_command(app, words);
  const std::vector<std::string> commands = commands_of(*named.command);
  if (!named.unknown.empty()) {
    const std::string before = named.path == "tandem" ? "" : named.path.substr(std::string_view("tandem ").size()) + " ";
    return fmt::format("there is no command '{}{}'{} ({} --help lists them)", before, named.unknown,
                       did_you_mean(named.unknown, commands), named.path);
  }
  const std::string said = error.what();
  const bool is_extra = error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError);
  const std::string extra = is_extra ? said.substr(said.rfind(": ") + 2) : "";
  if (extra.starts_with("-")) return explain_option(app, named, extra.substr(0, extra.find(' ')));
  if (!commands.empty()) {
    const std::string group = named.path == "tandem" ? "" : named.path + ": ";
    return fmt::format("{}which command? There are {} ({} --help says what each does)", group, fmt::join(commands, ", "),
                       named.path);
  }
  if (is_extra) return fmt::format("{} has no place for '{}' ({} --help shows what it takes)", named.path, extra, named.path);
  return fmt::format("{} ({} --help shows how)", said, named.path);
}

std::vector<std::string> given_options(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() > 0) names.push_back(option->get_name());
  }
  return names;
}

}  // namespace tandem
