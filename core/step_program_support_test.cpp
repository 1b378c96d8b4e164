// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <numeric>
#include <optional>

#include <gtest/gtest.h>

#include "core/step_program_test_support.h"

namespace tandem::step_program_test {
namespace {

class Maker {
 public:
  Maker(const WorldShape& shape, const PipelineLayout& layout, const ProcessGrid& grid, int rank)
      : shape_(shape), layout_(layout), grid_(grid), here_(grid.coordinates(rank)) {}

  StepProgram program() {
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
      for (int mb = 0; mb < shape_.micro_batches; ++mb) forward(chunk, mb);
    }
    for (int chunk = shape_.chunks - 1; chunk >= 0; --chunk) {
      for (int mb = 0; mb < shape_.micro_batches; ++mb) backward(chunk, mb);
    }
    end_of_step();
    return std::move(program_);
  }

  RankExpectation expectation() const {
    RankExpectation expected;
    for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
      expected.chunk_stages.push_back(stage(chunk));
      expected.chunk_layers.push_back(layers(chunk));
      if (stage(chunk) == 0) expected.embedding_chunk = chunk;
      if (stage(chunk) == layout_.stages() - 1) expected.head_chunk = chunk;
    }
    expected.micro_batches = shape_.micro_batches;
    expected.ring_steps = shape_.degrees.context;
    expected.experts = shape_.experts;
    expected.head_pieces = shape_.head_pieces;
    for (const auto& sources : bucket_sources()) {
      expected.bucket_sources.push_back(sources);
      expected.bucket_is_reduced.push_back(reduces());
    }
    return expected;
  }

 private:
  [[nodiscard]] int stage(int chunk) const { return layout_.stage_of(here_.pipeline, chunk); }
  [[nodiscard]] Interval layers(int chunk) const { return layout_.layers[static_cast<std::size_t>(stage(chunk))]; }
  [[nodiscard]] bool reduces() const { return shape_.degrees.data > 1; }

  // One bucket for each layer, and one for what is outside the layers.
  [[nodiscard]] std::vector<std::vector<int>> bucket_sources() const {
    std::vector<std::vector<int>> sources;
    std::vector<int> outside;
    for (int chunk = shape_.chunks - 1; chunk >= 0; --chunk) {
      for (auto layer = static_cast<int>(layers(chunk).end) - 1; layer >= layers(chunk).begin; --layer)
        sources.push_back({layer});
      if (stage(chunk) == 0) outside.push_back(kEmbeddingSource);
      if (stage(chunk) == layout_.stages() - 1) outside.push_back(kHeadSource);
    }
    if (!outside.empty()) sources.push_back(outside);
    return sources;
  }

  Operation& push(OpKind kind, int chunk, int micro_batch) {
    Operation op;
    op.kind = kind;
    op.chunk = chunk;
    op.micro_batch = micro_batch;
    program_.push_back(op);
    return program_.back();
  }

  void compute(Phase phase, Part part, int layer, int chunk, int micro_batch, int piece = 0) {
    Operation& op = push(OpKind::compute, chunk, micro_batch);
    op.phase = phase;
    op.part = part;
    op.layer = layer;
    op.piece = piece;
    op.flops = 1;
  }

  void memory(OpKind kind, Part part, int layer, int chunk, int micro_batch) {
    Operation& op = push(kind, chunk, micro_batch);
    op.part = part;
    op.layer = layer;
    op.bytes = part == Part::block ? kBlockBytes : 0;
  }

  void tensor_sum(Phase phase, Part part, int layer, int chunk, int micro_batch) {
    if (shape_.degrees.tensor == 1) return;
    Operation& op = push(OpKind::communicate, chunk, micro_batch);
    op.axis = GroupAxis::tensor;
    op.purpose = Purpose::activation;
    op.phase = phase;
    op.part = part;
    op.layer = layer;
    op.bytes = kMessageBytes;
  }

  void message(Collective collective, Phase phase, int into, int other, int chunk, int micro_batch) {
    if (other < 0 || other >= layout_.stages() || layout_.rank_of_stage(other) == here_.pipeline) return;
    Operation& op = push(OpKind::communicate, chunk, micro_batch);
    op.collective = collective;
    op.axis = GroupAxis::pipeline;
    op.purpose = Purpose::activation;
    op.phase = phase;
    op.part = Part::message;
    op.stage = into;
    Coordinates peer = here_;
    peer.pipeline = layout_.rank_of_stage(other);
    op.peer = grid_.rank_of(peer);
    op.bytes = kMessageBytes;
  }

