// SPDX-License-Identifier: Apache-2.0
#include "harness/environment.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <fstream>
#include <string_view>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "core/usable_cores.h"
#include "tandem_build_info.h"

namespace tandem {
namespace {

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const auto colon = line.find(": ");
    if (colon != std::string::npos && line.starts_with("model name")) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string widest_instructions() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
  if (__builtin_cpu_supports("avx")) return "avx";
  return "sse2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "unknown";
#endif
}

std::string operating_system() {
  utsname names{};
  return uname(&names) == 0 ? fmt::format("{} {}", names.sysname, names.release) : "unknown";
}

}  // namespace

std::string describe_build() {
  const std::string_view commit = build_info::kGitCommit;
  const std::string built_from =
      commit == "unknown" ? "" : fmt::format("{}{}; ", commit.substr(0, 12), build_info::kGitDirty ? ", changed since" : "");
  return fmt::format("tandem {} ({}{}, {})", build_info::kVersion, built_from, build_info::kCompiler, build_info::kBuildType);
}

Environment collect_environment(const RunContext& context, const EnvironmentInputs& inputs) {
  Environment environment;
  environment.date = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  environment.cpu = cpu_model();
  environment.cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  environment.usable_cores = usable_cores();
  environment.memory_bytes = std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  environment.instruction_set = widest_instructions();
  environment.operating_system = operating_system();
  environment.gpus = inputs.gpus;
  environment.libraries = inputs.libraries;
  environment.version = build_info::kVersion;
  environment.compiler = build_info::kCompiler;
  environment.build_type = build_info::kBuildType;
  environment.git_commit = build_info::kGitCommit;
  environment.git_dirty = build_info::kGitDirty;
  environment.backend = context.backend;
  environment.transport = context.world.transport;
  if (context.world.link) environment.link = describe(*context.world.link);
  environment.algorithm = name(context.world.algorithm);
  if (context.world.adversary) environment.adversary = fmt::to_string(context.world.adversary->seed);
  environment.ranks = inputs.ranks;
  environment.threads_per_rank = context.threads_per_rank;
  environment.seed = context.seed;
  environment.repetitions = context.repetitions;
  for (const Pitfall pitfall : context.pitfalls.list()) environment.pitfalls.emplace_back(name(pitfall));
  return environment;
}

}  // namespace tandem
