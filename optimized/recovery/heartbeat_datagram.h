// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/heartbeat.h"

namespace tandem {

/// Beats of one process as a datagram, all numbers in network order:
///
///   head   4 bytes "TDHB", u16 version, u16 number of beats, u64 attempt, u64 sequence
///   beat   u32 rank, u8 phase, u8 waiting (0, 1), i64 step, u64 progress, i64 busy_ns; so often
///
/// A datagram fits into one frame of any network; more beats are several datagrams. A reader refuses what is not exactly this.
inline constexpr std::uint16_t kDatagramVersion = 1;
inline constexpr std::size_t kDatagramHeadBytes = 24, kDatagramBeatBytes = 30;
inline constexpr std::size_t kDatagramBeats = 40;
inline constexpr std::size_t kDatagramBytes = kDatagramHeadBytes + kDatagramBeats * kDatagramBeatBytes;
using Datagram = std::array<std::byte, kDatagramBytes>;

/// At most kDatagramBeats of one attempt and sequence, not none; the part of `datagram` that is to be sent.
std::span<const std::byte> encode_beats(std::span<const Heartbeat> beats, Datagram& datagram) noexcept;

/// Appends what the datagram holds; false, and nothing appended, where it is none of ours.
bool decode_beats(std::span<const std::byte> datagram, std::vector<Heartbeat>& beats);

/// What a slot says now.
[[nodiscard]] Heartbeat beat_of(const ProgressSlot& slot, int rank, std::uint64_t attempt, std::uint64_t sequence) noexcept;

}  // namespace tandem
