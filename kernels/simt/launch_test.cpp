// SPDX-License-Identifier: Apache-2.0
// Copies and matrix instructions of kernels/cuda/launch.cuh as the emulator has them, against their definitions.
#include "kernels/cuda/launch.cuh"

#include <gtest/gtest.h>

#include <type_traits>

#include "core/dtype.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/simt/test_support.h"

namespace tandem::simt_gpu {
namespace {

constexpr int kTile = 16;

/// d [16, 8] = a [16, 16] b [16, 8], fragments by hand from memory: the layout of the PTX ISA, written down a second time.
template <class T>
__global__ void multiply_by_hand(const T* a, const T* b, float* d) {
  const int l = static_cast<int>(threadIdx.x), row = l / 4, pair = 2 * (l % 4);
  const auto two = [](T low, T high) { return low.bits | std::uint32_t{high.bits} << 16; };
  const std::uint32_t a_part[4] = {
      two(a[row * 16 + pair], a[row * 16 + pair + 1]), two(a[(row + 8) * 16 + pair], a[(row + 8) * 16 + pair + 1]),
      two(a[row * 16 + pair + 8], a[row * 16 + pair + 9]), two(a[(row + 8) * 16 + pair + 8], a[(row + 8) * 16 + pair + 9])};
  const std::uint32_t b_part[2] = {two(b[pair * 8 + row], b[(pair + 1) * 8 + row]),
                                   two(b[(pair + 8) * 8 + row], b[(pair + 9) * 8 + row])};
  float sums[4] = {1000, 1000, 1000, 1000};
  mma_16x8x16(sums, a_part, b_part, T{});
  d[row * 8 + pair] = sums[0];
  d[row * 8 + pair + 1] = sums[1];
  d[(row + 8) * 8 + pair] = sums[2];
  d[(row + 8) * 8 + pair + 1] = sums[3];
}

/// The same by way of shared memory: cp.async, ldmatrix of a, transposed ldmatrix of b.
template <class T>
__global__ void multiply_through_shared(const T* a, const T* b, float* d) {
  __shared__ __align__(16) T a_tile[kTile * kTile];
  __shared__ __align__(16) T b_tile[kTile * 8];
  const int l = static_cast<int>(threadIdx.x);
  copy_async_16(a_tile + 8 * l, a + 8 * l);
  copy_async_commit();
  if (l < 16) copy_async_16(b_tile + 8 * l, b + 8 * l);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  std::uint32_t a_part[4], b_part[4];
  load_matrix_x4(a_part, a_tile + (l % 16) * kTile + l / 16 * 8);
  load_matrix_x4_transposed(b_part, b_tile + (l % 16) * 8);
  float sums[4] = {1000, 1000, 1000, 1000};
  mma_16x8x16(sums, a_part, {b_part[0], b_part[1]}, T{});
  for (int i = 0; i < 4; ++i) d[(l / 4 + i / 2 * 8) * 8 + 2 * (l % 4) + i % 2] = sums[i];
}

/// Bits seen: right after the copies were asked for, with the first group waited for, with both.
__global__ void look_at_copies(const std::uint32_t* from, std::uint32_t* seen) {
  __shared__ __align__(16) std::uint32_t tile[12];
  tile[0] = 5;
  copy_async_16(tile, from);
  copy_async_commit();
  copy_async_16(tile + 4, from + 4);
  copy_async_16_or_zero(tile + 8, nullptr, false);
  copy_async_commit();
  seen[0] = tile[0];
  copy_async_wait<1>();
  seen[1] = tile[0];
  seen[2] = tile[4];
  copy_async_wait<0>();
  seen[3] = tile[7];
  seen[4] = tile[8];
}

__global__ void copy_misaligned(const std::uint32_t* from) {
  __shared__ __align__(16) std::uint32_t tile[4];
  copy_async_16(tile, from + 1);
}

class Instructions : public testing::Test {
 protected:
  Stream stream_{make_stream()};
  StreamHandle stream() { return stream_.get(); }
};

template <class T>
T stored(float value) {
  return T{std::is_same_v<T, bf16> ? to_bf16_bits(value) : to_f16_bits(value)};
}

/// Small integers: every sum is exact in any order.
template <class T>
void expect_right_products(StreamHandle stream) {
  std::vector<T> a, b;
  std::vector<float> right(kTile * 8, 1000.0F);
  const auto a_of = [](int row, int inner) { return static_cast<float>((row * 7 + inner * 3) % 17 - 8); };
  const auto b_of = [](int inner, int column) { return static_cast<float>((inner * 5 + column * 11) % 13 - 6); };
  for (int row = 0; row < kTile; ++row) {
    for (int inner = 0; inner < kTile; ++inner) {
      a.push_back(stored<T>(a_of(row, inner)));
      for (int column = 0; column < 8; ++column)
        right[static_cast<std::size_t>(row * 8 + column)] += a_of(row, inner) * b_of(inner, column);
    }
  }
  for (int inner = 0; inner < kTile; ++inner) {
    for (int column = 0; column < 8; ++column) b.push_back(stored<T>(b_of(inner, column)));
  }
  const DeviceArray<T> a_device(stream, a), b_device(stream, b);
  const DeviceArray<float> by_hand(stream, kTile * 8), through_shared(stream, kTile * 8);

  launch(multiply_by_hand<T>, 1, 32, 0, stream, a_device.data(), b_device.data(), by_hand.data());
  launch(multiply_through_shared<T>, 1, 32, 0, stream, a_device.data(), b_device.data(), through_shared.data());

  EXPECT_EQ(by_hand.read(), right);
  EXPECT_EQ(through_shared.read(), right);
}

TEST_F(Instructions, MatrixProductsOfBothTypesAreThoseOfTheMatrices) {
  expect_right_products<bf16>(stream());
  expect_right_products<f16>(stream());
}

TEST_F(Instructions, AnAsynchronousCopyIsThereWhenItsGroupIsWaitedForAndNotBefore) {
  const DeviceArray<std::uint32_t> from(stream(), std::vector<std::uint32_t>{1, 2, 3, 4, 5, 6, 7, 8}), seen(stream(), 5);
  launch(look_at_copies, 1, 1, 0, stream(), from.data(), seen.data());
  EXPECT_EQ(seen.read(), (std::vector<std::uint32_t>{~0U, 1, ~0U, 8, 0}));
}

TEST_F(Instructions, AMisalignedCopyIsAnError) {
  const DeviceArray<std::uint32_t> from(stream(), std::vector<std::uint32_t>(8));
  launch(copy_misaligned, 1, 1, 0, stream(), from.data());
  EXPECT_NE(error_of(stream()).find("not 16-byte aligned"), std::string::npos) << error_of(stream());
}

/// C of a product with all that is fused into it, elements numbered so that sums are exact.
TEST_F(Instructions, ProductsOfTheEmulatorHaveTheirEpilogues) {
  const DeviceArray<float> a(stream(), std::vector<float>{1, 2, 3, 4, 5, 6});   // [2, 3]
  const DeviceArray<float> b(stream(), std::vector<float>{1, 0, 2, -1, 0, 3});  // [2, 3]: transposed
  const DeviceArray<float> bias(stream(), std::vector<float>{0.5F, -40}), c(stream(), std::vector<float>(4, 100)),
      before(stream(), 4);
  const auto products = make_matrix_products(devices().front());
  Product product = {.a = a.data(),
                     .b = b.data(),
                     .c = c.data(),
                     .rows = 2,
                     .columns = 2,
                     .inner = 3,
                     .a_stride = 3,
                     .b_stride = 3,
                     .c_stride = 2,
                     .transpose_b = Transposed::yes};

  product.beta = 1;
  products->multiply(product, stream());
  EXPECT_EQ(c.read(), (std::vector<float>{107, 108, 116, 114}));

  product.beta = 0;
  product.bias = bias.data();
  product.before_gelu = before.data();
  products->multiply(product, stream());
  EXPECT_EQ(before.read(), (std::vector<float>{7.5F, -32, 16.5F, -26}));
  EXPECT_EQ(c.read(), (std::vector<float>{7.5F, 0, 16.5F, 0}));
}

}  // namespace
}  // namespace tandem::simt_gpu
