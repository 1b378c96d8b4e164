// SPDX-License-Identifier: Apache-2.0
// cuda_bench: how near the kernels come to what the card was measured to do.
//   cuda_bench [--backend cuda|simt] [--device N] [--only TEXT] [--json FILE] [--tiny] [--check]
// --check: exit status 1 where a case is below its target. --tiny, and the emulated GPU: a tiny model, to see that it runs.
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "kernels/cuda/bench/cases.h"
#include "kernels/device_clock.h"

namespace tandem::cuda_bench {
namespace {

struct Options {
  std::string backend = "cuda", only, json;
  int device = 0;
  bool check = false, tiny = false;
};

Options parse(const std::vector<std::string>& words) {
  Options options;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    const auto value = [&]() -> const std::string& {
      if (i + 1 == words.size()) throw InputError(fmt::format("{} needs a value", word));
      return words[++i];
    };
    if (word == "--backend") {
      options.backend = value();
    } else if (word == "--device") {
      options.device = std::atoi(value().c_str());
    } else if (word == "--only") {
      options.only = value();
    } else if (word == "--json") {
      options.json = value();
    } else if (word == "--tiny") {
      options.tiny = true;
    } else if (word == "--check") {
      options.check = true;
    } else {
      throw InputError(fmt::format("'{}': there are --backend, --device, --only, --json, --tiny and --check", word));
    }
  }
  return options;
}

struct Result {
  BenchCase what;
  double seconds = 0, share = 0;
  std::string error;
};

double peak_for(const MeasuredPeaks& peaks, Bound bound) {
  return bound == Bound::memory ? peaks.memory_bytes_per_second : peaks.bf16_matmul_flops_per_second;
}

/// As many calls as take a twentieth of a second.
double measure(Kernels& kernels, const BenchCase& what, bool tiny) {
  const std::function<void()> call = what.prepare(kernels);
  Memory& memory = kernels.memory();
  const double once = seconds_per_call(memory, 1, 1, call);
  const int calls = tiny ? 1 : std::clamp(static_cast<int>(0.05 / std::max(once, 1e-6)), 3, 500);
  const double seconds = seconds_per_call(memory, tiny ? 1 : 3, calls, call);
  kernels.synchronize();
  return seconds;
}

void print(const Result& result) {
  if (!result.error.empty()) return fmt::print("{:<37} {}\n", result.what.name, result.error);
  const bool memory = result.what.bound == Bound::memory;
  const double rate = result.what.amount / result.seconds;
  fmt::print("{:<37} {:>10.1f} us {:>9.1f} {:<8} {:>5.0f} % of {:<16} {}\n", result.what.name, result.seconds * 1e6,
             rate / (memory ? 1e9 : 1e12), memory ? "GB/s" : "TFLOP/s", result.share * 100, memory ? "a copy" : "a large product",
             result.share < result.what.target ? fmt::format("below {:.0f} %", result.what.target * 100) : "");
  std::cout.flush();
}

nlohmann::json to_json(const Options& options, const KernelsInfo& info, const std::string& device, const MeasuredPeaks& peaks,
                       const std::vector<Result>& results) {
  nlohmann::json cases = nlohmann::json::array();
  for (const Result& result : results) {
    if (!result.error.empty()) {
      cases.push_back({{"name", result.what.name}, {"error", result.error}});
      continue;
    }
    cases.push_back({{"name", result.what.name},
                     {"bound", result.what.bound == Bound::memory ? "memory" : "matrix"},
                     {"seconds", result.seconds},
                     {result.what.bound == Bound::memory ? "bytes" : "flops", result.what.amount},
                     {"share_of_peak", result.share},
                     {"target", result.what.target}});
  }
  return {{"backend", options.backend},
          {"device", device},
          {"architecture", info.instruction_set},
          {"matrix_library", info.matrix_library},
          {"copy_bytes_per_second", peaks.memory_bytes_per_second},
          {"matrix_flops_per_second", peaks.bf16_matmul_flops_per_second},
          {"fp32_matrix_flops_per_second", peaks.fp32_matmul_flops_per_second},
          {"cases", cases}};
}

void write_json(const std::string& path, const nlohmann::json& json) {
  if (path.empty()) return;
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  if (!file.flush()) throw IoError(fmt::format("{} cannot be written", path));
}

/// A case that fails is a row that says so.
Result result_of(Kernels& kernels, const BenchCase& what, const MeasuredPeaks& peaks, bool tiny) {
  Result result = {.what = what, .error = {}};
  try {
    result.seconds = measure(kernels, what, tiny);
    result.share = what.amount / result.seconds / peak_for(peaks, what.bound);
  } catch (const Error& error) {
    result.error = error.what();
  }
  return result;
}

int run(const Options& options) {
  const bool tiny = options.tiny || options.backend == "simt";
  const auto kernels = make_cuda_kernels(options.backend, {.device = options.device});
  const MeasuredPeaks peaks = measure_gpu_peaks(options.backend, options.device);
  const KernelsInfo info = kernels->info();
  const std::string device(kernels->memory().description());
  fmt::print("{}, {}, {}\ncopy {:.1f} GB/s, bf16 product {:.1f} TFLOP/s, fp32 product {:.1f} TFLOP/s\n", device,
             info.instruction_set, info.matrix_library, peaks.memory_bytes_per_second / 1e9,
             peaks.bf16_matmul_flops_per_second / 1e12, peaks.fp32_matmul_flops_per_second / 1e12);
  const Shapes tiny_shapes = {.rows = 2, .sequence = 32, .hidden = 64, .vocabulary = 128, .parameters = 5000, .heads = 1};
  std::vector<Result> results;
  int below = 0, failed = 0;
  for (const BenchCase& what : cases_of(tiny ? tiny_shapes : Shapes())) {
    if (what.name.find(options.only) == std::string::npos) continue;
    results.push_back(result_of(*kernels, what, peaks, tiny));
    print(results.back());
    if (!results.back().error.empty()) ++failed;
    if (!(results.back().share >= what.target)) ++below;
    write_json(options.json, to_json(options, info, device, peaks, results));
  }
  fmt::print("{} of {} cases are below their targets\n", below, results.size());
  if (failed > 0) throw GpuError(fmt::format("{} cases failed", failed));
  return options.check && below > 0 ? 1 : 0;
}

}  // namespace
}  // namespace tandem::cuda_bench

int main(int argc, char** argv) {
  try {
    return tandem::cuda_bench::run(tandem::cuda_bench::parse({argv + 1, argv + argc}));
  } catch (const tandem::InputError& error) {
    std::cerr << "cuda_bench: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "cuda_bench: " << error.what() << '\n';
    return 4;
  }
}
