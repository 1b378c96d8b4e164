// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "core/world_settings.h"
#include "optimized/comm/communicator.h"

namespace tandem {

/// Wraps a communicator so that races show on every run, not on one in a thousand:
///  - each asynchronous operation works on its own copies, made when it is called; from then on until wait_host() has returned,
///  or
///    done() has said true, whatever the operation will write of the caller's buffers is filled with signalling NaNs, of which
///    every sum or product is another NaN (integers: with ones): who reads a result too early reads that;
///  - when the operation ends, those bytes must still be there and the input unchanged: who writes to a buffer that is on its way
///    gets a ContractError from wait_host(), "rank 1: element 17 of the output was written while all_reduce 'gradient bucket 2'
///    of 100 fp32 was under way", and the world fails as with any error of a rank;
///  - operations complete late: after a scripted delay the operation is handed on (in the background, where it may overtake
///    whatever its communicator or pair of ranks does not order), and after another it may be complete.
/// Values, errors and what split() makes of it are otherwise those of the inner communicator; an error arrives later by as much
/// as the longest delay. Operations whose buffers overlap while both are under way are no legal program (Work), and here they
/// give other values.
///
/// The inner communicator's operations are called from another thread than the one that waits for them.
[[nodiscard]] std::unique_ptr<Communicator> make_adversarial(std::unique_ptr<Communicator> inner, const AdversaryScript& script);
/// The same around one that somebody else owns, which must live as long.
[[nodiscard]] std::unique_ptr<Communicator> make_adversarial(Communicator& inner, const AdversaryScript& script);

}  // namespace tandem
