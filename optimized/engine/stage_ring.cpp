// SPDX-License-Identifier: Apache-2.0
// Ring attention (Liu, Zaharia, Abbeel: "Ring attention with blockwise transformers for near-infinite context", ICLR 2024): each
// context rank keeps its queries, keys and values travel around the ring. docs/techniques/context_parallel.md
#include <limits>

#include "optimized/engine/gpt_stage.h"

namespace tandem {
namespace {

// Runs [begin, end) of positions of one rank, and where they lie among its tokens of a row.
struct Run {
  Interval positions;
  std::int64_t local_begin = 0;
};

std::vector<Run> runs_of(const LocalModel& local, std::int64_t row_tokens, int rank) {
  std::vector<Run> runs;
  std::int64_t begin = 0;
  for (const Interval& chunk : context_intervals(local, row_tokens, rank)) {
    runs.push_back({chunk, begin});
    begin += chunk.size();
  }
  return runs;
}

TensorView first_elements(TensorView buffer, std::int64_t count) { return buffer.flat(0, count); }

}  // namespace

// Calls use(segment, query run, key run) for each pair of runs of this rank's queries and the travelling keys that see each
// other.
template <class Use>
void GptStage::for_each_segment(const Operation& op, const Use& use) {
  const MicroBatch& micro_batch = at(op.micro_batch);
  const MicroBatchShape& shape = micro_batch.shape;
  const int origin = ring_origin(local_, op.piece);
  const bool by_local_index = context_.pitfalls.on(Pitfall::zigzag_mask_by_local_index);
  for (const Run& queries : runs_of(local_, shape.row_tokens, local_.context_rank)) {
    for (const Run& keys : runs_of(local_, shape.row_tokens, origin)) {
      AttentionSegment segment;
      segment.rows = shape.rows;
      segment.queries = queries.positions.size();
      segment.keys = keys.positions.size();
      // The causal mask compares positions in the whole row, which local indices are not.
      segment.query_begin = by_local_index ? queries.local_begin : queries.positions.begin;
      segment.key_begin = by_local_index ? keys.local_begin : keys.positions.begin;
      if (segment.queries == 0 || segment.keys == 0 || segment.key_begin >= segment.query_begin + segment.queries) continue;
      segment.heads = local_.heads();
      segment.head_size = model_.head_size();
      segment.document_starts =
          std::span(micro_batch.batch.document_starts).subspan(static_cast<std::size_t>(queries.local_begin));
      segment.document_stride = shape.sequence;
      segment.dropout_sequence = model_.sequence;
      segment.total_heads = model_.heads;
      segment.first_head = local_.tensor_rank * local_.heads();
      use(segment, queries.local_begin, keys.local_begin);
    }
  }
}

// Keys and values of this rank's tokens side by side: [rows, tokens, 2 * attention width].
void GptStage::pack_keys_values(const Operation& op, TensorView packed) {
  const BlockActivations a = block(op);
  const std::int64_t width = local_.attention_width();
  const auto element = static_cast<std::int64_t>(size_bytes(dtype_));
  const auto* from = static_cast<const std::byte*>(a.qkv.data()) + width * element;
  context_.kernels->memory().copy_rows(from, 3 * width * element, packed.data(), 2 * width * element, 2 * width * element,
                                       at(op.micro_batch).shape.tokens());
}

void GptStage::ring_forward(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const std::int64_t width = local_.attention_width();
  const PassWorkspace w = workspace(op);
  const TensorView arrived = w.ring[op.piece % 2];
  if (op.piece == 0) {
    k.fill(a.attention_out, 0.0);
    k.fill(a.logsumexp, -std::numeric_limits<double>::infinity());
    pack_keys_values(op, first_elements(arrived, ring_elements(local_, shape, local_.context_rank)));
  }
  // Runs of queries are not contiguous in the activations of several rows: each is worked on in a buffer of its own.
  const std::int64_t key_tokens = context_tokens(local_, shape.row_tokens, ring_origin(local_, op.piece));
  for_each_segment(op, [&](const AttentionSegment& segment, std::int64_t query, std::int64_t key) {
    const RunBuffers run = load_run(op, segment, query, a.attention_out, a.logsumexp);
    const std::int64_t key_row = key_tokens * 2 * width;
    if (context_.pitfalls.on(Pitfall::ring_merge_forgets_normaliser) && op.piece > 0) k.fill(run.logsumexp, 0.0);
    k.attention_segment_forward(segment, attention_dropout(op), {a.qkv, query * 3 * width, shape.sequence * 3 * width, 3 * width},
                                {arrived, key * 2 * width, key_row, 2 * width},
                                {arrived, key * 2 * width + width, key_row, 2 * width}, run.out, run.logsumexp);
    store_run(op, segment, query, run, a.attention_out, a.logsumexp);
  });
}

void GptStage::ring_backward(const Operation& op) {
  Kernels& k = *context_.kernels;
  const BlockActivations a = block(op);
  const BlockGradients g = block_gradients(op);
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const std::int64_t width = local_.attention_width();
  const int origin = ring_origin(local_, op.piece);
  const std::int64_t elements = ring_elements(local_, shape, origin);
  const TensorView arrived = workspace(op).ring[op.piece % 2];
  const TensorView key_value = arrived.flat(0, elements);
  const TensorView gradients = arrived.flat(elements, elements);
  if (op.piece == 0) {
    k.fill(g.qkv, 0.0);
    k.fill(gradients, 0.0);
    pack_keys_values(op, key_value);
  }
  const std::int64_t key_row = context_tokens(local_, shape.row_tokens, origin) * 2 * width;
  for_each_segment(op, [&](const AttentionSegment& segment, std::int64_t query, std::int64_t key) {
    const RunBuffers run = load_run(op, segment, query, a.attention_out, a.logsumexp);
    const RunBuffers dout = load_run(op, segment, query, g.attention_out, {});
    const auto of_query = [&](TensorView memory) {
      return StridedRows{memory, query * 3 * width, shape.sequence * 3 * width, 3 * width};
    };
    const auto of_key = [&](TensorView memory, std::int64_t column) {
      return StridedRows{memory, key * 2 * width + column, key_row, 2 * width};
    };
    k.attention_segment_backward(segment, attention_dropout(op), dout.out, of_query(a.qkv), of_key(key_value, 0),
                                 of_key(key_value, width), run.out, run.logsumexp, of_query(g.qkv), of_key(gradients, 0),
                                 of_key(gradients, width));
  });
}

// [rows, queries, width] and [rows, heads, queries] of one run, copied out of all the rank's tokens.
GptStage::RunBuffers GptStage::load_run(const Operation& op, const AttentionSegment& segment, std::int64_t query, TensorView out,
                                        TensorView logsumexp) {
  RunBuffers run;
  const std::int64_t width = local_.attention_width();
  run.out_memory = context_.arena->allocate(dtype_, {segment.rows * segment.queries * width}, MemoryCategory::workspace);
  run.out = run.out_memory.view(dtype_, {segment.rows, segment.queries, width});
  copy_run(op, segment, query, out, run.out, 1, width, true);
  if (!logsumexp) return run;
  run.logsumexp_memory =
      context_.arena->allocate(logsumexp.dtype(), {segment.rows * segment.heads * segment.queries}, MemoryCategory::workspace);
  run.logsumexp = run.logsumexp_memory.view(logsumexp.dtype(), {segment.rows, segment.heads, segment.queries});
  copy_run(op, segment, query, logsumexp, run.logsumexp, segment.heads, 1, true);
  return run;
}

void GptStage::store_run(const Operation& op, const AttentionSegment& segment, std::int64_t query, const RunBuffers& run,
                         TensorView out, TensorView logsumexp) {
  copy_run(op, segment, query, out, run.out, 1, local_.attention_width(), false);
  copy_run(op, segment, query, logsumexp, run.logsumexp, segment.heads, 1, false);
}

// `all` is [rows, outer, tokens of a row, inner], `part` the same with the run's queries.
void GptStage::copy_run(const Operation& op, const AttentionSegment& segment, std::int64_t query, TensorView all, TensorView part,
                        std::int64_t outer, std::int64_t inner, bool load) const {
  const std::int64_t tokens = at(op.micro_batch).shape.sequence;
  const auto element = static_cast<std::int64_t>(size_bytes(all.dtype()));
  const std::int64_t bytes = segment.queries * inner * element, stride = tokens * inner * element;
  auto* const whole = static_cast<std::byte*>(all.data()) + query * inner * element;
  Memory& lane = context_.kernels->memory();
  load ? lane.copy_rows(whole, stride, part.data(), bytes, bytes, segment.rows * outer)
       : lane.copy_rows(part.data(), bytes, whole, stride, bytes, segment.rows * outer);
}

// After the last step the gradients of this rank's keys and values are back.
void GptStage::take_home_key_value_gradients(const Operation& op) {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const std::int64_t width = local_.attention_width();
  const auto element = static_cast<std::int64_t>(size_bytes(dtype_));
  const TensorView home = workspace(op).ring[local_.context_ranks % 2];
  auto* to = static_cast<std::byte*>(block_gradients(op).qkv.data()) + width * element;
  context_.kernels->memory().copy_rows(home.data(), 2 * width * element, to, 3 * width * element, 2 * width * element,
                                       shape.tokens());
}

// Keys and values, in the backward pass followed by their gradients; its last step brings the gradients home alone.
void GptStage::ring_shift(const Operation& op) {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  const int ranks = local_.context_ranks;
  const bool forward = op.phase == Phase::forward;
  const bool last = op.piece + 1 == ranks;
  const std::int64_t leaving = ring_elements(local_, shape, ring_origin(local_, op.piece));
  const std::int64_t coming = ring_elements(local_, shape, ring_origin(local_, op.piece + 1));
  const PassWorkspace w = workspace(op);
  const TensorView from = w.ring[op.piece % 2];
  const TensorView to = w.ring[(op.piece + 1) % 2];
  const TensorView sent = last ? from.flat(leaving, leaving) : from.flat(0, forward ? leaving : 2 * leaving);
  const TensorView received = to.flat(0, last || forward ? coming : 2 * coming);
  Communicator& ring = groups_.of(GroupAxis::context);
  const Envelope envelope{inputs_.step, op.micro_batch, op.layer * ranks + op.piece, forward ? 0 : 1};
  const CommOptions options{op.purpose, to_string(op), Progress::background, static_cast<int>(inputs_.step)};
  Work receiving = ring.recv(received, (ring.rank() + ranks - 1) % ranks, envelope, options);
  Work sending = ring.send(sent, (ring.rank() + 1) % ranks, envelope, options);
  receiving.wait_host();
  sending.wait_host();
}

}  // namespace tandem
