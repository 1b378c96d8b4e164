// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "optimized/comm/forwarding_communicator.h"

namespace own {

/// Ways to get it wrong on purpose.
enum class RingBug {
  none,
  off_by_one,   ///< a sum that comes around is put down one element too far
  missing_hop,  ///< the sum is one rank short: an off-by-one in the number of hops
  wasteful      ///< right sums, but everybody sends everything to everybody
};

/// data <- sum over ranks of data, by parts that go around a ring: n - 1 hops until one rank has the sum of a part, n - 1 more
/// until all have it; each rank sends 2 b (n - 1) / n bytes. Numbers of 32 and 64 bits; others are left to the communicator
/// below. Everything else is that one's, too: a stand-in for the library that you would judge.
class RingAllReduce final : public tandem::ForwardingCommunicator {
 public:
  using Calls = std::shared_ptr<std::atomic<std::int64_t>>;
  RingAllReduce(tandem::Communicator& inner, RingBug bug, Calls calls)
      : ForwardingCommunicator(inner), bug_(bug), calls_(std::move(calls)) {}
  RingAllReduce(std::unique_ptr<tandem::Communicator> inner, RingBug bug, Calls calls)
      : ForwardingCommunicator(std::move(inner)), bug_(bug), calls_(std::move(calls)) {}

  /// Blocks; the Work that it returns is complete.
  [[nodiscard]] tandem::Work all_reduce(tandem::TensorView data, const tandem::CommOptions& options) override;
  [[nodiscard]] std::unique_ptr<tandem::Communicator> split(int colour, int key) override {
    return std::make_unique<RingAllReduce>(inner().split(colour, key), bug_, calls_);
  }

 private:
  template <class Real>
  void around_the_ring(tandem::TensorView data, const tandem::CommOptions& options);
  template <class Real>
  void everything_to_everybody(tandem::TensorView data, const tandem::CommOptions& options);
  void pass(tandem::TensorView outgoing, int to, tandem::TensorView incoming, int from, const tandem::CommOptions& options);

  RingBug bug_;
  Calls calls_;
};

}  // namespace own
