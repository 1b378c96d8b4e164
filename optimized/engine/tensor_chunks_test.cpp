// SPDX-License-Identifier: Apache-2.0
// Products made in pieces, each summed over the tensor ranks while the next is computed (OverlapConfig::tensor_chunks).
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/engine/lower.h"
#include "optimized/tensor_parallel/vocabulary_loss.h"

namespace tandem {
namespace {

struct Layout {
  const char* name;
  ParallelDegrees degrees;
  int chunks = 2;
  std::int64_t rows = 7;
  std::int64_t sequence = 11;
  int micro_batches = 2;
  const char* recompute = "none";
  int recompute_layers = 1;
  int experts = 0;
  std::string_view precision = "fp64";
  std::string_view schedule = "1f1b";
  int zero_stage = 0;
};

GptConfig model_of(const Layout& layout) {
  GptConfig model;
  model.vocabulary = 37;
  model.sequence = layout.sequence;
  model.layers = 4;
  model.hidden = 24;
  model.heads = 12;
  model.mlp_hidden = 48;
  model.experts = layout.experts;
  model.embedding_dropout = model.attention_dropout = model.residual_dropout = 0.1;
  return model;
}

TrainingPlan plan_of(const Layout& layout, int chunks) {
  TrainingPlan plan;
  plan.parallel = layout.degrees;
  plan.pipeline.schedule = layout.schedule;
  plan.sequence_parallel = true;
  plan.recompute = {layout.recompute, layout.recompute_layers};
  plan.batch = {layout.rows, layout.micro_batches};
  plan.precision = std::string(layout.precision);
  plan.numerics = numerics_from_precision(layout.precision);
  plan.zero_stage = layout.zero_stage;
  plan.overlap.tensor_chunks = chunks;
  return plan;
}

std::vector<StepProgram> programs_of(const TrainingPlan& plan, const GptConfig& model, const PitfallSet& pitfalls = {}) {
  std::vector<StepProgram> programs;
  for (int rank = 0; rank < plan.parallel.world_size(); ++rank) {
    programs.push_back(lower(plan, model, model.sequence, rank, pitfalls));
  }
  return programs;
}

bool is_piece_sum(const Operation& op) {
  return op.kind == OpKind::communicate && op.collective == Collective::reduce_scatter && op.background &&
         op.purpose == Purpose::activation;
}

class TensorChunks : public testing::TestWithParam<Layout> {};

TEST_P(TensorChunks, AreProvenAndMoveTheSameBytes) {
  const GptConfig model = model_of(GetParam());
  const TrainingPlan plan = plan_of(GetParam(), GetParam().chunks);
  ASSERT_TRUE(conflicts(plan, model).empty()) << conflicts(plan, model).front().reason;
  const auto facts = [&](const TrainingPlan& of) {
    return check_programs(programs_of(of, model), expectation(of, model, model.sequence));
  };

  const ProgramFacts pieces = facts(plan);
  const ProgramFacts whole = facts(plan_of(GetParam(), 1));

  EXPECT_TRUE(pieces.problems.empty()) << pieces.problems.front();
  for (std::size_t purpose = 0; purpose < kPurposes; ++purpose) EXPECT_EQ(pieces.wire_bytes[purpose], whole.wire_bytes[purpose]);
  EXPECT_NEAR(pieces.flops, whole.flops, 1e-9 * whole.flops);
}

// Losses, norms and this rank's parameters after some steps, and the loss of an evaluation, on every rank.
struct Record {
  std::vector<std::vector<double>> of_ranks;
  /// A product in pieces has the bits of the whole one: with oneDNN and AVX-512 from 16 rows on, in 16 bits always.
  bool same_bits = false;
};

Record record_of(const Layout& layout, int chunks) {
  const GptConfig model = model_of(layout);
  const TrainingPlan plan = plan_of(layout, chunks);
  const SyntheticCorpus corpus(
      {.vocabulary = model.vocabulary, .sequence = model.sequence, .seed = 3, .row_shape = RowShape::packed});
  const ProcessGrid grid(plan);
  const LocalModel local = local_model(model, plan, grid, 0);
  const MicroBatchShape shape = micro_batch_shape(local, plan.batch, model.sequence, plan.batch.micro_batches - 1);
  const std::int64_t shortest = shape.tokens() / local.tensor_ranks / layout.chunks;
  Record record;
  record.of_ranks.resize(static_cast<std::size_t>(plan.parallel.world_size()));
  run_world({.ranks = plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    Arena arena({.poison = true});
    const auto kernels = make_cpu_kernels({});
    const KernelsInfo info = kernels->info();
    if (comm.rank() == 0) {
      const bool few_rows = layout.precision == "fp32" && shortest < 16;
      record.same_bits = info.instruction_set == "avx512" && info.matrix_library.starts_with("oneDNN") && !few_rows &&
                         layout.precision != "fp64";
    }
    // Of what is rounding noise Adam would make steps of full length.
    OptimizerConfig optimizer;
    optimizer.kind = OptimizerKind::sgd;
    optimizer.max_grad_norm = 0.5;
    Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}}, {model, plan, optimizer, {}, 2, 5});
    engine.store().initialise(model, Initialization::scattered, 5);
    std::vector<double>& mine = record.of_ranks[static_cast<std::size_t>(comm.rank())];
    for (std::int64_t step = 0; step < 2; ++step) {
      const StepResult result = engine.train_step(corpus.training_batch(step, plan.batch.rows), step);
      mine.push_back(result.loss);
      mine.push_back(result.gradient_norm);
    }
    mine.push_back(engine.evaluate(corpus.training_batch(9, 5)));
    for (const OwnedPart& part : engine.store().parts()) {
      const std::vector<double> values = ParameterStore::values_of(engine.store().master(part));
      mine.insert(mine.end(), values.begin(), values.end());
    }
  });
  return record;
}

