// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <cstdio>
#include <exception>

#include <fmt/format.h>

#include "cli/command.h"
#include "core/error.h"

namespace {

// A signal handler can reach nothing else.
std::atomic<bool> stop_requested{false};

void request_stop(int signal_number) {
  stop_requested = true;
  std::signal(signal_number, SIG_DFL);  // the second one ends the program at once
}

int report(const std::string& text, int status) {
  fmt::print(stderr, "tandem: {}\n", text);
  return status;
}

int run(tandem::CommandLine& line, int argc, char** argv) {
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return line.app.exit(help);
  } catch (const CLI::ParseError& error) {
    return report(fmt::format("{} (tandem --help lists the commands)", error.what()), tandem::kBadInput);
  }
  try {
    return line.action();
  } catch (const tandem::InputError& error) {
    return report(error.what(), tandem::kBadInput);
  } catch (const std::exception& error) {
    return report(error.what(), tandem::kRunBroke);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  std::signal(SIGPIPE, SIG_DFL);
  CLI::App app{
      "tandem: every technique of large-scale LLM training twice, as a reference and optimized, proven equal and measured"};
  app.require_subcommand(1);
  app.set_version_flag("--version", TANDEM_VERSION);
  const std::filesystem::path source = TANDEM_SOURCE_DIR;
  tandem::CommandLine line{app, {source / "results", source / ".." / "shared" / "golden"}, stop_requested};
  tandem::add_list_command(line);
  tandem::add_run_command(line);
  tandem::add_train_command(line);
  tandem::add_generate_command(line);
  tandem::add_golden_command(line);
  tandem::add_data_command(line);
  tandem::add_compare_command(line);
  tandem::add_pitfalls_command(line);
  return run(line, argc, argv);
}
