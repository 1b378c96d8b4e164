// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "suites/suites.h"

namespace tandem {

/// Where the files lie that come with the program and do not travel inside it: under share/tandem of the prefix that it was
/// installed in, wherever that was moved to; of a program that was not installed, in its source tree.
[[nodiscard]] SuiteOptions shipped_data();

/// Libraries that the build found, name -> version ("oneDNN" -> "2.6.3").
[[nodiscard]] std::map<std::string, std::string> libraries_of_build();

/// Of --version: version, commit, compiler; libraries; how ranks may communicate, and on what they may compute.
[[nodiscard]] std::string describe_program(const std::map<std::string, std::string>& libraries);

}  // namespace tandem
