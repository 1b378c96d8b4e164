// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "optimized/comm/wire.h"

namespace tandem {

class MpiProgress;

/// Whether the processes of a host have a core each. Who has one looks longer without pause while it waits.
enum class CoreUse : std::uint8_t { own, shared };

/// Bytes between the processes of an MPI communicator.
///
/// A message is a header of mark and size, with the bytes in it where they are few. More follow in a second message, whose tag
/// the header names and no other message has: the receiver posts its own receive once it has seen that the header is what it
/// expects, so that MPI never gets a buffer of the wrong size. Whoever waits for any transfer of the wire does that for all of
/// them, so that the order in which a rank waits does not matter; while nobody waits and messages between which a rank may
/// compute are under way (odd channels, wire.h), a thread of the wire does. Headers have their channel as tag, and MPI keeps the
/// order of messages with the same tag.
///
/// Nobody blocks inside MPI: who waits asks, at first without pause, after at most a millisecond with sleeps between, so that a
/// deadline or the failure of the world ends every wait, and so that more processes than cores get on.
///
/// A send that is cancelled while a receiver takes its bytes is waited for; one whose receiver never comes stays with MPI, which
/// reads it only where a receive is posted, and in a world that has failed nobody posts one.
class MpiWire final : public Wire {
 public:
  static constexpr std::size_t kInlineBytes = 4096;

  /// Borrows the communicator, which needs MPI_THREAD_MULTIPLE and MPI_ERRORS_RETURN. `failed` says whether the world has.
  MpiWire(MPI_Comm comm, std::function<bool()> failed, CoreUse cores = CoreUse::shared);

  MpiWire(const MpiWire&) = delete;
  MpiWire& operator=(const MpiWire&) = delete;
  /// No transfer may be waited for any more.
  ~MpiWire() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int ranks() const noexcept override { return ranks_; }
  /// Throws ContractError where the channel is beyond half of MPI's tags; the other half are for what follows headers.
  [[nodiscard]] std::unique_ptr<Transfer> send(int to, std::uint32_t channel, std::uint64_t mark,
                                               std::span<const std::byte> bytes) override;
  [[nodiscard]] std::unique_ptr<Transfer> receive(int from, std::uint32_t channel, std::uint64_t mark,
                                                  std::span<std::byte> bytes) override;

  /// How often the wire's own thread has called MPI so far.
  [[nodiscard]] std::int64_t looks_of_thread() const noexcept;

 private:
  [[nodiscard]] int tag_of(std::uint32_t channel) const;

  const MPI_Comm comm_;
  const std::shared_ptr<const std::function<bool()>> failed_;
  const std::shared_ptr<MpiProgress> progress_;
  const CoreUse cores_;
  int rank_ = 0;
  int ranks_ = 1;
  std::uint32_t channels_ = 0;
  std::atomic<std::uint32_t> payloads_{0};  ///< sent so far
};

/// Throws IoError with MPI's own words unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* what);

}  // namespace tandem
