// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "core/timeline.h"
#include "core/world_settings.h"

namespace tandem {

class Memory;

/// What the two ends of a message must agree on; verified on arrival (ContractError naming both where they differ).
struct Envelope {
  std::int64_t step = 0;
  int micro_batch = 0;
  int chunk = 0;
  int direction = 0;  ///< 0 forward, 1 backward
  friend bool operator==(const Envelope&, const Envelope&) = default;
};

/// A collective or message under way. Move-only; dropping it without waiting is a contract violation that the next operation of
/// the communicator (or the end of the rank's body) reports, and that cancels the operation. The buffers of the operation belong
/// to it until wait_host() returns or the destructor has.
class Work {
 public:
  class State;
  Work();
  explicit Work(std::shared_ptr<State> state);
  Work(Work&&) noexcept;
  Work& operator=(Work&&) noexcept;
  ~Work();

  /// Blocks until the operation is complete; carries it out on this thread where nobody has begun it. Throws PeerError (a rank
  /// failed or aborted; names it), TimeoutError (deadline), ContractError (the ranks' calls do not match), GpuError (the device
  /// that the buffers lie in). Nothing the second time. On a device, too, the result is there then: not only on its way.
  void wait_host();
  /// Polling does not carry out anything.
  [[nodiscard]] bool done() const noexcept;

 private:
  std::shared_ptr<State> state_;
};

/// Who carries an operation out.
enum class Progress : std::uint8_t {
  background,  ///< the communicator's progress thread: it proceeds without further calls
  on_wait      ///< the thread that calls wait_host(), for whoever waits at once anyway; issued in the same order as the others
};

/// Options of one operation.
struct CommOptions {
  Purpose purpose = Purpose::other;
  std::string name{};  ///< for timeline and error texts: "bucket 3"
  Progress progress = Progress::background;
  int step = -1;  ///< training step of the timeline's spans
  /// Of a collective over messages; empty: that of the world.
  std::optional<CollectiveAlgorithm> algorithm{};
};

/// One group of ranks that communicate. One object per rank, used by that rank's thread; all ranks of the group must issue the
/// same operations in the same order. Sums are formed in rank order (rank 0 + rank 1 + ...), element by element, in the dtype of
/// the buffer (in fp32 for 16-bit ones): the same bits on every rank and in every run.
///
/// Every operation has a deadline, counted from when this rank began to wait for the others (TimeoutError naming the ranks that
/// have not arrived, thrown on every rank). After abort(), once any rank of the world threw out of its body, or where an
/// operation needs a rank whose body has ended, every pending and later operation on every other rank throws PeerError naming the
/// rank and its reason. Calls that do not match (kind, dtype, counts, root) throw ContractError naming two of them, on every
/// rank, and touch no buffer; over messages a rank may hear of it with its next operation only, and the buffers of an operation
/// that failed may hold anything. Error texts and PeerError::rank() number ranks as in the whole world, in split communicators
/// too. After such an error the communicator is finished.
class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// Which world this belongs to: a re-formed world has a higher number and never hears the old one.
  [[nodiscard]] virtual std::uint64_t generation() const noexcept = 0;

  // Asynchronous forms: return at once, the operation proceeds without further calls (unless Progress::on_wait). Wrong arguments
  // of this rank alone throw ContractError from the call.
  /// data <- sum over ranks of data.
  [[nodiscard]] virtual Work all_reduce(TensorView data, const CommOptions& options) = 0;
  /// output <- this rank's part of the sum of inputs; input is split in size() parts of `counts` elements (rank order). output
  /// may lie at its place in input.
  [[nodiscard]] virtual Work reduce_scatter(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                            const CommOptions& options) = 0;
  /// output <- concatenation of all ranks' inputs, rank r contributing counts[r] elements. input may lie at its place in output.
  [[nodiscard]] virtual Work all_gather(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                        const CommOptions& options) = 0;
  /// Rank r gets input part r of every rank: send_counts[r] elements go to rank r, receive_counts[r] come from it.
  [[nodiscard]] virtual Work all_to_all(TensorView input, std::span<const std::int64_t> send_counts, TensorView output,
                                        std::span<const std::int64_t> receive_counts, const CommOptions& options) = 0;
  [[nodiscard]] virtual Work broadcast(TensorView data, int root, const CommOptions& options) = 0;
  /// Buffered by neither side: complete once the receiver has the bytes. Messages between two ranks keep their order.
  [[nodiscard]] virtual Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) = 0;
  /// Throws ContractError from wait_host() where the envelope or the size is not the expected one.
  [[nodiscard]] virtual Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) = 0;
  virtual void barrier() = 0;

  /// A communicator of the ranks that pass the same colour, ordered by (key, rank). Collective. It has this one's generation,
  /// timeline and memory, and counts its own bytes.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;

  /// Ends the whole world: every pending and later operation on other ranks throws PeerError with this rank and reason.
  virtual void abort(std::string_view reason) noexcept = 0;

  /// Where transfers and waits are recorded; may be null. Borrowed.
  virtual void set_timeline(Timeline* timeline) noexcept = 0;
  /// The lane that this rank computes with. Buffers of later operations lie in its memory where it holds() their address, and
  /// otherwise in the host's, as all do with null (the default); those of one call lie together. Called while no operation is
  /// under way; split() passes it on. Borrowed: until the last operation on buffers in it, or the next call of this.
  ///
  /// An operation on such buffers begins after the work that the lane had when it was called (it must not be recording a graph),
  /// and does not block the call. Once wait_host() has returned or done() has said true it is complete for the device too: later
  /// work of the lane, or of any other, sees its result and may write to its buffers.
  virtual void set_memory(Memory* memory) = 0;
  /// A large reservation in which buffers of later operations will lie, in this communicator and those split from it: a transport
  /// may prepare to reach it without copies. Nothing where it does not. deregister_memory() comes before the memory is given
  /// back.
  virtual void register_memory(void* /*address*/, std::int64_t /*size_bytes*/) {}
  virtual void deregister_memory(void* /*address*/) noexcept {}
  /// Bytes this rank has put on the wire so far, by purpose, by the algorithm's own count (all_reduce over n ranks of b bytes
  /// sends 2 b (n - 1) / n; see docs/measuring.md).
  [[nodiscard]] virtual std::int64_t bytes_sent(Purpose purpose) const noexcept = 0;
};

/// Blocking shorthands: carried out on the calling thread where nothing else is pending. The last two gather host values.
void all_reduce(Communicator& comm, TensorView data, const CommOptions& options);
[[nodiscard]] double all_reduce_sum(Communicator& comm, double value);
[[nodiscard]] std::vector<std::uint64_t> all_gather_u64(Communicator& comm, std::uint64_t value);

}  // namespace tandem
