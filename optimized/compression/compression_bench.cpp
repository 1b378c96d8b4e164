// SPDX-License-Identifier: Apache-2.0
// The codecs on one core, gradients of a normal distribution, memory far beyond the caches. Pin the program to a core and read
// the `least` time and the `most` of the rates of several repetitions (--benchmark_repetitions=7). Rates are per second of the
// processor, which on a machine with other work are steadier than those of the clock.
//
// bytes_per_second counts what the codec must move: gradient and residual read, new residual written, payload written (or read,
// and the result written). `share` is its part of the memory bandwidth of one thread: the best of a = b + s c and a = a + s b on
// arrays of the same size, counted and timed in the same way (what the system reads before it overwrites is not counted).
//
// Top-K: `select` is std::nth_element alone on magnitudes that lie ready; `plain` is the same work as the codec's, written
// plainly with nth_element. `in_place` has one memory for both residuals, the others read one and write another.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <memory>
#include <vector>

#include "core/rng.h"
#include "optimized/compression/block_quantize.h"
#include "optimized/compression/power_sgd.h"
#include "optimized/compression/random_k.h"
#include "optimized/compression/sign.h"
#include "optimized/compression/top_k.h"
#include "optimized/memory/arena.h"

namespace tandem {
namespace {

constexpr std::int64_t kElements = std::int64_t{1} << 24;
constexpr std::int64_t kPercent = kElements / 100;

/// Operands of a codec, on huge pages.
class Operands {
 public:
  explicit Operands(std::int64_t payload_bytes = 0)
      : gradient_(make(4 * kElements)),
        residual_(make(4 * kElements)),
        new_residual_(make(4 * kElements)),
        payload_(make(payload_bytes)) {
    // A table, because kElements normal numbers take seconds.
    CounterRng rng(1, "bench");
    std::vector<float> table(65537);
    for (float& value : table) value = static_cast<float>(rng.next_normal());
    for (std::size_t i = 0; i < gradient().size(); ++i) {
      gradient()[i] = table[i * 7919 % table.size()] * (1.0F + 1e-7F * static_cast<float>(i % 1000003));
      residual()[i] = 0.1F * table[i * 104729 % table.size()];
    }
    std::ranges::fill(new_residual(), 0.0F);
    std::ranges::fill(payload(), std::byte{0});
  }

  std::span<float> gradient() { return floats(gradient_); }
  std::span<float> residual() { return floats(residual_); }
  std::span<float> new_residual() { return floats(new_residual_); }
  std::span<std::byte> payload() {
    return {static_cast<std::byte*>(payload_.data()), static_cast<std::size_t>(payload_.size_bytes())};
  }

 private:
  Arena::Buffer make(std::int64_t bytes) { return arena_.allocate(bytes, MemoryCategory::workspace); }
  static std::span<float> floats(const Arena::Buffer& buffer) { return buffer.view(DType::f32, {kElements}).as<float>(); }

