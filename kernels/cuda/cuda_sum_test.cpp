// SPDX-License-Identifier: Apache-2.0
// Memory::sum_in_order on a device against the definition, to the bit.
#include <cstring>
#include <vector>

#include "kernels/cpu/sum_in_order.h"
#include "kernels/cuda/device_test_support.h"

namespace tandem::device_test {
namespace {

class CudaSum : public DeviceTest {
 protected:
  /// `num_sources` arrays, each `misaligned` elements (of a number that differs where `apart`) behind a multiple of 256 bytes,
  /// summed to the first of them, or to all, by the definition and on the device.
  void check(DType dtype, std::size_t num_sources, std::int64_t count, bool to_all, std::size_t misaligned, bool apart) {
    SCOPED_TRACE(fmt::format("{} {} sources, {} elements, to all {}, {} off{}", name(dtype), num_sources, count, to_all,
                             misaligned, apart ? ", apart" : ""));
    constexpr std::size_t kMargin = 256;
    const std::size_t size = static_cast<std::size_t>(count) * size_bytes(dtype), room = (size + 2 * kMargin + 255) / 256 * 256;
    const auto shift = [&](std::size_t s) { return (apart ? s % 2 + misaligned : misaligned) * size_bytes(dtype) % kMargin; };
    std::vector<std::byte> host(room * num_sources);
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<std::byte>((i * 7 + i / room * 31 + i / 3) % 120);
    Memory& memory = kernels().memory();
    const auto total = static_cast<std::int64_t>(host.size());
    auto* const device = static_cast<std::byte*>(memory.reserve(total));
    memory.write(host.data(), device, total);
    std::vector<const std::byte*> sources, device_sources;
    std::vector<std::byte*> destinations, device_destinations;
    for (std::size_t s = 0; s < num_sources; ++s) {
      sources.push_back(host.data() + s * room + shift(s));
      device_sources.push_back(device + s * room + shift(s));
      if (!to_all && s > 0) continue;
      destinations.push_back(host.data() + s * room + shift(s));
      device_destinations.push_back(device + s * room + shift(s));
    }
    memory.sum_in_order(dtype, device_sources, device_destinations, count);
    std::vector<std::byte> got(host.size());
    memory.read(device, got.data(), total);
    memory.give_back(device, total);
    tandem::sum_in_order(dtype, sources, destinations, count);
    EXPECT_TRUE(got == host) << "other bits, or written outside";
  }
};

TEST_F(CudaSum, HasTheBitsOfTheDefinitionForEveryDtypeNumberAndPlace) {
  for (const DType dtype :
       {DType::f32, DType::f64, DType::bf16, DType::f16, DType::i64, DType::i32, DType::i16, DType::u16, DType::i8, DType::u8}) {
    for (const std::size_t num_sources : {1U, 2U, 3U, 5U, 6U, 9U}) {
      for (const bool to_all : {false, true}) {
        check(dtype, num_sources, num_sources == 3 ? 5003 : 301, to_all, num_sources % 4, num_sources == 5);
      }
    }
    for (const std::int64_t count : {0, 1, 2, 7, 16, 17}) check(dtype, 2, count, true, 1, false);
  }
  check(DType::f32, 64, 100, true, 0, false);
}

TEST_F(CudaSum, AddsHalvesInFp32AndRoundsOnceAndOverflowsToInfinity) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const double largest = dtype == DType::bf16 ? 0x1.FEp127 : 65504.0, step = 2 * unit_roundoff(dtype);
    const std::vector<double> a = {1, largest, -largest, std::numeric_limits<double>::quiet_NaN()},
                              b = {step / 2 + step / 8, largest, -largest, 1}, c = {-step / 8, 1, -1, 1};
    const DeviceTensor first(kernels(), dtype, {4}, a), second(kernels(), dtype, {4}, b), third(kernels(), dtype, {4}, c),
        sum(kernels(), dtype, {4});
    const auto bytes = [](const DeviceTensor& tensor) { return static_cast<std::byte*>(tensor.view().data()); };
    const std::vector<const std::byte*> sources = {bytes(first), bytes(second), bytes(third)};
    const std::vector<std::byte*> destinations = {bytes(sum)};
    kernels().memory().sum_in_order(dtype, sources, destinations, 4);
    const std::vector<double> got = sum.values();
    EXPECT_EQ(got[0], 1.0) << "a tie goes to even; a sum rounded in between would be above it";
    EXPECT_EQ(got[1], std::numeric_limits<double>::infinity());
    EXPECT_EQ(got[2], -std::numeric_limits<double>::infinity());
    EXPECT_TRUE(std::isnan(got[3]));
  }
}

TEST_F(CudaSum, RefusesMoreSourcesThanItsTableHolds) {
  const DeviceTensor x(kernels(), DType::f32, {4});
  auto* const data = static_cast<std::byte*>(x.view().data());
  const std::vector<const std::byte*> many(65, data), misaligned = {data + 1};
  const std::vector<std::byte*> one = {data};
  EXPECT_THROW(kernels().memory().sum_in_order(DType::f32, many, one, 4), ContractError);
  EXPECT_THROW(kernels().memory().sum_in_order(DType::f32, misaligned, one, 3), ContractError);
}

}  // namespace
}  // namespace tandem::device_test
