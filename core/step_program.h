// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/memory_ledger.h"
#include "core/process_grid.h"
#include "core/timeline.h"

namespace tandem {

/// A training step of one rank is a program, and a program is data: operations with dependencies, bytes and FLOPs. lower() makes
/// it from a plan, rewrites refine it, the checker proves it, the engine executes it, the simulator replays it.
enum class OpKind : std::uint8_t { compute, communicate, allocate, free, gradient_norm, optimizer };

/// Backward can be split into the part that the upstream rank waits for (input) and the part that nobody waits for (weight).
enum class Phase : std::uint8_t { forward, backward_input, backward_weight, recompute };
[[nodiscard]] std::string_view name(Phase phase);

/// What a compute operation works on. A block is
///   norm_1, attention_in (query-key-value product), attention_core, attention_out (projection), attention_merge (bias, dropout,
///   residual), norm_2, mlp, mlp_merge;
/// with experts, router, dispatch, experts and combine stand in place of mlp. Between these parts lies the communication of
/// tensor, sequence, context and expert parallelism. The head is head_norm, then head_logits and head_loss for each piece of the
/// tokens: head_loss makes the loss, the gradient of the logits, and from it at once the gradients of the head's matrix and of
/// head_norm's output, so that the head has no backward operation but that of its norm. `embedding_lookup` is wte[ids],
/// `embedding` adds positions and dropout. `block` is the backward_weight of a whole block.
enum class Part : std::uint8_t {
  embedding_lookup,
  embedding,
  norm_1,
  attention_in,
  attention_core,
  attention_out,
  attention_merge,
  norm_2,
  mlp,
  router,
  dispatch,
  experts,
  combine,
  mlp_merge,
  head_norm,
  head_logits,
  head_loss,
  block,
  message  ///< what came from, or goes to, a neighbour in the pipeline; compute, forward: handed over by a stage of the same rank
};
[[nodiscard]] std::string_view name(Part part);

/// ring_shift: every rank of the group sends to the next and receives from the previous one, around the ring.
enum class Collective : std::uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, ring_shift, send, recv };
[[nodiscard]] std::string_view name(Collective collective);

using OperationId = std::int32_t;  ///< index in the program

struct Operation {
  OpKind kind = OpKind::compute;
  Phase phase = Phase::forward;  // compute
  Part part = Part::block;       ///< communicate of activations: the part whose result travels
  int layer = -1;                ///< global layer index; -1 outside blocks
  int micro_batch = -1;          ///< -1: of the whole step
  int chunk = 0;                 ///< of this rank's model chunks (core/pipeline_layout.h)
  int stage = -1;                ///< send, recv: global stage that the message enters
  /// attention_core: step of the ring; head_logits, head_loss, and products that are summed in pieces: piece of the tokens
  int piece = 0;
  Collective collective = Collective::all_reduce;  // communicate
  GroupAxis axis = GroupAxis::data;                // communicate
  int peer = -1;                                   ///< send, recv: rank in the world; broadcast: root
  Purpose purpose = Purpose::other;                // communicate
  /// communicate, purpose gradient: bucket, or one of the negatives below; purpose parameter, and allocate and free of parameters
  /// and gradients: bucket (zero)
  int bucket = -1;
  MemoryCategory category = MemoryCategory::activations;  // allocate, free
  std::int64_t bytes = 0;                                 ///< communicate: payload; allocate, free: size
  double flops = 0;                                       ///< compute, optimizer
  /// communicate, collectives: the rank issues it and goes on at once. It is complete when all ranks of its group have issued it
  /// and all that the group (its axis and members) does before it is complete: the operations of a group, of both kinds, are
  /// carried out one after the other, in each rank's program order. Nothing but `after` orders a rank's other work behind it.
  bool background = false;
  /// Must be complete before this one starts; all smaller than its own index. A rank that comes to an operation, itself in the
  /// background or not, waits there for the background operations that it names.
  std::vector<OperationId> after = {};
};

using StepProgram = std::vector<Operation>;

/// Operation::bucket of gradient sums that are no bucket: over the tensor ranks, of replicated parameters whose gradients are
/// partial there (sequence parallelism, router); over first and last stage, of the tied token embedding.
inline constexpr int kTensorPartialGradients = -2;
inline constexpr int kTiedEmbeddingGradient = -3;

