// SPDX-License-Identifier: Apache-2.0
#include "cli/installation.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/environment.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "tandem_installation.h"

namespace tandem {

namespace fs = std::filesystem;

SuiteOptions shipped_data() {
  std::error_code none;
  const fs::path program = fs::read_symlink("/proc/self/exe", none);
  const fs::path installed = (program.parent_path() / installation::kDataFolder).lexically_normal();
  if (!program.empty() && fs::exists(installed / "schema.json", none)) return {installed, installed / "more_golden"};
  const fs::path source = installation::kSourceFolder;
  return {source / "results", source / ".." / "shared" / "golden"};
}

std::map<std::string, std::string> libraries_of_build() {
  std::map<std::string, std::string> libraries;
  for (const installation::Library& library : installation::kLibraries) libraries.emplace(library.name, library.version);
  return libraries;
}

std::string describe_program(const std::map<std::string, std::string>& libraries) {
  std::string text = describe_build();
  std::vector<std::string> found;
  for (const auto& [name, version] : libraries) found.push_back(version.empty() ? name : fmt::format("{} {}", name, version));
  text += fmt::format("\nlibraries: {}", fmt::join(found, ", "));
  const KernelsInfo kernels = machine_kernels();
  text += fmt::format("\ncomputes on: cpu ({}, {})", kernels.instruction_set, kernels.matrix_library);
  for (const char* const backend : {"cuda", "simt"}) {
    const std::string why = why_no_gpu(backend);
    text += fmt::format("; {} ({})", backend, why.empty() ? "ready" : "not here: " + why);
  }
  return text + fmt::format("\nranks are: {}", fmt::join(transports(), ", "));
}

}  // namespace tandem
