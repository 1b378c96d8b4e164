// SPDX-License-Identifier: Apache-2.0
#include <ctime>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>

#include <fmt/format.h>

#include "kernels/cpu/huge_buffer.h"
#include "kernels/kernels.h"
#include "optimized/probe/measure.h"

namespace tandem::probing {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr const char* kConverted = "converted to fp32";

// Of this thread on its core: what else runs on the machine takes the core away for a while, not the time of the work.
double core_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Shortest of the repetitions that fit in `seconds`, at least two; the first call is not counted.
double best_seconds(double seconds, const std::function<void()>& body) {
  body();
  double best = 1e30;
  const double begin = now_seconds();
  for (int i = 0; i < 2 || now_seconds() - begin < seconds; ++i) {
    const double start = core_seconds();
    body();
    best = std::min(best, core_seconds() - start);
  }
  return best;
}

struct Shape {
  std::int64_t m, n, k;
  bool fitted;
};
// Square, wide, short in the summed dimension, few rows, few columns; then those kept apart. Sides that are powers of two share
// cache sets and are slower than their neighbours: both kinds are here, as they are in models.
constexpr std::array<Shape, 26> kShapes = {
    {{64, 64, 64, true},     {128, 128, 128, true},    {256, 256, 256, true},   {384, 384, 384, true},  {512, 512, 512, true},
     {768, 768, 768, true},  {1024, 1024, 1024, true}, {1024, 3072, 768, true}, {256, 1024, 256, true}, {512, 1536, 384, true},
     {1024, 1024, 32, true}, {768, 768, 64, true},     {512, 512, 128, true},   {768, 1152, 256, true}, {8, 1024, 1024, true},
     {32, 1024, 1024, true}, {64, 768, 3072, true},    {128, 2048, 512, true},  {1024, 64, 1024, true}, {1024, 32, 512, true},
     {16, 256, 256, true},   {384, 1152, 384, false},  {640, 640, 640, false},  {96, 1024, 512, false}, {768, 512, 192, false},
     {512, 2048, 512, false}}};

// Memory that products read from at ever new places, so that their operands come from memory as those of a training step do, and
// where they write.
class Operands {
 public:
  explicit Operands(std::int64_t bytes)
      : inputs_(static_cast<std::size_t>(bytes / 4), 0.5F), results_(static_cast<std::size_t>(16 * kMiB / 4), 0.0F) {}

  [[nodiscard]] TensorView next(DType dtype, std::int64_t rows, std::int64_t columns) {
    const std::int64_t needed = rows * columns * static_cast<std::int64_t>(size_bytes(dtype));
    const auto all = static_cast<std::int64_t>(inputs_.span().size_bytes());
    if (at_ + needed > all) at_ = 0;
    auto* const begin = reinterpret_cast<std::byte*>(inputs_.data()) + at_;
    at_ += (needed + 63) / 64 * 64;
    return {begin, dtype, {rows, columns}};
  }
  [[nodiscard]] TensorView result(DType dtype, std::int64_t rows, std::int64_t columns) const {
    return {results_.data(), dtype, {rows, columns}};
  }
  [[nodiscard]] std::span<float> all() const { return inputs_.span(); }