/// With ZeRO (core/plan.h) a bucket is one block's dense parameters, one block's experts, or one of the tables and norms outside
/// blocks, and each of its ranks keeps one part. Its operations are, beside those of every step:
///   stage 1  one reduce_scatter (purpose gradient) of each bucket after all that adds to it; after the optimizer one all_gather
///            (purpose parameter) of each bucket.
///   stage 2  a bucket's gradients exist (allocate, category gradients) from before the first operation that adds to them in a
///            micro-batch to a reduce_scatter after the last one, then they are freed. Parameters as in stage 1.
///   stage 3  gradients as in stage 2; a bucket's parameters exist (allocate, category parameters, then all_gather) only around
///            the passes that read them: a block's forward parts, its recompute, its backward_input parts; embedding_lookup and
///            embedding (forward); head_logits and head_loss; head_norm. No all_gather after the optimizer. backward_weight
///            reads no parameters.
/// Buckets with one rank have none of these operations. `micro_batch` of a reduce_scatter, gather, allocate or free says whose
/// pass it belongs to, -1 that it is of the whole step.

/// "backward_input h.3 mb 1", "all_reduce bucket 2", "reduce_scatter gradients bucket 3 mb 1", "allocate gradients bucket 3": for
/// timelines and error texts.
[[nodiscard]] std::string to_string(const Operation& operation);

/// Sources of what lies outside layers:
///   embedding   the token table: read by embedding_lookup (forward); gradient from the backward_weight of embedding and, where
///               that is apart, of embedding_lookup
///   head        the matrix of the head: read by head_logits and head_loss, gradient from head_loss
///   final norm  read by head_norm, forward and backward_input; gradients from its backward_weight
///   positions   their table: read by embedding (forward), gradient from its backward_weight
/// A layer's gradients come from the backward_weight of `block`.
inline constexpr int kEmbeddingSource = -1;
inline constexpr int kHeadSource = -2;
inline constexpr int kFinalNormSource = -3;
inline constexpr int kPositionSource = -4;

/// What a correct program of one rank must contain.
struct RankExpectation {
  std::vector<Interval> chunk_layers;  ///< [chunks] layers of each chunk
  int embedding_chunk = -1;            ///< chunk that holds the embedding; -1: another rank does
  int head_chunk = -1;
  int micro_batches = 1;
  int ring_steps = 1;  ///< pieces of attention_core
  bool experts = false;
  /// [micro-batches] pieces of the products whose sum is scattered over the tensor ranks: attention_out and mlp (forward), mlp
  /// and attention_in (backward_input), but not with experts mlp; empty: one of each.
  std::vector<int> product_pieces = {};
  int head_pieces = 0;                  ///< of the micro-batch with most; fewer where a micro-batch has fewer tokens
  std::vector<bool> bucket_is_reduced;  ///< [buckets] whether the bucket has more than one rank
  /// [buckets] where the bucket's parameters are read and their gradients come from: a layer from 0, or one of the sources below.
  /// A table that is both embedding and head has both.
  std::vector<std::vector<int>> bucket_sources;
  int zero_stage = 0;
  /// [buckets], or empty where no bucket is of experts (zero): whether the bucket holds a block's experts, which its part
  /// `experts` alone reads. Any other bucket of a layer is read by all parts but attention_core, dispatch and experts.
  std::vector<bool> bucket_is_expert = {};
  /// [chunks] global stage of each chunk (PipelineLayout::stage_of); empty: wrapped, chunk * P + place in the pipeline group.
  std::vector<int> chunk_stages;
};

struct ProgramExpectation {
  std::vector<RankExpectation> ranks;
  /// Members of the group of a rank (core/process_grid.h), in order.
  std::function<std::vector<int>(GroupAxis axis, int rank)> group;
};

struct ProgramFacts {
  std::vector<std::string> problems;  ///< empty: proven complete, ordered and free of deadlock
  std::int64_t peak_bytes = 0;        ///< of what the program itself allocates, worst rank
  /// The same of each category at its own moment on its own worst rank.
  BytesByCategory peak_bytes_by_category{};
  double flops = 0;                         ///< all ranks
  std::int64_t gradient_bytes = 0;          ///< payload of gradient communication, all ranks
  std::int64_t wire_bytes[kPurposes] = {};  ///< sent by all ranks, as bytes_on_wire() counts
  std::vector<int> peak_in_flight;          ///< [ranks] (chunk, micro-batch) pairs with live activations at once, most
};