  void block(Phase phase, int layer, int chunk, int micro_batch) {
    const std::vector<Part> mlp = shape_.experts ? std::vector<Part>{Part::router, Part::dispatch, Part::experts, Part::combine}
                                                 : std::vector<Part>{Part::mlp};
    std::vector<Part> parts = {Part::norm_1,        Part::attention_in,    Part::attention_core,
                               Part::attention_out, Part::attention_merge, Part::norm_2};
    parts.insert(parts.end(), mlp.begin(), mlp.end());
    parts.push_back(Part::mlp_merge);
    if (phase == Phase::backward_input) std::reverse(parts.begin(), parts.end());
    for (const Part part : parts) {
      const int pieces = part == Part::attention_core ? shape_.degrees.context : 1;
      for (int piece = 0; piece < pieces; ++piece) compute(phase, part, layer, chunk, micro_batch, piece);
      if (part == mlp.back()) tensor_sum(phase, part, layer, chunk, micro_batch);
    }
  }

  void forward(int chunk, int mb) {
    const int s = stage(chunk);
    message(Collective::recv, Phase::forward, s, s - 1, chunk, mb);
    if (s == 0) {
      memory(OpKind::allocate, Part::embedding, -1, chunk, mb);
      compute(Phase::forward, Part::embedding_lookup, -1, chunk, mb);
      compute(Phase::forward, Part::embedding, -1, chunk, mb);
    }
    for (auto layer = static_cast<int>(layers(chunk).begin); layer < layers(chunk).end; ++layer) {
      memory(OpKind::allocate, Part::block, layer, chunk, mb);
      block(Phase::forward, layer, chunk, mb);
    }
    if (s == layout_.stages() - 1) {
      memory(OpKind::allocate, Part::head_norm, -1, chunk, mb);
      compute(Phase::forward, Part::head_norm, -1, chunk, mb);
      for (int piece = 0; piece < shape_.head_pieces; ++piece) {
        compute(Phase::forward, Part::head_logits, -1, chunk, mb, piece);
        compute(Phase::forward, Part::head_loss, -1, chunk, mb, piece);
      }
    }
    message(Collective::send, Phase::forward, s + 1, s + 1, chunk, mb);
  }

  void backward(int chunk, int mb) {
    const int s = stage(chunk);
    message(Collective::recv, Phase::backward_input, s, s + 1, chunk, mb);
    if (s == layout_.stages() - 1) {
      compute(Phase::backward_input, Part::head_norm, -1, chunk, mb);
      compute(Phase::backward_weight, Part::head_norm, -1, chunk, mb);
      memory(OpKind::free, Part::head_norm, -1, chunk, mb);
    }
    for (auto layer = static_cast<int>(layers(chunk).end) - 1; layer >= layers(chunk).begin; --layer) {
      block(Phase::backward_input, layer, chunk, mb);
      compute(Phase::backward_weight, Part::block, layer, chunk, mb);
      memory(OpKind::free, Part::block, layer, chunk, mb);
    }
    if (s == 0) {
      compute(Phase::backward_weight, Part::embedding, -1, chunk, mb);
      memory(OpKind::free, Part::embedding, -1, chunk, mb);
    }
    message(Collective::send, Phase::backward_input, s - 1, s - 1, chunk, mb);
  }

  // Of the gradient that an operation adds to.
  static std::optional<int> source_of(const Operation& op) {
    if (op.kind != OpKind::compute) return std::nullopt;
    if (op.part == Part::head_loss) return kHeadSource;
    if (op.phase != Phase::backward_weight || op.part == Part::head_norm) return std::nullopt;
    return op.layer >= 0 ? op.layer : kEmbeddingSource;
  }

  // Dependencies are declared for gradients alone: of each bucket on what adds to it.
  void end_of_step() {
    std::vector<OperationId> ready;
    const auto sources = bucket_sources();
    for (std::size_t bucket = 0; reduces() && bucket < sources.size(); ++bucket) {
      std::vector<OperationId> after;
      for (OperationId i = 0; i < std::ssize(program_); ++i) {
        const Operation& op = program_[static_cast<std::size_t>(i)];
        const std::optional<int> source = source_of(op);
        if (source && std::count(sources[bucket].begin(), sources[bucket].end(), *source) > 0) after.push_back(i);
      }
      Operation& op = push(OpKind::communicate, 0, -1);
      op.axis = GroupAxis::gradient;
      op.purpose = Purpose::gradient;
      op.bucket = static_cast<int>(bucket);
      op.bytes = kGradientBytes;
      op.after = after;
      ready.push_back(static_cast<OperationId>(program_.size()) - 1);
    }
    push(OpKind::gradient_norm, 0, -1).after = ready;
    const auto norm = static_cast<OperationId>(program_.size()) - 1;
    if (grid_.group(GroupAxis::model, grid_.rank_of(here_)).size() > 1) {
      Operation& sum = push(OpKind::communicate, 0, -1);
      sum.axis = GroupAxis::model;
      sum.bytes = kNormBytes;
    }
    push(OpKind::optimizer, 0, -1).after = {norm};
  }