 private:
  cpu::HugeBuffer inputs_, results_;
  std::int64_t at_ = 0;
};

void measure_matrices(Kernels& kernels, Operands& operands, double budget, double seconds, MachineFigures& figures) {
  // Large products of a short probe would be all of it.
  const double most_flops = 6e8 * std::max(1.0, seconds);
  const std::vector<DType> dtypes = figures.converts_bf16 ? std::vector{DType::f32} : std::vector{DType::f32, DType::bf16};
  const double each = budget / static_cast<double>(kShapes.size() * dtypes.size());
  for (const DType dtype : dtypes) {
    for (const Shape& shape : kShapes) {
      const double flops = 2.0 * static_cast<double>(shape.m * shape.n * shape.k);
      if (flops > most_flops) continue;
      const double best = best_seconds(each, [&] {
        const TensorView x = operands.next(dtype, shape.m, shape.k), weight = operands.next(dtype, shape.k, shape.n);
        kernels.linear_forward(x, weight, {}, operands.result(dtype, shape.m, shape.n));
      });
      MatrixSample sample{shape.m, shape.n, shape.k, std::string(name(dtype)), best, flops / best};
      sample.fitted = shape.fitted;
      figures.matrices.push_back(std::move(sample));
    }
  }
}

void measure_memory(Kernels& kernels, Operands& operands, double budget, MachineFigures& figures) {
  const std::span<float> all = operands.all();
  const auto half = static_cast<std::int64_t>(all.size() / 2);
  float* const a = all.data();
  float* const b = a + half;
  const std::size_t bytes = static_cast<std::size_t>(half) * sizeof(float);
  const double copied = best_seconds(budget / 3, [&] { std::memcpy(a, b, bytes); });
  figures.copy_bytes_per_second = 2 * static_cast<double>(bytes) / copied;
  // The engine's own: y += x reads both and writes one.
  const TensorView x(b, DType::f32, {half}), y(a, DType::f32, {half});
  kernels.fill(y, 0);
  figures.add_bytes_per_second = 3 * static_cast<double>(bytes) / best_seconds(budget / 3, [&] { kernels.add(x, y); });
  figures.fastest_copy_bytes_per_second = figures.copy_bytes_per_second / 2;
  for (const std::size_t size : {std::size_t{64} << 10, std::size_t{256} << 10, std::size_t{1} << 20, std::size_t{4} << 20}) {
    const double seconds = best_seconds(budget / 12, [&] { std::memcpy(a, b, size); });
    figures.fastest_copy_bytes_per_second = std::max(figures.fastest_copy_bytes_per_second, static_cast<double>(size) / seconds);
  }
}

void measure_attention(Kernels& kernels, Operands& operands, double budget, MachineFigures& figures) {
  const AttentionProbe& probe = figures.attention;
  AttentionShape shape;
  shape.rows = probe.rows;
  shape.sequence = shape.dropout_sequence = probe.sequence;
  shape.heads = probe.heads;
  shape.head_size = probe.head_size;
  const std::int64_t width = shape.heads * shape.head_size;
  const TensorView qkv = operands.next(DType::f32, shape.sequence, 3 * width).reshaped({1, shape.sequence, 3 * width});
  const TensorView dout = operands.next(DType::f32, shape.sequence, width);
  cpu::HugeBuffer out_memory(static_cast<std::size_t>(shape.sequence * width), 0.0F);
  cpu::HugeBuffer lse_memory(static_cast<std::size_t>(shape.sequence * shape.heads), 0.0F);
  const TensorView out(out_memory.data(), DType::f32, {shape.sequence, width});
  const TensorView lse(lse_memory.data(), DType::f32, {1, shape.heads, shape.sequence});
  const TensorView dqkv = operands.result(DType::f32, shape.sequence, 3 * width).reshaped({1, shape.sequence, 3 * width});
  figures.attention_seconds = best_seconds(budget / 2, [&] { kernels.attention_forward(shape, {}, qkv, out, lse); });
  figures.attention_backward_seconds =
      best_seconds(budget / 2, [&] { kernels.attention_backward(shape, {}, dout, qkv, out, lse, dqkv); });
}

}  // namespace

MachineFigures measure_machine(double seconds) {
  MachineFigures figures;
  const auto kernels = make_cpu_kernels({});
  figures.converts_bf16 = kernels->info().bf16_products == kConverted;
  Operands operands((seconds < 2 ? 48 : 96) * kMiB);
  const double begin = now_seconds(), core_begin = core_seconds();
  measure_matrices(*kernels, operands, 0.7 * seconds, seconds, figures);
  measure_attention(*kernels, operands, 0.1 * seconds, figures);
  measure_memory(*kernels, operands, 0.2 * seconds, figures);
  figures.core_share = (core_seconds() - core_begin) / (now_seconds() - begin);
  return figures;
}

}  // namespace tandem::probing
