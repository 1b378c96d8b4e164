// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "optimized/comm/communicator.h"

namespace tandem {

/// A communicator that does what another one does: the base of those that have some operations of their own (core/own_parts.h).
///
/// An operation of one's own may be made of the others, of inner().send() and recv() for instance, whose bytes are then counted
/// and recorded as this rank's. It may block and return Work(), which is complete: right, but nothing is hidden behind it. An
/// asynchronous one returns a Work of a Work::State of its own (work_state.h). What it must hold is said at Communicator: the
/// same bits on every rank, a deadline, PeerError and ContractError.
class ForwardingCommunicator : public Communicator {
 public:
  /// Owned by somebody else, who keeps it as long as this.
  explicit ForwardingCommunicator(Communicator& inner) : inner_(inner) {}
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> inner) : owned_(std::move(inner)), inner_(*owned_) {}
  ForwardingCommunicator(const ForwardingCommunicator&) = delete;
  ForwardingCommunicator& operator=(const ForwardingCommunicator&) = delete;

  /// The groups of all axes come from here, so that a class says what becomes of them: mostly one of its own around
  /// inner().split(colour, key), whose operations would otherwise be the inner one's.
  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override = 0;

  [[nodiscard]] int rank() const noexcept override { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_.size(); }
  [[nodiscard]] std::uint64_t generation() const noexcept override { return inner_.generation(); }

  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) override { return inner_.all_reduce(data, options); }
  [[nodiscard]] Work reduce_scatter(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                    const CommOptions& options) override {
    return inner_.reduce_scatter(input, output, counts, options);
  }
  [[nodiscard]] Work all_gather(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                const CommOptions& options) override {
    return inner_.all_gather(input, output, counts, options);
  }
  [[nodiscard]] Work all_to_all(TensorView input, std::span<const std::int64_t> send_counts, TensorView output,
                                std::span<const std::int64_t> receive_counts, const CommOptions& options) override {
    return inner_.all_to_all(input, send_counts, output, receive_counts, options);
  }
  [[nodiscard]] Work broadcast(TensorView data, int root, const CommOptions& options) override {
    return inner_.broadcast(data, root, options);
  }
  [[nodiscard]] Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) override {
    return inner_.send(data, to, envelope, options);
  }
  [[nodiscard]] Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) override {
    return inner_.recv(data, from, expected, options);
  }
  void barrier() override { inner_.barrier(); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

  void set_timeline(Timeline* timeline) noexcept override { inner_.set_timeline(timeline); }
  void set_memory(Memory* memory) override { inner_.set_memory(memory); }
  void register_memory(void* address, std::int64_t size_bytes) override { inner_.register_memory(address, size_bytes); }
  void deregister_memory(void* address) noexcept override { inner_.deregister_memory(address); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return inner_.bytes_sent(purpose); }

 protected:
  [[nodiscard]] Communicator& inner() const noexcept { return inner_; }

 private:
  const std::unique_ptr<Communicator> owned_;  // null: somebody else's
  Communicator& inner_;
};

}  // namespace tandem