TEST_P(TensorChunks, TrainAsWholeProductsDo) {
  const Record whole = record_of(GetParam(), 1);
  const Record pieces = record_of(GetParam(), GetParam().chunks);
  if (whole.same_bits) {
    EXPECT_TRUE(pieces.of_ranks == whole.of_ranks);
    return;
  }
  // A few roundings of numbers below 10, in whatever the machine computes.
  const double tolerance = GetParam().precision == "fp64" ? 1e-12 : 1e-2;
  for (std::size_t rank = 0; rank < whole.of_ranks.size(); ++rank) {
    ASSERT_EQ(pieces.of_ranks[rank].size(), whole.of_ranks[rank].size());
    for (std::size_t i = 0; i < whole.of_ranks[rank].size(); ++i) {
      ASSERT_NEAR(pieces.of_ranks[rank][i], whole.of_ranks[rank][i], tolerance) << rank << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Plans, TensorChunks,
    testing::Values(
        Layout{.name = "Tensor2", .degrees = {.tensor = 2}},
        Layout{.name = "Tensor3Pieces3", .degrees = {.tensor = 3}, .chunks = 3},
        Layout{.name = "Tensor4Pieces5", .degrees = {.tensor = 4}, .chunks = 5, .micro_batches = 3},
        // 3 rows of 5 tokens over 4 ranks: slices of 4 and of 3 tokens.
        Layout{
            .name = "MorePiecesThanTokens", .degrees = {.tensor = 4}, .chunks = 9, .rows = 3, .sequence = 5, .micro_batches = 1},
        // One row of 5 tokens, or none: two ranks have one token, the last one or none of it.
        Layout{.name = "ASliceOfOneToken", .degrees = {.tensor = 4}, .chunks = 2, .rows = 1, .sequence = 5},
        Layout{.name = "Selective", .degrees = {.tensor = 2}, .chunks = 3, .recompute = "selective"},
        Layout{.name = "Full", .degrees = {.tensor = 3}, .chunks = 2, .recompute = "full", .recompute_layers = 2},
        Layout{.name = "Context", .degrees = {.tensor = 2, .context = 2}, .chunks = 3},
        Layout{.name = "Pipeline", .degrees = {.tensor = 2, .pipeline = 2}, .chunks = 2, .schedule = "zb-h1"},
        Layout{.name = "Stage3", .degrees = {.data = 2, .tensor = 2}, .chunks = 2, .zero_stage = 3},
        Layout{.name = "Experts", .degrees = {.data = 2, .tensor = 2, .expert = 2}, .chunks = 2, .experts = 4},
        Layout{.name = "Fp32Tensor2", .degrees = {.tensor = 2}, .chunks = 3, .rows = 9, .sequence = 25, .precision = "fp32"},
        Layout{.name = "Fp32Tensor3",
               .degrees = {.tensor = 3},
               .rows = 9,
               .sequence = 25,
               .recompute = "full",
               .recompute_layers = 2,
               .precision = "fp32"},
        Layout{.name = "Fp32Tensor4",
               .degrees = {.tensor = 4},
               .chunks = 3,
               .rows = 9,
               .sequence = 25,
               .micro_batches = 1,
               .precision = "fp32"},
        Layout{.name = "Bf16", .degrees = {.tensor = 2}, .chunks = 4, .precision = "bf16"},
        Layout{.name = "Fp8", .degrees = {.tensor = 2}, .chunks = 3, .precision = "fp8"}),
    [](const auto& of) { return of.param.name; });

TEST(TensorChunkPrograms, MakeEachProductInPiecesAndSumThemInTheBackground) {
  const Layout layout{.name = "", .degrees = {.tensor = 3}, .micro_batches = 1, .precision = "fp32"};
  const GptConfig model = model_of(layout);
  const StepProgram program = lower(plan_of(layout, 4), model, model.sequence, 1);
  const auto sums = [&](Phase phase, Part part, int layer) {
    std::string pieces;
    std::int64_t bytes = 0;
    for (const Operation& op : program) {
      if (!is_piece_sum(op) || op.phase != phase || op.part != part || op.layer != layer) continue;
      pieces += std::to_string(op.piece);
      bytes += op.bytes;
    }
    EXPECT_EQ(bytes, 7 * 11 * 24 * 4);
    return pieces;
  };
  for (int layer = 0; layer < model.layers; ++layer) {
    EXPECT_EQ(sums(Phase::forward, Part::attention_out, layer), "0123");
    EXPECT_EQ(sums(Phase::forward, Part::mlp, layer), "0123");
    EXPECT_EQ(sums(Phase::backward_input, Part::mlp, layer), "0123");
    EXPECT_EQ(sums(Phase::backward_input, Part::attention_in, layer), "0123");
  }
}

TEST(TensorChunkPrograms, AreRefusedWhereWhoeverTakesASumUpDoesNotWaitForAPiece) {
  for (const int recompute_layers : {0, 2}) {
    const Layout layout{.name = "",
                        .degrees = {.tensor = 2},
                        .chunks = 3,
                        .recompute = recompute_layers == 0 ? "none" : "full",
                        .recompute_layers = std::max(1, recompute_layers)};
    const GptConfig model = model_of(layout);
    const TrainingPlan plan = plan_of(layout, 3);
    const std::vector<StepProgram> good = programs_of(plan, model);
    const ProgramExpectation expected = expectation(plan, model, model.sequence);
    int refused = 0;
    for (OperationId sum = 0; sum < std::ssize(good[1]); ++sum) {
      if (!is_piece_sum(good[1][static_cast<std::size_t>(sum)])) continue;
      std::vector<StepProgram> programs = good;
      OperationId late = -1;
      for (OperationId id = sum; id < std::ssize(programs[1]); ++id) {
        Operation& op = programs[1][static_cast<std::size_t>(id)];
        if (late >= 0 && op.kind == OpKind::compute) {
          op.after.push_back(sum);
          break;
        }
        if (std::erase(op.after, sum) > 0) late = id;
      }
      const ProgramFacts facts = check_programs(programs, expected);
      ASSERT_EQ(facts.problems.size(), 1U) << to_string(good[1][static_cast<std::size_t>(sum)]);
      EXPECT_EQ(facts.problems.front(),
                fmt::format("rank 1: {} does not wait for {}", to_string(programs[1][static_cast<std::size_t>(late)]),
                            to_string(programs[1][static_cast<std::size_t>(sum)])));
      ++refused;
    }
    EXPECT_GT(refused, 0);
  }
}

TEST(TensorChunkPrograms, AreRefusedWithoutAPiece) {
  const Layout layout{.name = "", .degrees = {.tensor = 2}, .chunks = 3};
  const GptConfig model = model_of(layout);
  const TrainingPlan plan = plan_of(layout, 3);
  // Two pieces where three are planned: the last third of the tokens would be missing.
  const ProgramFacts facts = check_programs(programs_of(plan_of(layout, 2), model), expectation(plan, model, model.sequence));
  ASSERT_FALSE(facts.problems.empty());
  EXPECT_EQ(facts.problems.front(), "rank 0: forward h.0 attention_out mb 0 piece 2 appears 0 times, not once");
}

TEST(TensorChunkPrograms, AreRefusedWithThePitfall) {
  const Layout layout{.name = "", .degrees = {.tensor = 2}, .chunks = 3};
  const GptConfig model = model_of(layout);
  const TrainingPlan plan = plan_of(layout, 3);
  const Pitfall on[] = {Pitfall::tensor_chunk_merge_too_early};
  const ProgramFacts facts = check_programs(programs_of(plan, model, PitfallSet(on)), expectation(plan, model, model.sequence));
  ASSERT_FALSE(facts.problems.empty());
  EXPECT_EQ(facts.problems.front(),
            "rank 0: forward h.0 attention_merge mb 0 does not wait for reduce_scatter forward h.0 attention_out mb 0 piece 2");
}

TEST(TensorChunkPrograms, HideAllPiecesButTheLastBehindProductsThatTakeAsLong) {
  const Layout layout{.name = "", .degrees = {.tensor = 2}, .micro_batches = 1, .precision = "fp32"};
  const GptConfig model = model_of(layout);
  // Only the MLP's forward products take time, and its sums, if they do, as long as these.
  const auto makespan = [&](int chunks, bool sums_take_time) {
    const TrainingPlan plan = plan_of(layout, chunks);
    const double of_byte = 4.0 * static_cast<double>(model.mlp_hidden) / 2 / sizeof(float);
    const auto seconds = [&](const Operation& op) {
      if (op.part != Part::mlp || op.phase != Phase::forward) return 0.0;
      if (op.kind == OpKind::compute) return op.flops;
      return sums_take_time ? of_byte * static_cast<double>(op.bytes) : 0.0;
    };
    return time_programs(programs_of(plan, model), expectation(plan, model, model.sequence), seconds).makespan_seconds;
  };
  const double work = makespan(1, false);
  EXPECT_NEAR(makespan(1, true), 2 * work, 1e-6 * work);
  // Uneven pieces: a longer one behind a shorter one is not hidden whole.
  for (const int chunks : {2, 3, 6}) EXPECT_NEAR(makespan(chunks, true), work * (1 + 1.0 / chunks), work * 4 / 77) << chunks;
}

}  // namespace
}  // namespace tandem
