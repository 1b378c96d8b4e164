// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/memory_ledger.h"
#include "core/timeline.h"

namespace tandem {

/// A training step of one rank is a program, and a program is data: operations with dependencies, bytes and FLOPs. lower() makes
/// it from a plan, rewrites refine it, the checker proves it, the engine executes it, the simulator replays it.
enum class OpKind : std::uint8_t { compute, communicate, allocate, free, gradient_norm, optimizer };

/// Backward can be split into the part that the upstream rank waits for (input) and the part that nobody waits for (weight).
enum class Phase : std::uint8_t { forward, backward_input, backward_weight, recompute };

/// head: final norm, logits and loss. Its forward and backward_input are one fused pass over chunks of the vocabulary logits; the
/// program has a forward operation for it that carries both, and a backward_weight for the final norm.
enum class Part : std::uint8_t { embedding, block, head };

enum class Collective : std::uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, recv };

/// Axis of the process grid whose group communicates.
enum class GroupAxis : std::uint8_t { world, data, tensor, pipeline, context, expert };

using OperationId = std::int32_t;  ///< index in the program

struct Operation {
  OpKind kind = OpKind::compute;
  Phase phase = Phase::forward;                           // compute
  Part part = Part::block;                                // compute
  int layer = -1;                                         ///< compute, block: global layer index
  int micro_batch = -1;                                   ///< -1: of the whole step
  int chunk = 0;                                          ///< virtual pipeline stage
  Collective collective = Collective::all_reduce;         // communicate
  GroupAxis axis = GroupAxis::data;                       // communicate
  int peer = -1;                                          ///< send, recv, broadcast root
  Purpose purpose = Purpose::other;                       // communicate
  int bucket = -1;                                        ///< communicate: gradient bucket
  MemoryCategory category = MemoryCategory::activations;  // allocate, free
  std::int64_t bytes = 0;                                 ///< communicate: payload; allocate, free: size
  double flops = 0;                                       ///< compute, optimizer
  std::vector<OperationId> after;  ///< must be complete before this one starts; all smaller than its own index
};

using StepProgram = std::vector<Operation>;

/// "backward_input h.3 mb 1", "all_reduce bucket 2": for timelines and error texts.
[[nodiscard]] std::string to_string(const Operation& operation);

/// What a correct program must contain.
struct ProgramExpectation {
  int layers = 0;
  int micro_batches = 1;
  int buckets = 1;
  bool reduces_gradients = false;  ///< more than one data rank
};

struct ProgramFacts {
  std::vector<std::string> problems;  ///< empty: proven complete, ordered and free of deadlock
  std::int64_t peak_bytes = 0;        ///< of what the program itself allocates, worst rank
  double flops = 0;                   ///< all ranks
  std::int64_t gradient_bytes = 0;    ///< payload of gradient communication, all ranks
};

/// Checks the programs of all ranks together:
///  - dependencies point backward; every part of every micro-batch runs forward once and backward (input, weight) once, in order;
///  - every gradient bucket is reduced exactly once, after the last backward_weight of its last micro-batch and before the norm;
///    the optimizer runs last, once;
///  - every allocation is freed once, after its last use;
///  - executed rank by rank with blocking communication, it ends: collectives of a group match in order, kind and bytes.
[[nodiscard]] ProgramFacts check_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation);

}  // namespace tandem