/// Checks the programs of all ranks together:
///  - dependencies point backward; every part of every chunk and micro-batch runs forward once and backward (input, weight)
///    once, in order, and nothing else is computed (recompute aside). Forward of a block: norm_1, attention_in,
///    attention_core pieces 0..ring_steps-1, attention_out, attention_merge, norm_2, mlp (or router, dispatch, experts,
///    combine), mlp_merge; backward_input the reverse, then backward_weight of `block`; pieces always ascend. Embedding:
///    embedding_lookup, embedding; backward_weight of `embedding` last (and of embedding_lookup after it, if that is apart).
///    Head: head_norm, (head_logits, head_loss) of each piece; backward_input, then backward_weight, of head_norm;
///  - a stage's forward follows the receive of its input, its backward that of its gradient, and both are sent on, from and
///    to the ranks that hold the neighbouring stages: send and recv on GroupAxis::pipeline, phase forward or backward_input,
///    `stage` the one entered. Between two stages of one rank messages may be left out; the order must still hold;
///  - a collective of activations stands between the part whose result travels and the one that takes it up, the next one, or
///    after a product in pieces the next other one; in the background it waits for that part, and the one that takes it up for
///    it, recomputed ones too;
///  - zero_stage 0 and 1: every gradient bucket is reduced exactly once where it has several ranks, else never, and waits by its
///    declared dependencies (directly or through others) for all that adds to its own sources in every micro-batch. Stage 1
///    reduces by reduce_scatter, and after the optimizer each bucket of several ranks has exactly one all_gather of purpose
///    parameter, which waits for the optimizer;
///  - zero_stage 2 and 3, buckets of several ranks: gradients are allocated (once at a time) whenever an operation adds to them;
///    what was added since the allocation is reduced by exactly one reduce_scatter, which waits for all of it and for which the
///    free waits. Stage 2 gathers as stage 1;
///  - zero_stage 3, buckets of several ranks: every compute operation that reads the parameters runs while they are allocated
///    (once at a time) and waits for the one all_gather that follows the allocation, as the free does; no all_gather follows the
///    optimizer;
///  - buckets of one rank have no communication of purpose parameter or gradient, and none but stages 2 and 3 (gradients) and
///    stage 3 (parameters) allocate buckets;
///  - gradient sums that are no bucket appear at most once and wait likewise (tied embedding: for what adds to embedding and
///  head,
///    tensor partials: for all that adds), and for the reductions of the buckets that may hold their tensors (tied embedding:
///    those of embedding and head, tensor partials: all);
///  - the norm waits for every gradient sum, and the optimizer for these and for sums of the norm in the background;
///  - only collectives are in the background, and each is named by the `after` of a later operation;
///  - norm and optimizer run once, after everything that is computed, and between them one sum (purpose other) over each group
///    whose ranks hold different squares: the model group where it has several ranks; from zero_stage 1 on the gradient and the
///    expert_gradient group where buckets of several ranks are dealt over them;
///  - every allocation is freed once, by the same category, part, layer, micro-batch, chunk, stage, phase, bucket and bytes.
///    Compute needs live activations: a block's parts those of (block, layer, micro-batch, chunk), embedding's of `embedding`,
///    head's of head_norm;
///  - executed rank by rank it ends: the ranks of a group issue the same collectives in the same order (kind, part, layer,
///    micro-batch, phase, piece, bucket, purpose, root; bytes too but for all_to_all and ring_shift, whose ranks send what they
///    have). A rank blocks at a collective until the whole group has issued it, in the background at the operations that name
///    it; at a recv until its message is sent, at a send never. The messages from one rank to another are received in the order
///    in which they are sent, each by its own receive (stage, micro-batch, direction, bytes).
/// Throws ContractError where there is not one expectation for each program, or a group names ranks that do not exist.
[[nodiscard]] ProgramFacts check_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation);

/// Bytes that one rank of `group_size` puts on the wire for an operation with this payload: all_reduce 2 b (n - 1) / n,
/// reduce_scatter, all_gather and all_to_all b (n - 1) / n, b being the whole tensor before or after (for all_to_all what a rank
/// sends, its own part included), ring_shift and send b, broadcast b (n - 1) / n, recv 0.
[[nodiscard]] std::int64_t bytes_on_wire(const Operation& operation, int group_size);

/// Replays programs in time: a rank runs its operations in order, each compute or optimizer operation takes `seconds(operation)`.
/// A collective takes seconds(operation) from when all its ranks have issued it and the group's operations before it are
/// complete; groups do not slow each other down. The rank goes on then, in the background at once: there an operation that names
/// it starts no earlier than its end, and the program ends no earlier than all of it. send: the sender goes on at once; recv:
/// until sent time + seconds(the recv). Everything else takes no time.
struct ProgramTiming {
  double makespan_seconds = 0;
  std::vector<double> busy_seconds;     ///< [ranks] in compute and optimizer operations
  std::vector<double> exposed_seconds;  ///< [ranks] waiting for communication: for its peers, or for bytes to arrive
  /// 1 - busy / (ranks * makespan): idle share of all ranks' time.
  double bubble_share = 0;
};
/// Throws ContractError where the programs do not end.
[[nodiscard]] ProgramTiming time_programs(const std::vector<StepProgram>& programs, const ProgramExpectation& expectation,
                                          const std::function<double(const Operation&)>& seconds);

}  // namespace tandem
