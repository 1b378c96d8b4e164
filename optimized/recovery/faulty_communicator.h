// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "optimized/comm/communicator.h"

namespace tandem {

/// What is to happen to the communication of one rank; set by the fault injector, read by the rank's communicators at each
/// operation. Nothing costs more than reading it.
struct MessageFaults {
  std::atomic<bool> flip_next{false};          ///< taken back by the operation that it strikes
  std::atomic<double> jitter_milliseconds{0};  ///< 0: none
  std::atomic<std::uint64_t> operations{0};    ///< delayed so far: the key of the next delay
  std::uint64_t seed = 0;                      ///< of the delays
};

/// Wraps a communicator of any transport, and what it splits off, so that scripted faults strike the communication of its rank:
///
///   jitter  each operation is preceded by a sleep of a random time up to jitter_milliseconds, a function of seed and number
///   flip    the next operation that receives gradients, parameters or activations (floating point, by its Purpose) from another
///           rank has one bit of one element of its output turned (turn_exponent_bit()) when it is complete
///
/// Values, errors, order, timeline and counted bytes are otherwise those of the inner communicator. Borrows both arguments.
[[nodiscard]] std::unique_ptr<Communicator> make_faulty(Communicator& inner, MessageFaults& faults);

}  // namespace tandem
