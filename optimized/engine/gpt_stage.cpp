// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/gpt_stage.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace tandem {
GptStage::GptStage(const RankContext& context, const GptConfig& model, const TrainingPlan& plan, const ProcessGroups& groups,
                   ParameterStore& store, Fp8Scaling* fp8)
    : context_(context),
      model_(model),
      groups_(groups),
      store_(store),
      local_(local_model(model, plan, groups.grid(), groups.rank())),
      stages_(pipeline_layout(plan, model)),
      dtype_(plan.numerics.storage),
      wte_(store.find("wte.weight")),
      wpe_(store.find("wpe.weight")),
      final_norm_(store.find("ln_f.weight")),
      lm_head_(store.find("lm_head.weight")),
      fp8_(fp8) {
  for (int layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = fmt::format("h.{}.", layer);
    if (!store.find(prefix + "ln_1.weight")) continue;
    const auto index = [&](std::string_view name) { return store.index_of(fmt::format("{}{}", prefix, name)); };
    const auto mlp = [&](const std::string& at) {
      return BlockParameters::Mlp{index(at + "c_fc.weight"), index(at + "c_fc.bias"), index(at + "c_proj.weight"),
                                  index(at + "c_proj.bias")};
    };
    BlockParameters block{index("ln_1.weight"),
                          index("ln_1.bias"),
                          index("attn.c_attn.weight"),
                          index("attn.c_attn.bias"),
                          index("attn.c_proj.weight"),
                          index("attn.c_proj.bias"),
                          index("ln_2.weight"),
                          index("ln_2.bias"),
                          {},
                          0};
    if (model.experts == 0) block.mlps.push_back(mlp("mlp."));
    if (model.experts > 0) block.router = index("mlp.router.weight");
    for (int e = 0; e < (model.experts > 0 ? local_.experts() : 0); ++e) {
      block.mlps.push_back(mlp(fmt::format("mlp.experts.{}.", local_.first_expert() + e)));
    }
    block_parameters_.emplace(layer, std::move(block));
  }
}

const GptStage::BlockParameters& GptStage::parameters_of(int layer) const {
  const auto found = block_parameters_.find(layer);
  TANDEM_CHECK(found != block_parameters_.end(), fmt::format("layer {} is not on rank {}", layer, groups_.rank()));
  return found->second;
}

void GptStage::begin_step(StepInputs inputs) {
  inputs_ = std::move(inputs);
  dropout_rows_.clear();
  dropout_tokens_.clear();
  for (const MicroBatch& micro_batch : inputs_.micro_batches) {
    // Masks belong to rows of the global batch: keyed by local rows, every rank would drop the same elements.
    std::vector<std::int64_t> rows = micro_batch.batch.row_ids;
    if (context_.pitfalls.on(Pitfall::dropout_keyed_by_local_row)) {
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int64_t>(i);
    }
    std::vector<std::int64_t> tokens;
    if (local_.sequence_parallel || local_.context_ranks > 1) {
      for (const std::int64_t row : rows) {
        for (const Interval& chunk : context_intervals(local_, micro_batch.shape.row_tokens, local_.context_rank)) {
          for (std::int64_t t = chunk.begin; t < chunk.end; ++t) tokens.push_back(row * model_.sequence + t);
        }
      }
    }
    dropout_rows_.push_back(std::move(rows));
    dropout_tokens_.push_back(std::move(tokens));
  }
}

StageTotals GptStage::take_totals() noexcept { return std::exchange(totals_, {}); }

GptStage::MemoryKey GptStage::key_of(const Operation& op) {
  return {op.category, op.part, op.phase, op.layer, op.micro_batch, op.chunk, op.stage};
}

const Arena::Buffer& GptStage::memory(MemoryCategory category, Part part, Phase phase, int layer, int micro_batch, int chunk,
                                      int stage) const {
  const auto found = buffers_.find({category, part, phase, layer, micro_batch, chunk, stage});
  TANDEM_CHECK(found != buffers_.end(), fmt::format("no {} of {} layer {} micro-batch {} chunk {} stage {}", name(category),
                                                    name(part), layer, micro_batch, chunk, stage));
  return found->second;
}

