// SPDX-License-Identifier: Apache-2.0
// The codes of gradients on a device against their definition, to the bit.
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/compression_kernels.h"
#include "kernels/cuda/device_test_support.h"
#include "reference/compression.h"

namespace tandem::device_test {
namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

/// Bytes of a device, between guards.
class DeviceBytes {
 public:
  DeviceBytes(Memory& memory, const void* values, std::size_t size, std::size_t misaligned)
      : memory_(memory), first_(kGuard + misaligned), size_(size), room_(static_cast<std::int64_t>(first_ + size + kGuard)) {
    Bytes bytes(static_cast<std::size_t>(room_), std::byte{0xA5});
    if (size > 0) std::memcpy(bytes.data() + first_, values, size);
    address_ = static_cast<std::byte*>(memory.reserve(room_));
    memory.write(bytes.data(), address_, room_);
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { memory_.give_back(address_, room_); }

  template <class T>
  [[nodiscard]] std::span<T> as() const {
    return {reinterpret_cast<T*>(address_ + first_), size_ / sizeof(T)};
  }
  template <class T>
  [[nodiscard]] std::vector<T> read() const {
    Bytes bytes(static_cast<std::size_t>(room_));
    memory_.read(address_, bytes.data(), room_);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      EXPECT_TRUE((i >= first_ && i < first_ + size_) || bytes[i] == std::byte{0xA5}) << "written outside, at " << i;
    }
    std::vector<T> values(size_ / sizeof(T));
    if (size_ > 0) std::memcpy(values.data(), bytes.data() + first_, size_);
    return values;
  }

