// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/device_clock.h"
#include "kernels/gpu_device.h"
#include "kernels/kernels.h"
#include "optimized/probe/measure.h"

namespace tandem::probing {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

struct Shape {
  std::int64_t m, n, k;
  bool fitted;
};
// Square ones of less than a wave of tiles up to the peak, those of GPT-2 and of larger models with few and many rows, short ones
// in the summed dimension; then those kept apart.
constexpr std::array<Shape, 20> kShapes = {
    {{512, 512, 512, true},     {1024, 1024, 1024, true},  {2048, 2048, 2048, true},  {4096, 4096, 4096, true},
     {8192, 8192, 8192, true},  {8192, 2304, 768, true},   {8192, 768, 3072, true},   {16384, 3072, 768, true},
     {2048, 12288, 4096, true}, {4096, 4096, 11008, true}, {256, 4096, 4096, true},   {64, 4096, 4096, true},
     {8192, 8192, 64, true},    {4096, 4096, 256, true},   {4096, 768, 4096, true},   {8192, 50304, 768, true},
     {3072, 3072, 3072, false}, {8192, 768, 768, false},   {1024, 8192, 2048, false}, {6144, 6144, 512, false}}};
// On an emulated GPU, to see that it runs.
constexpr std::array<Shape, 3> kSmallShapes = {{{16, 16, 16, true}, {32, 16, 24, true}, {24, 24, 16, false}}};

// Where products read and write: at ever new places, so that operands come from memory as those of a training step do.
class Operands {
 public:
  Operands(Memory& memory, std::int64_t bytes) : memory_(memory, DType::f32, {bytes / 4}), bytes_(bytes) {
    fill_with_noise(memory, memory_.view(), 1, 1.0F);
  }
  [[nodiscard]] TensorView next(DType dtype, const tandem::Shape& shape) {
    const std::int64_t needed = num_elements(shape) * static_cast<std::int64_t>(size_bytes(dtype));
    if (at_ + needed > bytes_) at_ = 0;
    auto* const begin = static_cast<std::byte*>(memory_.view().data()) + at_;
    at_ += (needed + 255) / 256 * 256;
    return {begin, dtype, shape};
  }
  [[nodiscard]] TensorView half(int which) const {
    const std::int64_t elements = bytes_ / 8;
    return {static_cast<float*>(memory_.view().data()) + which * elements, DType::f32, {elements}};
  }

 private:
  OwnedTensor memory_;
  std::int64_t bytes_, at_ = 0;
};

// As many calls as fit, at least two; the first round finds out how long one takes.
double best_seconds(Memory& memory, double budget, const std::function<void()>& body) {
  const double once = std::max(seconds_per_call(memory, 1, 1, body), 1e-7);
  constexpr int kRounds = 3;
  const int calls = std::clamp(static_cast<int>(budget / (kRounds * once)), 2, 200);
  return seconds_per_call(memory, kRounds, calls, body);
}

template <std::size_t count>
void measure_matrices(Kernels& kernels, Operands& operands, const std::array<Shape, count>& shapes, double budget,
                      MachineFigures& figures) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Shape& shape : shapes) {
      const double seconds = best_seconds(kernels.memory(), budget / (2 * count), [&] {
        const TensorView x = operands.next(dtype, {shape.m, shape.k}), weight = operands.next(dtype, {shape.k, shape.n});
        kernels.linear_forward(x, weight, {}, operands.next(dtype, {shape.m, shape.n}));
      });
      const double flops = 2.0 * static_cast<double>(shape.m * shape.n * shape.k);
      MatrixSample sample{shape.m, shape.n, shape.k, std::string(name(dtype)), seconds, flops / seconds};
      sample.fitted = shape.fitted;
      figures.matrices.push_back(std::move(sample));
    }
  }
}

void measure_memory(Kernels& kernels, const Operands& operands, double budget, MachineFigures& figures) {
  Memory& memory = kernels.memory();
  const TensorView x = operands.half(0), y = operands.half(1);
  const auto bytes = static_cast<double>(x.size_bytes());
  const double copied = best_seconds(memory, budget / 3, [&] { copy(memory, x, y); });
  figures.copy_bytes_per_second = 2 * bytes / copied;
  figures.fastest_copy_bytes_per_second = bytes / copied;
  kernels.fill(y, 0);
  figures.add_bytes_per_second = 3 * bytes / best_seconds(memory, budget / 3, [&] { kernels.add(x, y); });
  // What a snapshot takes: out of the device, by the wall.
  std::vector<std::byte> host(static_cast<std::size_t>(std::min(x.size_bytes(), 256 * kMiB)));
  double best = 0;
  for (int round = 0; round < 3; ++round) {
    const double begin = now_seconds();
    memory.read(x.data(), host.data(), std::ssize(host));
    best = std::max(best, static_cast<double>(host.size()) / (now_seconds() - begin));
  }
  figures.snapshot_bytes_per_second = best;
}

void measure_attention(Kernels& kernels, double budget, MachineFigures& figures) {
  const AttentionProbe& probe = figures.attention;
  Memory& memory = kernels.memory();
  AttentionShape shape;
  shape.rows = probe.rows;
  shape.sequence = shape.dropout_sequence = probe.sequence;
  shape.heads = probe.heads;
  shape.head_size = probe.head_size;
  const std::int64_t width = probe.heads * probe.head_size;
  const OwnedTensor qkv(memory, probe.dtype, {probe.rows, probe.sequence, 3 * width});
  const OwnedTensor dqkv(memory, probe.dtype, {probe.rows, probe.sequence, 3 * width});
  const OwnedTensor out(memory, probe.dtype, {probe.rows * probe.sequence, width});
  const OwnedTensor dout(memory, probe.dtype, {probe.rows * probe.sequence, width});
  const OwnedTensor lse(memory, DType::f32, {probe.rows, probe.heads, probe.sequence});
  fill_with_noise(memory, qkv.view(), 2, 1.0F);
  fill_with_noise(memory, dout.view(), 3, 1.0F);
  figures.attention_seconds =
      best_seconds(memory, budget / 2, [&] { kernels.attention_forward(shape, {}, qkv.view(), out.view(), lse.view()); });
  figures.attention_backward_seconds = best_seconds(memory, budget / 2, [&] {
    kernels.attention_backward(shape, {}, dout.view(), qkv.view(), out.view(), lse.view(), dqkv.view());
  });
}

}  // namespace

MachineFigures measure_gpu(const std::string& backend, int device, double seconds) {
  const bool emulated = backend == "simt";
  const auto kernels = make_cuda_kernels(backend, {.device = device});
  MachineFigures figures;
  const GpuDevice gpu = describe_gpu(backend, device);
  figures.gpu = gpu.name;
  figures.gpu_memory_bytes = static_cast<double>(gpu.memory_bytes);
  figures.multiprocessors = gpu.multiprocessors;
  figures.attention = {emulated ? 1 : 8, emulated ? 16 : 1024, emulated ? 1 : 12, emulated ? 16 : 64, DType::bf16};
  {
    Operands operands(kernels->memory(), emulated ? 1 << 18 : 4096 * kMiB);
    if (emulated) {
      measure_matrices(*kernels, operands, kSmallShapes, 0.7 * seconds, figures);
    } else {
      measure_matrices(*kernels, operands, kShapes, 0.7 * seconds, figures);
    }
    measure_memory(*kernels, operands, 0.2 * seconds, figures);
  }
  measure_attention(*kernels, 0.1 * seconds, figures);
  return figures;
}

}  // namespace tandem::probing