void GptStage::allocate(const Operation& op) {
  TANDEM_CHECK(op.bytes == expected_bytes(op),
               fmt::format("{} of {} bytes, but {} are needed", to_string(op), op.bytes, expected_bytes(op)));
  const auto [at, is_new] = buffers_.emplace(key_of(op), context_.arena->allocate(op.bytes, op.category));
  TANDEM_CHECK(is_new, fmt::format("{} twice", to_string(op)));
}

void GptStage::free(const Operation& op) {
  const auto found = buffers_.find(key_of(op));
  TANDEM_CHECK(found != buffers_.end(), fmt::format("{} of what is not there", to_string(op)));
  const auto* const begin = static_cast<const std::byte*>(found->second.data());
  const std::byte* const end = begin + std::max<std::int64_t>(1, found->second.size_bytes());  // a message may be empty
  collect_arrived();
  const auto work = sending_.lower_bound(begin);
  if (work != sending_.end() && work->first < static_cast<const void*>(end)) {
    departing_.push_back({std::move(found->second), std::move(work->second)});
    sending_.erase(work);
  }
  // Routing lives as long as what it was computed with.
  const bool inside = op.part == Part::block && op.layer >= 0 && op.category == MemoryCategory::activations &&
                      (op.phase == Phase::forward) == storage_of(op, op.layer).inside;
  if (inside) routings_.erase({op.micro_batch, op.layer});
  buffers_.erase(found);
}

// Waiting for a message at the place where its memory is no longer needed could wait for a rank that waits for this one. So the
// memory is kept until the message has arrived, and the step ends with none under way.
void GptStage::collect_arrived() {
  std::erase_if(departing_, [](Departing& message) {
    if (!message.work.done()) return false;
    message.work.wait_host();
    return true;
  });
}

void GptStage::finish_messages() {
  for (Departing& message : departing_) message.work.wait_host();
  departing_.clear();
  for (auto& [memory, work] : sending_) work.wait_host();
  sending_.clear();
}

std::int64_t GptStage::expected_bytes(const Operation& op) const {
  const MicroBatchShape& shape = at(op.micro_batch).shape;
  Carver counter(nullptr, dtype_);
  const bool activations = op.category == MemoryCategory::activations;
  switch (op.part) {
    case Part::embedding:
    case Part::message: carve_stream(counter, local_, shape); break;
    case Part::block:
      if (op.layer < 0) {
        carve_pass_workspace(counter, local_, shape, op.phase != Phase::backward_input);
      } else if (activations) {
        Carver other(nullptr, dtype_);
        const bool kept = op.phase == Phase::forward;
        carve_block(kept ? counter : other, kept ? other : counter, local_, shape, storage_of(op, op.layer));
      } else {
        carve_block_gradients(counter, local_, shape);
      }
      break;
    case Part::head_norm: carve_head(counter, local_, shape); break;
    case Part::head_logits: carve_head_workspace(counter, local_, shape); break;
    case Part::embedding_lookup:
    case Part::head_loss: carve_head_gradient(counter, local_, shape); break;
    default: TANDEM_CHECK(false, fmt::format("{} has no memory of its own", to_string(op)));
  }
  return counter.size_bytes();
}

BlockStorage GptStage::storage_of(const Operation& op, int layer) const {
  const int stage = stages_.stage_of(groups_.here().pipeline, op.chunk);
  return block_storage(local_.recompute, stages_.layers[static_cast<std::size_t>(stage)], layer);
}

BlockActivations GptStage::block(const Operation& op, int layer) const {
  const auto carver = [&](Phase phase) {
    const auto found = buffers_.find({MemoryCategory::activations, Part::block, phase, layer, op.micro_batch, op.chunk, -1});
    return Carver(found == buffers_.end() ? nullptr : found->second.data(), dtype_);
  };
  Carver kept = carver(Phase::forward);
  Carver rest = carver(Phase::recompute);
  return carve_block(kept, rest, local_, at(op.micro_batch).shape, storage_of(op, layer));
}