 private:
  static constexpr std::size_t kGuard = 256;
  Memory& memory_;
  std::size_t first_, size_;
  std::int64_t room_;
  std::byte* address_ = nullptr;
};

/// A code on a device and its definition.
struct Code {
  std::string name;
  std::function<reference::Compressed<float>(const Floats&, const Floats&)> definition;
  std::function<Bytes(const reference::Compressed<float>&)> payload;
  std::function<void(CompressionKernels&, const CodeCall&, std::int32_t*)> encode;
  std::function<void(CompressionKernels&, std::span<const std::byte>, Decode, std::span<float>, std::int32_t*)> decode;
};

template <class T>
void append(Bytes& bytes, const std::vector<T>& values) {
  const std::size_t before = bytes.size();
  bytes.resize(before + values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data() + before, values.data(), values.size() * sizeof(T));
}

/// Scales, then `bits` of each code, the earlier ones lower; a block begins with a new byte.
Bytes packed(const reference::Compressed<float>& of, int bits, std::int64_t block) {
  Bytes bytes;
  append(bytes, of.values);
  for (std::size_t i = 0; i < of.codes.size(); ++i) {
    const int bit = static_cast<int>(i % static_cast<std::size_t>(block)) * bits % 8;
    if (bit == 0) bytes.push_back(std::byte{0});
    bytes.back() |= static_cast<std::byte>((of.codes[i] & ((1 << bits) - 1)) << bit);
  }
  return bytes;
}

Code integers(int bits, std::int64_t block) {
  return {fmt::format("int{}/{}", bits, block),
          [=](const Floats& g, const Floats& r) { return reference::quantize_blocks<float>(g, r, bits, block); },
          [=](const auto& of) { return packed(of, bits, block); },
          [=](CompressionKernels& kernels, const CodeCall& call, std::int32_t* refused) {
            kernels.quantize_blocks(bits, block, call, refused);
          },
          [=](CompressionKernels& kernels, std::span<const std::byte> payload, Decode decode, std::span<float> out,
              std::int32_t*) { kernels.dequantize_blocks(bits, block, payload, decode, out); }};
}

Code signs(std::int64_t block) {
  return {
      fmt::format("sign/{}", block), [=](const Floats& g, const Floats& r) { return reference::sign_blocks<float>(g, r, block); },
      [=](const auto& of) { return packed(of, 1, block); },
      [=](CompressionKernels& kernels, const CodeCall& call, std::int32_t* refused) { kernels.pack_signs(block, call, refused); },
      [=](CompressionKernels& kernels, std::span<const std::byte> payload, Decode decode, std::span<float> out, std::int32_t*) {
        kernels.unpack_signs(block, payload, decode, out);
      }};
}

Code largest(std::int64_t k) {
  return {
      fmt::format("top_k/{}", k), [=](const Floats& g, const Floats& r) { return reference::top_k<float>(g, r, k); },
      [](const auto& of) {
        Bytes bytes;
        append(bytes, of.indices);
        append(bytes, of.values);
        return bytes;
      },
      [=](CompressionKernels& kernels, const CodeCall& call, std::int32_t* refused) { kernels.select_top_k(k, call, refused); },
      [=](CompressionKernels& kernels, std::span<const std::byte> payload, Decode decode, std::span<float> out,
          std::int32_t* refused) { kernels.scatter_top_k(k, payload, decode, out, refused); }};
}

Floats normal(std::int64_t count, std::uint64_t seed, double stddev = 1.0) {
  return as<float>(random_numbers(DType::f32, count, seed, stddev));
}

/// Gradients that are hard on one code or another.
std::vector<std::pair<std::string, Floats>> inputs(std::int64_t count) {
  std::vector<std::pair<std::string, Floats>> result = {{"normal", normal(count, 3)}, {"tiny", normal(count, 4, 1e-39)}};
  Floats ties(static_cast<std::size_t>(count)), zeros(ties), wide(normal(count, 5));
  for (std::size_t i = 0; i < ties.size(); ++i) {
    ties[i] = static_cast<float>(static_cast<int>(i * 7 % 5) - 2);
    zeros[i] = i % 3 == 0 ? -0.0F : 0.0F;
    wide[i] = std::ldexp(wide[i], static_cast<int>(i * 37 % 200) - 120);
  }
  result.emplace_back("ties", ties);
  result.emplace_back("zeros", zeros);
  result.emplace_back("wide", wide);
  return result;
}

class CudaCompression : public DeviceTest {
 protected:
  /// Three steps of error feedback, one of them in place, and one without.
  void check(const Code& code, const Floats& gradient, const std::string& what) {
    SCOPED_TRACE(fmt::format("{}, {} elements, {}", code.name, gradient.size(), what));
    Floats residual;
    for (int step = 0; step < 3; ++step) {
      const reference::Compressed<float> expected = code.definition(gradient, residual);
      ASSERT_TRUE(expected.finite);
      check_step(code, gradient, residual, expected, step == 2);
      if (HasFailure()) return;
      residual = expected.residual;
    }
    const Bytes payload = code.payload(code.definition(gradient, {}));
    const DeviceBytes g = floats(gradient, 0), coded = bytes_of(payload.size(), 0), refused = zero();
    code.encode(codes(), {.gradient = g.as<const float>(), .residual = {}, .new_residual = {}, .payload = coded.as<std::byte>()},
                refused.as<std::int32_t>().data());
    EXPECT_EQ(coded.read<std::byte>(), payload) << "without feedback";
  }
  void check_step(const Code& code, const Floats& gradient, const Floats& residual, const reference::Compressed<float>& expected,
                  bool in_place) {
    const Bytes payload = code.payload(expected);
    // Every second step lies at addresses that allow no vector, and its payload at one that allows no word.
    const std::size_t odd = in_place ? 4 : 0;
    const DeviceBytes g = floats(gradient, odd), old = floats(residual, odd),
                      fresh = floats(Floats(gradient.size(), 777.0F), odd), coded = bytes_of(payload.size(), odd / 4),
                      refused = zero();
    const DeviceBytes& kept = in_place ? old : fresh;
    code.encode(codes(),
                {.gradient = g.as<const float>(),
                 .residual = old.as<const float>(),
                 .new_residual = kept.as<float>(),
                 .payload = coded.as<std::byte>()},
                refused.as<std::int32_t>().data());
    EXPECT_EQ(refused.read<std::int32_t>()[0], 0);
    EXPECT_EQ(coded.read<std::byte>(), payload);
    EXPECT_EQ(kept.read<std::uint32_t>(), bits_of(expected.residual));

    Floats base(gradient.size()), accumulated(gradient.size());
    for (std::size_t i = 0; i < base.size(); ++i) {
      base[i] = static_cast<float>(i % 7) - 2.5F;
      accumulated[i] = base[i] + expected.decompressed[i];
    }
    const DeviceBytes out = floats(Floats(gradient.size(), 777.0F), odd), sum = floats(base, odd);
    code.decode(codes(), coded.as<const std::byte>(), Decode::overwrite, out.as<float>(), refused.as<std::int32_t>().data());
    code.decode(codes(), coded.as<const std::byte>(), Decode::accumulate, sum.as<float>(), refused.as<std::int32_t>().data());
    EXPECT_EQ(out.read<std::uint32_t>(), bits_of(expected.decompressed));
    EXPECT_EQ(sum.read<std::uint32_t>(), bits_of(accumulated));
  }
  void check_refused(const Code& code, const Floats& gradient) {
    const DeviceBytes g = floats(gradient, 0), kept = floats(gradient, 0), refused = zero(),
                      coded = bytes_of(code.payload(code.definition(normal(size(gradient), 1), {})).size(), 0);
    code.encode(
        codes(),
        {.gradient = g.as<const float>(), .residual = {}, .new_residual = kept.as<float>(), .payload = coded.as<std::byte>()},
        refused.as<std::int32_t>().data());
    EXPECT_EQ(refused.read<std::int32_t>()[0], 1) << code.name;
  }

