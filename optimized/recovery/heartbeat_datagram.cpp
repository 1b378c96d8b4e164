// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/heartbeat_datagram.h"

#include <algorithm>
#include <type_traits>

namespace tandem {
namespace {

constexpr std::array kMagic = {std::byte{'T'}, std::byte{'D'}, std::byte{'H'}, std::byte{'B'}};

class Writer {
 public:
  explicit Writer(std::byte* at) : at_(at) {}
  template <class Number>
  void put(Number number) noexcept {
    const auto bits = static_cast<std::make_unsigned_t<Number>>(number);
    for (int shift = 8 * (static_cast<int>(sizeof(Number)) - 1); shift >= 0; shift -= 8) {
      *at_++ = static_cast<std::byte>(static_cast<std::uint64_t>(bits) >> shift);
    }
  }

 private:
  std::byte* at_;
};

class Reader {
 public:
  explicit Reader(const std::byte* at) : at_(at) {}
  template <class Number>
  void get(Number& number) noexcept {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < sizeof(Number); ++i) bits = (bits << 8U) | static_cast<std::uint64_t>(*at_++);
    number = static_cast<Number>(static_cast<std::make_unsigned_t<Number>>(bits));
  }

 private:
  const std::byte* at_;
};

}  // namespace

std::span<const std::byte> encode_beats(std::span<const Heartbeat> beats, Datagram& datagram) noexcept {
  beats = beats.first(std::min(beats.size(), kDatagramBeats));
  std::copy(kMagic.begin(), kMagic.end(), datagram.begin());
  Writer writer(datagram.data() + kMagic.size());
  writer.put(kDatagramVersion);
  writer.put(static_cast<std::uint16_t>(beats.size()));
  writer.put(beats.empty() ? std::uint64_t{0} : beats.front().attempt);
  writer.put(beats.empty() ? std::uint64_t{0} : beats.front().sequence);
  for (const Heartbeat& beat : beats) {
    writer.put(static_cast<std::uint32_t>(beat.rank));
    writer.put(static_cast<std::uint8_t>(beat.phase));
    writer.put(static_cast<std::uint8_t>(beat.waiting ? 1 : 0));
    writer.put(beat.step);
    writer.put(beat.progress);
    writer.put(beat.busy_ns);
  }
  return std::span<const std::byte>(datagram).first(kDatagramHeadBytes + beats.size() * kDatagramBeatBytes);
}

bool decode_beats(std::span<const std::byte> datagram, std::vector<Heartbeat>& beats) {
  if (datagram.size() < kDatagramHeadBytes || !std::equal(kMagic.begin(), kMagic.end(), datagram.begin())) return false;
  Reader reader(datagram.data() + kMagic.size());
  std::uint16_t version = 0, count = 0;
  Heartbeat beat;
  reader.get(version);
  reader.get(count);
  reader.get(beat.attempt);
  reader.get(beat.sequence);
  if (version != kDatagramVersion || count == 0 || datagram.size() != kDatagramHeadBytes + count * kDatagramBeatBytes)
    return false;
  std::vector<Heartbeat> read;
  for (int i = 0; i < count; ++i) {
    std::uint32_t rank = 0;
    std::uint8_t phase = 0, waiting = 0;
    reader.get(rank);
    reader.get(phase);
    reader.get(waiting);
    reader.get(beat.step);
    reader.get(beat.progress);
    reader.get(beat.busy_ns);
    if (rank > 0x7fffffffU || phase >= kRunPhases || waiting > 1) return false;
    beat.rank = static_cast<int>(rank);
    beat.phase = static_cast<RunPhase>(phase);
    beat.waiting = waiting == 1;
    read.push_back(beat);
  }
  beats.insert(beats.end(), read.begin(), read.end());
  return true;
}

Heartbeat beat_of(const ProgressSlot& slot, int rank, std::uint64_t attempt, std::uint64_t sequence) noexcept {
  // The phase first: a rank stores the step it goes on from before it enters the phase that follows.
  const RunPhase phase = slot.phase.load(std::memory_order_acquire);
  return {.attempt = attempt,
          .rank = rank,
          .sequence = sequence,
          .step = slot.step.load(std::memory_order_relaxed),
          .phase = phase,
          .progress = slot.progress.load(std::memory_order_relaxed),
          .waiting = slot.waiting.load(std::memory_order_relaxed),
          .busy_ns = slot.busy_ns.load(std::memory_order_relaxed)};
}

}  // namespace tandem