BlockGradients GptStage::block_gradients(const Operation& op) const {
  Carver carver(memory(MemoryCategory::workspace, Part::block, Phase::forward, op.layer, op.micro_batch, op.chunk).data(),
                dtype_);
  return carve_block_gradients(carver, local_, at(op.micro_batch).shape);
}

PassWorkspace GptStage::workspace(const Operation& op) const {
  const Phase phase = recomputing_ ? Phase::recompute : op.phase;
  Carver carver(memory(MemoryCategory::workspace, Part::block, phase, -1, op.micro_batch, op.chunk).data(), dtype_);
  return carve_pass_workspace(carver, local_, at(op.micro_batch).shape, op.phase == Phase::forward);
}

TensorView GptStage::embedding_out(const Operation& op) const {
  Carver carver(memory(MemoryCategory::activations, Part::embedding, Phase::forward, -1, op.micro_batch, op.chunk).data(),
                dtype_);
  return carve_stream(carver, local_, at(op.micro_batch).shape);
}

// The first block of a stage works on what came from the stage before.
TensorView GptStage::block_input(const Operation& op) const {
  const int stage = stages_.stage_of(groups_.here().pipeline, op.chunk);
  if (op.layer > stages_.layers[static_cast<std::size_t>(stage)].begin) return block(op, op.layer - 1).out;
  if (stage == 0) return embedding_out(op);
  Carver carver(memory(MemoryCategory::activations, Part::message, Phase::forward, -1, op.micro_batch, op.chunk, stage).data(),
                dtype_);
  return carve_stream(carver, local_, at(op.micro_batch).shape);
}

TensorView GptStage::chunk_output(const Operation& op) const {
  const int stage = stages_.stage_of(groups_.here().pipeline, op.chunk);
  return block(op, static_cast<int>(stages_.layers[static_cast<std::size_t>(stage)].end) - 1).out;
}

// The gradient of a stage's output becomes that of its input in place; a neighbouring stage on this rank goes on in the same
// memory.
TensorView GptStage::stream(const Operation& op) const {
  const int here = groups_.here().pipeline;
  int stage = stages_.stage_of(here, op.chunk);
  while (stage + 1 < stages_.stages() && stages_.rank_of_stage(stage + 1) == here) ++stage;
  Carver carver(memory(MemoryCategory::workspace, Part::message, Phase::backward_input, -1, op.micro_batch,
                       stages_.chunk_of_stage(stage), stage)
                    .data(),
                dtype_);
  return carve_stream(carver, local_, at(op.micro_batch).shape);
}

HeadActivations GptStage::head(const Operation& op) const {
  Carver carver(memory(MemoryCategory::activations, Part::head_norm, Phase::forward, -1, op.micro_batch, op.chunk).data(),
                dtype_);
  return carve_head(carver, local_, at(op.micro_batch).shape);
}

HeadWorkspace GptStage::head_workspace(const Operation& op) const {
  Carver carver(memory(MemoryCategory::workspace, Part::head_logits, Phase::forward, -1, op.micro_batch, op.chunk).data(),
                dtype_);
  return carve_head_workspace(carver, local_, at(op.micro_batch).shape);
}

TensorView GptStage::head_gradient(const Operation& op) const {
  Carver carver(memory(MemoryCategory::workspace, Part::head_loss, Phase::forward, -1, op.micro_batch, op.chunk).data(), dtype_);
  return carve_head_gradient(carver, local_, at(op.micro_batch).shape);
}

TensorView GptStage::slice_of(const Operation& op, TensorView all_tokens) const {
  const Interval slice = token_slice(local_, at(op.micro_batch).shape);
  return all_tokens.rows(slice.begin, slice.size());
}

