// SPDX-License-Identifier: Apache-2.0
// Which part of which global tensor a rank has just computed (core/trace.h).
#include <fmt/format.h>

#include "optimized/engine/gpt_stage.h"

namespace tandem {

std::string GptStage::traced_name(const Operation& op, std::string_view what) const {
  const std::string gradient = op.phase == Phase::forward ? "" : "d.";
  if (op.layer < 0) return gradient + std::string(what);
  return what.empty() ? fmt::format("{}h.{}", gradient, op.layer) : fmt::format("{}h.{}.{}", gradient, op.layer, what);
}

// Local tokens [tokens) of the micro-batch, as intervals of the flattened [rows * sequence] tokens of the global batch.
void GptStage::trace_rows(const Operation& op, std::string name, TensorView values, Interval tokens,
                          std::vector<Interval> columns, std::int64_t width) const {
  const MicroBatch& micro_batch = at(op.micro_batch);
  const std::int64_t sequence = micro_batch.shape.row_tokens;
  std::vector<Interval> global;
  std::int64_t local = 0;  // tokens of the chunks before
  for (const std::int64_t row : micro_batch.batch.row_ids) {
    for (const Interval& chunk : context_intervals(local_, sequence, local_.context_rank)) {
      const std::int64_t begin = std::max(tokens.begin, local);
      const std::int64_t end = std::min(tokens.end, local + chunk.size());
      const std::int64_t first = row * sequence + chunk.begin - local;
      if (begin < end) {
        if (!global.empty() && global.back().end == first + begin) {
          global.back().end = first + end;
        } else {
          global.push_back({first + begin, first + end});
        }
      }
      local += chunk.size();
    }
  }
  if (global.empty()) return;
  TracedTensor traced;
  traced.name = std::move(name);
  traced.micro_batch = op.micro_batch;
  traced.shard = whole(traced.name, {inputs_.global_rows * sequence, width}, values.dtype());
  traced.shard.slices = {std::move(global), std::move(columns)};
  const HostView host(context_.kernels->memory(), values, Access::read);
  traced.values = host.view();
  context_.trace(traced);
}

void GptStage::trace(const Operation& op, std::string name, TensorView values, Tokens tokens, std::vector<Interval> columns,
                     std::int64_t width) const {
  if (!tracing()) return;
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  trace_rows(op, std::move(name), values, tokens == Tokens::slice ? token_slice(local_, shape) : Interval{0, shape.tokens()},
             std::move(columns), width);
}

void GptStage::trace_hidden(const Operation& op, std::string_view what, TensorView values, Tokens tokens) const {
  if (tracing()) trace(op, traced_name(op, what), values, tokens, {{0, model_.hidden}}, model_.hidden);
}

}  // namespace tandem
