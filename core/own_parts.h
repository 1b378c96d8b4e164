// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tandem {

class Communicator;  // optimized/comm/communicator.h
class Kernels;       // kernels/kernels.h

/// Somebody's own code in place of this program's, for the ranks of a world: how suites judge an all-reduce, an attention or an
/// optimizer that they have never seen (suites/own_parts.h, docs/examples/own_technique).
///
/// The functions are called once a rank and world, on the rank's thread, several ranks at once.
struct OwnParts {
  std::string name;  ///< for tables and results: "halving-doubling all-reduce"
  /// The communicator that the rank's body gets; `inner` is the one that it would have got, and lives longer. Not null. What has
  /// only some operations of its own derives from ForwardingCommunicator (optimized/comm/forwarding_communicator.h). With an
  /// adversary `inner` is wrapped by it. Empty: the inner one itself.
  std::function<std::unique_ptr<Communicator>(Communicator& inner)> communicator{};
  /// The kernels that the rank computes with, from those that it would have had (ForwardingKernels,
  /// kernels/forwarding_kernels.h). Not null. Empty: those.
  std::function<std::unique_ptr<Kernels>(std::unique_ptr<Kernels> inner)> kernels{};
  /// How often the own code has been called so far, by any rank: a case in which it never is proves nothing about it. Empty: not
  /// asked.
  std::function<std::int64_t()> calls{};
};

}  // namespace tandem