  const WorldShape& shape_;
  const PipelineLayout& layout_;
  const ProcessGrid& grid_;
  Coordinates here_;
  StepProgram program_;
};

// The program of the operations at `kept`, in this order, with its dependencies renumbered.
StepProgram renumbered(const StepProgram& program, const std::vector<int>& kept) {
  std::vector<int> place(program.size(), -1);
  for (std::size_t i = 0; i < kept.size(); ++i) place[static_cast<std::size_t>(kept[i])] = static_cast<int>(i);
  StepProgram result;
  for (const int index : kept) {
    Operation op = program[static_cast<std::size_t>(index)];
    std::vector<OperationId> after;
    for (const OperationId id : op.after) {
      if (place[static_cast<std::size_t>(id)] >= 0) after.push_back(place[static_cast<std::size_t>(id)]);
    }
    op.after = std::move(after);
    result.push_back(std::move(op));
  }
  return result;
}

std::vector<int> all_of(const StepProgram& program) {
  std::vector<int> indices(program.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

}  // namespace

World make_world(const WorldShape& shape) {
  TrainingPlan plan;
  plan.parallel = shape.degrees;
  plan.pipeline.chunks = shape.chunks;
  plan.pipeline.schedule = shape.v_shaped ? "zb-v" : shape.chunks > 1 ? "interleaved" : "gpipe";
  GptConfig model;
  model.layers = shape.layers;
  const PipelineLayout layout = pipeline_layout(plan, model);
  const auto grid = std::make_shared<ProcessGrid>(plan);
  World world;
  for (int rank = 0; rank < grid->size(); ++rank) {
    Maker maker(shape, layout, *grid, rank);
    world.expectation.ranks.push_back(maker.expectation());
    world.programs.push_back(maker.program());
  }
  world.expectation.group = [grid](GroupAxis axis, int rank) { return grid->group(axis, rank); };
  return world;
}

int find_operation(const StepProgram& program, const Wanted& wanted) {
  const auto found = std::find_if(program.begin(), program.end(), wanted);
  EXPECT_NE(found, program.end());
  return found == program.end() ? 0 : static_cast<int>(found - program.begin());
}

Wanted is_compute(Phase phase, Part part, int layer, int micro_batch, int piece) {
  return [=](const Operation& op) {
    return op.kind == OpKind::compute && op.phase == phase && op.part == part && op.layer == layer &&
           op.micro_batch == micro_batch && op.piece == piece;
  };
}

Wanted is_message(Collective collective, Phase phase, int micro_batch) {
  return [=](const Operation& op) {
    return op.kind == OpKind::communicate && op.collective == collective && op.phase == phase && op.micro_batch == micro_batch;
  };
}

Wanted is_bucket(int bucket) {
  return [=](const Operation& op) {
    return op.kind == OpKind::communicate && op.purpose == Purpose::gradient && op.bucket == bucket;
  };
}

Wanted is_kind(OpKind kind) {
  return [=](const Operation& op) { return op.kind == kind; };
}

void erase_operation(StepProgram& program, int index) {
  std::vector<int> kept = all_of(program);
  kept.erase(kept.begin() + index);
  program = renumbered(program, kept);
}

void move_operation(StepProgram& program, int from, int to) {
  std::vector<int> kept = all_of(program);
  kept.erase(kept.begin() + from);
  kept.insert(kept.begin() + to, from);
  program = renumbered(program, kept);
}

std::string all_problems(const World& world) {
  std::string text;
  for (const std::string& problem : check_programs(world.programs, world.expectation).problems) text += problem + "\n";
  return text;
}

Operation& the(StepProgram& program, const Wanted& wanted) {
  return program[static_cast<std::size_t>(find_operation(program, wanted))];
}

testing::AssertionResult reports(const World& world, const std::string& text) {
  const std::string found = all_problems(world);
  if (found.find(text) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << text << "' is not among:\n" << found;
}

}  // namespace tandem::step_program_test
