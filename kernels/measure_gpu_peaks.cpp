// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "core/error.h"
#include "kernels/device_clock.h"
#include "kernels/kernels.h"

namespace tandem {
namespace {

double matmul_peak(Kernels& kernels, DType dtype, std::int64_t side) {
  Memory& memory = kernels.memory();
  const OwnedTensor x(memory, dtype, {side, side}), w(memory, dtype, {side, side}), y(memory, dtype, {side, side});
  fill_with_noise(memory, x.view(), 1, 1.0F);
  fill_with_noise(memory, w.view(), 2, 1.0F);
  const double seconds = seconds_per_call(memory, 3, 10, [&] { kernels.linear_forward(x.view(), w.view(), {}, y.view()); });
  const auto n = static_cast<double>(side);
  return 2.0 * n * n * n / seconds;
}

double copy_peak(Memory& memory, std::int64_t size_bytes) {
  const OwnedTensor from(memory, DType::u8, {size_bytes}), to(memory, DType::u8, {size_bytes});
  memory.set_bytes(from.view().data(), 1, size_bytes);
  const double seconds = seconds_per_call(memory, 3, 10, [&] { copy(memory, from.view(), to.view()); });
  return 2.0 * static_cast<double>(size_bytes) / seconds;
}

}  // namespace

void fill_with_noise(Memory& memory, const TensorView& tensor, std::uint32_t seed, float scale) {
  TANDEM_CHECK(tensor.dtype() == DType::f32 || is_16bit(tensor.dtype()));
  constexpr std::int64_t kPiece = 1 << 18;  // elements; then they are repeated
  const std::int64_t count = tensor.num_elements(), piece = std::min(count, kPiece);
  const auto element = static_cast<std::int64_t>(size_bytes(tensor.dtype()));
  std::vector<std::byte> values(static_cast<std::size_t>(piece * element));
  std::uint32_t state = seed * 2654435761U + 12345U;
  for (std::int64_t i = 0; i < piece; ++i) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    const float value = (static_cast<float>(state >> 8) * 0x1p-23F - 1.0F) * scale;
    if (tensor.dtype() == DType::f32) {
      reinterpret_cast<std::uint32_t*>(values.data())[i] = std::bit_cast<std::uint32_t>(value);
    } else {
      reinterpret_cast<std::uint16_t*>(values.data())[i] =
          tensor.dtype() == DType::bf16 ? to_bf16_bits(value) : to_f16_bits(value);
    }
  }
  auto* const begin = static_cast<std::byte*>(tensor.data());
  memory.write(values.data(), begin, piece * element);
  for (std::int64_t done = piece; done < count; done *= 2) {
    memory.copy(begin, begin + done * element, std::min(done, count - done) * element);
  }
}

MeasuredPeaks measure_gpu_peaks(const std::string& backend, int device) {
  const auto kernels = make_cuda_kernels(backend, {.device = device});
  const bool emulated = backend == "simt";
  MeasuredPeaks peaks;
  peaks.memory_bytes_per_second = copy_peak(kernels->memory(), emulated ? 1 << 16 : 1 << 30);
  peaks.bf16_matmul_flops_per_second = matmul_peak(*kernels, DType::bf16, emulated ? 32 : 8192);
  peaks.fp32_matmul_flops_per_second = matmul_peak(*kernels, DType::f32, emulated ? 32 : 4096);
  return peaks;
}

}  // namespace tandem