DropoutSpec GptStage::residual_dropout(const Operation& op, DropoutSite site, double probability) const {
  DropoutSpec spec;
  if (!inputs_.training || probability == 0.0) return spec;
  const int layer = op.layer < 0 ? 0 : op.layer;
  spec.key = {inputs_.dropout_seed, inputs_.step, static_cast<std::uint32_t>(layer), site};
  spec.probability = probability;
  const auto micro_batch = static_cast<std::size_t>(op.micro_batch);
  if (local_.sequence_parallel || local_.context_ranks > 1) {
    const Interval slice = token_slice(local_, at(op.micro_batch).shape);
    spec.row_ids = std::span(dropout_tokens_[micro_batch])
                       .subspan(static_cast<std::size_t>(slice.begin), static_cast<std::size_t>(slice.size()));
    spec.row_elements = model_.hidden;
  } else {
    spec.row_ids = dropout_rows_[micro_batch];
    spec.row_elements = model_.sequence * model_.hidden;
  }
  // A mask that is drawn again must be the same one.
  if (recomputing_ && context_.pitfalls.on(Pitfall::recompute_draws_other_masks)) ++spec.key.step;
  // Tensor ranks compute the same residual stream and must drop the same of it.
  if (context_.pitfalls.on(Pitfall::dropout_stream_out_of_step) && local_.tensor_ranks > 1 && local_.tensor_rank == 0)
    ++spec.key.step;
  return spec;
}

DropoutSpec GptStage::attention_dropout(const Operation& op) const {
  DropoutSpec spec;
  if (!inputs_.training || model_.attention_dropout == 0.0) return spec;
  spec.key = {inputs_.dropout_seed, inputs_.step, static_cast<std::uint32_t>(op.layer), DropoutSite::attention_probability};
  spec.probability = model_.attention_dropout;
  spec.row_ids = dropout_rows_[static_cast<std::size_t>(op.micro_batch)];
  spec.row_elements = model_.heads * model_.sequence * model_.sequence;
  if (recomputing_ && context_.pitfalls.on(Pitfall::recompute_draws_other_masks)) ++spec.key.step;
  return spec;
}

Operation GptStage::begin(const Operation& op) {
  recomputing_ = op.phase == Phase::recompute;
  Operation done = op;
  if (recomputing_) done.phase = Phase::forward;
  return done;
}

// One pass over memory instead of two, which is what these operations take time for on a device. Who traces sees each by itself.
bool GptStage::merges_norm_2(const Operation& op, const Operation* next) const {
  if (context_.kernels->memory().on_host() || next == nullptr || context_.trace) return false;
  const bool forward = op.phase == Phase::forward || op.phase == Phase::recompute;
  return forward && op.part == Part::attention_merge && next->kind == OpKind::compute && next->part == Part::norm_2 &&
         next->phase == op.phase && next->layer == op.layer && next->micro_batch == op.micro_batch && next->chunk == op.chunk;
}

void GptStage::compute(const Operation& op, const Operation* next) {
  norm_2_follows_ = merges_norm_2(op, next);
  do_compute(begin(op));
}

Work GptStage::communicate(const Operation& op) { return do_communicate(begin(op)); }

void GptStage::do_compute(const Operation& op) {
  if (at(op.micro_batch).batch.rows == 0 && op.part != Part::experts && op.part != Part::block) return;
  const bool forward = op.phase == Phase::forward;
  switch (op.part) {
    case Part::embedding_lookup: forward ? embedding_lookup_forward(op) : embedding_lookup_backward(op); break;
    case Part::embedding: forward ? embedding_forward(op) : embedding_backward(op); break;
    case Part::norm_1: norm_1(op); break;
    case Part::attention_in: attention_in(op); break;
    case Part::attention_core: attention_core(op); break;
    case Part::attention_out: attention_out(op); break;
    case Part::attention_merge: attention_merge(op); break;
    case Part::norm_2: norm_2(op); break;
    case Part::mlp: mlp(op); break;
    case Part::router: router(op); break;
    case Part::dispatch: dispatch(op); break;
    case Part::experts: experts(op); break;
    case Part::combine: combine(op); break;
    case Part::mlp_merge: mlp_merge(op); break;
    case Part::head_norm: head_norm(op); break;
    case Part::head_logits: head_logits(op); break;
    case Part::head_loss: head_loss(op); break;
    case Part::block: block_weights(op); break;
    case Part::message: take_over(op); break;
  }
}

}  // namespace tandem