  [[nodiscard]] CompressionKernels& codes() { return *kernels().compression(); }
  [[nodiscard]] DeviceBytes floats(const Floats& values, std::size_t misaligned) {
    return {kernels().memory(), values.data(), values.size() * sizeof(float), misaligned};
  }
  [[nodiscard]] DeviceBytes bytes_of(std::size_t size, std::size_t misaligned) {
    return {kernels().memory(), Bytes(size, std::byte{0x5A}).data(), size, misaligned};
  }
  [[nodiscard]] DeviceBytes zero() {
    const std::int32_t none = 0;
    return {kernels().memory(), &none, sizeof none, 0};
  }
  static std::int64_t size(const Floats& values) { return static_cast<std::int64_t>(values.size()); }
  static std::vector<std::uint32_t> bits_of(const Floats& values) {
    std::vector<std::uint32_t> bits;
    for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
    return bits;
  }
};

TEST_F(CudaCompression, IntegersHaveTheBitsOfTheDefinition) {
  for (const int bits : {8, 4}) {
    for (const auto& [count, block] :
         {std::pair<std::int64_t, std::int64_t>{1, 256}, {1000, 256}, {1031, 33}, {300, 1}, {7000, 3001}}) {
      for (const auto& [kind, gradient] : inputs(count)) check(integers(bits, block), gradient, kind);
    }
  }
}

TEST_F(CudaCompression, SignsHaveTheBitsOfTheDefinition) {
  for (const auto& [count, block] :
       {std::pair<std::int64_t, std::int64_t>{1, 256}, {1000, 256}, {1031, 33}, {300, 1}, {7000, 3001}}) {
    for (const auto& [kind, gradient] : inputs(count)) check(signs(block), gradient, kind);
  }
}

TEST_F(CudaCompression, TheLargestAreThoseOfTheDefinitionAndOfEqualOnesTheFirst) {
  for (const auto& [count, k] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {33, 0}, {1000, 50}, {5003, 1}, {5003, 2500}, {300, 1000}}) {
    for (const auto& [kind, gradient] : inputs(count)) check(largest(k), gradient, kind);
  }
}

TEST_F(CudaCompression, NothingOfNothing) {
  for (const Code& code : {integers(8, 256), integers(4, 256), signs(256), largest(10)}) check(code, {}, "nothing");
}

TEST_F(CudaCompression, RefusesWhatIsNotFiniteInAnyPlace) {
  for (const Code& code : {integers(8, 256), integers(4, 3000), signs(256), largest(10), largest(0)}) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      for (const std::size_t at : {0UL, 2048UL, 2999UL}) {
        Floats gradient = normal(3000, 1);
        gradient[at] = bad;
        check_refused(code, gradient);
      }
    }
  }
  // 127 times the scale, rounded up, is beyond the largest number.
  Floats edge = normal(300, 1);
  edge[7] = std::numeric_limits<float>::max();
  if (!reference::quantize_blocks<float>(edge, {}, 8, 256).finite) check_refused(integers(8, 256), edge);
}

TEST_F(CudaCompression, AnIndexOutsideIsRefused) {
  const std::int32_t index = 10;
  Bytes payload(8);
  std::memcpy(payload.data(), &index, sizeof index);
  const DeviceBytes coded(kernels().memory(), payload.data(), payload.size(), 0), out = floats(Floats(10, 0.0F), 0),
                                                                                  refused = zero();
  codes().scatter_top_k(1, coded.as<const std::byte>(), Decode::overwrite, out.as<float>(), refused.as<std::int32_t>().data());
  EXPECT_EQ(refused.read<std::int32_t>()[0], 1);
  EXPECT_EQ(out.read<float>(), Floats(10, 0.0F));
}

TEST_F(CudaCompression, RefusesSizesThatDoNotFit) {
  const DeviceBytes g = floats(Floats(10), 0), coded = bytes_of(13, 0), refused = zero();
  const CodeCall call = {.gradient = g.as<const float>(), .residual = {}, .new_residual = {}, .payload = coded.as<std::byte>()};
  std::int32_t* const flag = refused.as<std::int32_t>().data();
  EXPECT_THROW(codes().quantize_blocks(8, 256, call, flag), ContractError);
  EXPECT_THROW(codes().quantize_blocks(5, 256, call, flag), ContractError);
  EXPECT_THROW(codes().pack_signs(0, call, flag), ContractError);
  EXPECT_THROW(codes().select_top_k(2, call, flag), ContractError);
  EXPECT_THROW(codes().unpack_signs(256, coded.as<const std::byte>(), Decode::overwrite, g.as<float>()), ContractError);
}

}  // namespace
}  // namespace tandem::device_test
