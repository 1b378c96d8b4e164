// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"
#include "kernels/cuda/launch.cuh"

// The part of kernels/cuda/numbers.cuh that is the emulated GPU's.
namespace tandem::simt_gpu {

inline float to_wide(bf16 value) { return std::bit_cast<float>(std::uint32_t{value.bits} << 16); }
inline float to_wide(f16 value) { return from_f16_bits(value.bits); }
inline std::uint16_t rounded_bits(float value, bf16 /*tag*/) { return to_bf16_bits(value); }
inline std::uint16_t rounded_bits(float value, f16 /*tag*/) { return to_f16_bits(value); }

}  // namespace tandem::simt_gpu
