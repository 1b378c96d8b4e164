// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "cli/command.h"

namespace tandem {

// Subcommands of `tandem checkpoint`; each is added to `parent`.
void add_checkpoint_list(CommandLine& line, CLI::App& parent);
void add_checkpoint_verify(CommandLine& line, CLI::App& parent);
void add_checkpoint_reshard(CommandLine& line, CLI::App& parent);
void add_checkpoint_export(CommandLine& line, CLI::App& parent);
void add_checkpoint_import(CommandLine& line, CLI::App& parent);
void add_checkpoint_advise(CommandLine& line, CLI::App& parent);

}  // namespace tandem
