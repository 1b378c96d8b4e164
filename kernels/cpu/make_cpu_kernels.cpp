// SPDX-License-Identifier: Apache-2.0
// What this machine and this build offer: the choice of instruction set and matrix library, said in info().
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cpu/cpu_kernels.h"

namespace tandem {
namespace {

using cpu::MatrixLibrary;
using cpu::VectorTables;

struct InstructionSet {
  std::string name;
  bool supported;
  const VectorTables& (*tables)();
};

/// Best first. The features asked for are those that the flags in kernels/CMakeLists.txt allow the compiler to use.
std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  sets.push_back({"avx512", avx512, cpu::avx512_tables});
  sets.push_back({"avx2", avx2, cpu::avx2_tables});
#endif
  sets.push_back({"baseline", true, cpu::baseline_tables});
  return sets;
}

const VectorTables& choose_instruction_set(const std::string& wanted, KernelsInfo& info) {
  for (const InstructionSet& set : instruction_sets()) {
    if (wanted == "auto" ? set.supported : wanted == set.name) {
      if (!set.supported) throw InputError(fmt::format("instruction_set '{}': this machine does not have it", wanted));
      info.instruction_set = set.name;
      return set.tables();
    }
    if (wanted == "auto") info.notes.push_back(fmt::format("no {} instructions: kernels take the next narrower ones", set.name));
  }
  throw InputError(fmt::format("instruction_set '{}': use auto, avx512, avx2 or baseline", wanted));
}

std::unique_ptr<MatrixLibrary> make_library(const std::string& wanted, const VectorTables& tables) {
  if (wanted == "onednn") return cpu::make_onednn_library();
  if (wanted == "openblas") return cpu::make_openblas_library();
  return cpu::make_own_library(tables);
}

void choose_matrix_libraries(const std::string& wanted, cpu::CpuParts& parts) {
  static constexpr std::array<const char*, 3> kBestFirst = {"onednn", "openblas", "own"};
  const bool automatic = wanted == "auto";
  if (!automatic && std::find(kBestFirst.begin(), kBestFirst.end(), wanted) == kBestFirst.end()) {
    throw InputError(fmt::format("matrix_library '{}': use auto, onednn, openblas or own", wanted));
  }
  KernelsInfo& info = parts.info;
  for (const std::string candidate : kBestFirst) {
    if (!automatic && candidate != wanted && parts.single_library == nullptr) continue;
    auto library = make_library(candidate, *parts.tables);
    if (library == nullptr) {
      if (!automatic && parts.single_library == nullptr) {
        throw InputError(fmt::format("matrix_library '{}': this build does not have it", wanted));
      }
      info.notes.push_back(fmt::format("built without {}: the next matrix library takes its place", candidate));
      continue;
    }
    if (parts.single_library == nullptr) {
      info.matrix_library = library->name();
      if (!library->has_double()) {
        parts.single_library = std::move(library);
        continue;
      }
      parts.single_library = make_library(candidate, *parts.tables);
    } else {
      info.matrix_library += fmt::format(" (fp64: {})", library->name());
    }
    parts.double_library = std::move(library);
    return;
  }
}

/// A machine's bf16 instructions come with its widest set: a narrower one asked for does without them.
void choose_bf16_products(cpu::CpuParts& parts) {
  parts.bf16_products = parts.info.instruction_set == "avx512" && parts.single_library->has_bf16();
  parts.info.bf16_products =
      parts.bf16_products ? fmt::format("{}, bf16 instructions", parts.single_library->name()) : cpu::kConvertedProducts;
}

}  // namespace

std::unique_ptr<Kernels> make_cpu_kernels(const CpuKernelsOptions& options) {
  if (options.threads < 1) throw InputError(fmt::format("threads is {}: at least 1", options.threads));
  cpu::CpuParts parts;
  parts.info.backend = "cpu";
  parts.tables = &choose_instruction_set(options.instruction_set, parts.info);
  if (options.products != DType::f32 && !is_16bit(options.products)) {
    throw InputError(fmt::format("products in {}: use fp32, bf16 or fp16", name(options.products)));
  }
  parts.products = options.products;
  choose_matrix_libraries(options.matrix_library, parts);
  choose_bf16_products(parts);
  return std::make_unique<cpu::CpuKernels>(std::move(parts), options.threads, options.pitfalls);
}

}  // namespace tandem