  Arena arena_;
  Arena::Buffer gradient_, residual_, new_residual_, payload_;
};

// a = b + s c, of which a may be b.
void scaled_sum(const float* b, const float* c, float* a) {
  run_with(
      best_instruction_set(), [&]() __attribute__((always_inline)) {
        const float* const first = b;
        const float* const second = c;
        float* const to = a;
#pragma GCC ivdep
        for (std::int64_t i = 0; i < kElements; ++i) to[i] = first[i] + 0.5F * second[i];
      });
}

double measure_peak() {
  Operands operands;
  double best = 0.0;
  for (int repetition = 0; repetition < 20; ++repetition) {
    const float* const b = repetition % 2 == 0 ? operands.residual().data() : operands.new_residual().data();
    const std::clock_t begin = std::clock();
    scaled_sum(b, operands.gradient().data(), operands.new_residual().data());
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    best = std::max(best, 12.0 * static_cast<double>(kElements) / seconds);
  }
  return best;
}

double peak_bytes_per_second() {
  static const double peak = measure_peak();
  return peak;
}

void report(benchmark::State& state, std::int64_t bytes) {
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["share"] =
      benchmark::Counter(static_cast<double>(state.iterations() * bytes) / peak_bytes_per_second(), benchmark::Counter::kIsRate);
}

// The peak again, as the other numbers are made.
void memory(benchmark::State& state) {
  Operands operands;
  for (auto _ : state) {
    scaled_sum(operands.new_residual().data(), operands.gradient().data(), operands.new_residual().data());
    benchmark::ClobberMemory();
  }
  report(state, 12 * kElements);
}

enum class Residuals { none, separate, in_place };

void compress(benchmark::State& state, const std::shared_ptr<Codec>& codec, Residuals residuals) {
  const std::int64_t payload_bytes = codec->payload_bytes(kElements);
  Operands operands(payload_bytes);
  CompressCall call = {.gradient = operands.gradient(), .residual = {}, .new_residual = {}, .payload = operands.payload()};
  if (residuals != Residuals::none) call.residual = operands.residual();
  if (residuals == Residuals::separate) call.new_residual = operands.new_residual();
  if (residuals == Residuals::in_place) call.new_residual = operands.residual();
  for (auto _ : state) {
    if (!codec->compress(call)) state.SkipWithError("not finite");
    benchmark::ClobberMemory();
  }
  report(state, (residuals == Residuals::none ? 4 : 12) * kElements + payload_bytes);
}

void decompress(benchmark::State& state, const std::shared_ptr<Codec>& codec, bool accumulate) {
  const std::int64_t payload_bytes = codec->payload_bytes(kElements);
  Operands operands(payload_bytes);
  if (!codec->compress({.gradient = operands.gradient(), .residual = {}, .new_residual = {}, .payload = operands.payload()})) {
    state.SkipWithError("not finite");
  }
  for (auto _ : state) {
    if (accumulate) {
      codec->decompress_accumulate(operands.payload(), operands.new_residual(), {});
    } else {
      codec->decompress(operands.payload(), operands.new_residual(), {});
    }
    benchmark::ClobberMemory();
  }
  report(state, (accumulate ? 8 : 4) * kElements + payload_bytes);
}

void top_k_select(benchmark::State& state) {
  Operands operands;
  const std::span<float> magnitudes = operands.new_residual();
  for (auto _ : state) {
    state.PauseTiming();
    std::ranges::transform(operands.gradient(), magnitudes.begin(), [](float value) { return std::abs(value); });
    state.ResumeTiming();
    std::nth_element(magnitudes.begin(), magnitudes.begin() + kPercent - 1, magnitudes.end(), std::greater<>());
    benchmark::ClobberMemory();
  }
}

void top_k_plain(benchmark::State& state) {
  Operands operands;
  const std::span<float> c = operands.new_residual();
  std::vector<float> magnitudes(c.size()), values;
  std::vector<std::int32_t> indices;
  for (auto _ : state) {
    values.clear();
    indices.clear();
    for (std::size_t i = 0; i < c.size(); ++i) {
      c[i] = operands.gradient()[i] + operands.residual()[i];
      magnitudes[i] = std::abs(c[i]);
    }
    std::nth_element(magnitudes.begin(), magnitudes.begin() + kPercent - 1, magnitudes.end(), std::greater<>());
    const float least = magnitudes[static_cast<std::size_t>(kPercent - 1)];
    for (std::size_t i = 0; i < c.size(); ++i) {
      if (std::abs(c[i]) < least) continue;
      indices.push_back(static_cast<std::int32_t>(i));
      values.push_back(c[i]);
      c[i] = 0.0F;
    }
    benchmark::ClobberMemory();
  }
  report(state, 12 * kElements + 8 * kPercent);
}

// One rank's work in a step of a [4096, 4096] matrix.
void power_sgd(benchmark::State& state) {
  const PowerSgdShape shape = {4096, kElements / 4096, static_cast<int>(state.range(0))};
  Operands operands;
  std::vector<float> q(static_cast<std::size_t>(shape.rank * shape.columns)), own = q;
  std::vector<float> p(static_cast<std::size_t>(shape.rank * shape.rows));
  power_sgd_start(shape, 1, "bench", q);
  const std::span<float> c = operands.new_residual();
  for (auto _ : state) {
    bool finite = power_sgd_project(shape, operands.gradient(), operands.residual(), q, c, p);
    power_sgd_orthogonalize(shape, p);
    finite = power_sgd_back_project(shape, c, p, own) && finite;
    power_sgd_subtract(shape, p, own, c);
    if (!finite) state.SkipWithError("not finite");
    benchmark::ClobberMemory();
  }
  report(state, 24 * kElements);  // 12 to form C, 4 to read it for the right factor, 8 to update it
}

void best_of(benchmark::internal::Benchmark* benchmark) {
  benchmark->Unit(benchmark::kMillisecond)
      ->ComputeStatistics("least", [](const std::vector<double>& values) { return *std::ranges::min_element(values); })
      ->ComputeStatistics("most", [](const std::vector<double>& values) { return *std::ranges::max_element(values); });
}

template <class CodecType, class... Arguments>
std::shared_ptr<Codec> make(Arguments... arguments) {
  return std::make_shared<CodecType>(arguments...);
}

BENCHMARK(memory)->Apply(best_of);
BENCHMARK_CAPTURE(compress, int8_256_in_place, make<BlockQuantizeCodec>(8, 256), Residuals::in_place)->Apply(best_of);
BENCHMARK_CAPTURE(compress, int8_256_separate, make<BlockQuantizeCodec>(8, 256), Residuals::separate)->Apply(best_of);
BENCHMARK_CAPTURE(compress, int8_256_no_feedback, make<BlockQuantizeCodec>(8, 256), Residuals::none)->Apply(best_of);
BENCHMARK_CAPTURE(compress, int8_64_in_place, make<BlockQuantizeCodec>(8, 64), Residuals::in_place)->Apply(best_of);
BENCHMARK_CAPTURE(compress, int4_256_in_place, make<BlockQuantizeCodec>(4, 256), Residuals::in_place)->Apply(best_of);
BENCHMARK_CAPTURE(compress, sign_256_in_place, make<SignCodec>(256), Residuals::in_place)->Apply(best_of);
BENCHMARK_CAPTURE(compress, top_k_percent_in_place, make<TopKCodec>(kPercent), Residuals::in_place)->Apply(best_of);
BENCHMARK_CAPTURE(compress, top_k_percent_separate, make<TopKCodec>(kPercent), Residuals::separate)->Apply(best_of);
BENCHMARK(top_k_select)->Apply(best_of);
BENCHMARK(top_k_plain)->Apply(best_of);
BENCHMARK_CAPTURE(compress, random_k_percent_in_place, make<RandomKCodec>(kPercent, 1), Residuals::in_place)->Apply(best_of);
BENCHMARK_CAPTURE(decompress, int8_256, make<BlockQuantizeCodec>(8, 256), false)->Apply(best_of);
BENCHMARK_CAPTURE(decompress, int8_256_accumulate, make<BlockQuantizeCodec>(8, 256), true)->Apply(best_of);
BENCHMARK_CAPTURE(decompress, int4_256_accumulate, make<BlockQuantizeCodec>(4, 256), true)->Apply(best_of);
BENCHMARK_CAPTURE(decompress, sign_256_accumulate, make<SignCodec>(256), true)->Apply(best_of);
BENCHMARK_CAPTURE(decompress, top_k_percent_accumulate, make<TopKCodec>(kPercent), true)->Apply(best_of);
BENCHMARK(power_sgd)->Arg(1)->Arg(4)->Arg(16)->Apply(best_of);

}  // namespace
}  // namespace tandem
