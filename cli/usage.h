// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace tandem {

/// The words of a command line as they are parsed: "help X" is "X --help", and "help" alone "--help".
[[nodiscard]] std::vector<std::string> words_to_parse(int argc, const char* const* argv);

/// In one line, what is wrong with a command line that CLI11 has refused: an unknown command or option with the nearest one that
/// there is, or with the commands that have it. `words` as they were parsed, the program's name first.
[[nodiscard]] std::string explain(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& words);

/// The options of the command that its command line has, each once: "--steps", and "CONFIG" of what has no dashes.
[[nodiscard]] std::vector<std::string> given_options(const CLI::App& command);

}  // namespace tandem
