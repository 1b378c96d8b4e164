// SPDX-License-Identifier: Apache-2.0
#include "suites/trace.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "core/io/trace_file_writer.h"

namespace tandem {
namespace {

TracedStep small_step(int experts = 0) {
  TracedStep step;
  step.model.vocabulary = 37;
  step.model.sequence = 12;
  step.model.layers = 3;
  step.model.hidden = 24;
  step.model.heads = 3;
  step.model.experts = experts;
  step.parameters = reference::initial_parameters<double>(step.model, Initialization::scattered, 5);
  step.batch = make_batch(4, 12);
  for (std::size_t i = 0; i < step.batch.ids.size(); ++i) {
    step.batch.ids[i] = static_cast<std::int32_t>(i * 7 % 37);
    step.batch.targets[i] = i % 5 == 4 ? kIgnoredTarget : static_cast<std::int32_t>(i * 11 % 37);
  }
  return step;
}

struct Written {
  bool with_weights = true, with_batch = true;
  TraceDropout dropout = TraceDropout::off;
};

// A float run of `computed` that claims to be one of `stated`, as a framework would record it.
void write_float_run(const std::filesystem::path& folder, const TracedStep& stated, const TracedStep& computed,
                     const Written& what = {}) {
  TraceHeader header = reference_header(stated, ReferenceSide::yardstick);
  header.framework = "someone's";
  if (what.dropout != TraceDropout::off) header.dropout = what.dropout;
  TraceWriter writer(folder, header);
  if (what.with_weights) {
    for (const ParameterSpec& spec : gpt_parameters(stated.model)) {
      std::vector<double> values = stated.parameters.at(spec.name);
      writer.append(whole_entry(spec.name, TraceKind::parameter, spec.shape, DType::f64), view_of(values, spec.shape));
    }
  }
  writer.header().loss = run_traced_reference(computed, ReferenceSide::yardstick, DType::f32, writer.consumer());
  if (what.with_batch) writer.set_batch(stated.batch);
  writer.close();
}

TEST(TraceSuite, ARightRunAgreesWithTheReferenceOnItsOwnWeights) {
  const TestFolder folder;
  write_float_run(folder / "a", small_step(), small_step());

  const TraceComparison comparison = compare_with_own_reference(open_trace(folder / "a"));

  EXPECT_TRUE(comparison.agrees()) << verdict_line(comparison);
  EXPECT_TRUE(comparison.has_yardstick);
  EXPECT_TRUE(comparison.incomplete.empty());
  EXPECT_GT(comparison.tensors.size(), 100U);
}

TEST(TraceSuite, AFaultInAnyLayerIsLocatedToIt) {
  for (int layer = 0; layer < 3; ++layer) {
    for (const std::string operation : {"ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"}) {
      const TestFolder folder;
      TracedStep wrong = small_step();
      for (double& value : wrong.parameters.at(fmt::format("h.{}.{}.weight", layer, operation))) value *= 1.01;
      write_float_run(folder / "a", small_step(), wrong);

      const auto first = compare_with_own_reference(open_trace(folder / "a")).first_divergence();

      ASSERT_TRUE(first);
      EXPECT_EQ(first->layer, layer);
      EXPECT_EQ(first->operation, operation);
      EXPECT_EQ(first->phase, "forward");
      EXPECT_GT(first->error_over_bound, 100);
    }
  }
}

TEST(TraceSuite, AWrongNormaliserShowsInTheLossAndNotBefore) {
  const TestFolder folder;
  TracedStep wrong = small_step();
  wrong.batch.targets[4] = 3;  // one token more takes part
  write_float_run(folder / "a", small_step(), wrong);
  const auto first = compare_with_own_reference(open_trace(folder / "a")).first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->operation, "loss");
}

TEST(TraceSuite, AReferenceTraceIsTheTruthOnEitherSide) {
  const TestFolder folder;
  TracedStep wrong = small_step();
  wrong.model.layer_norm_epsilon = 1e-3;
  write_float_run(folder / "good", small_step(), small_step());
  write_float_run(folder / "bad", small_step(), wrong);
  write_reference_trace(open_trace(folder / "good"), folder / "truth");

  const TraceReader truth = open_trace(folder / "truth");
  EXPECT_TRUE(truth.header().is_reference);
  EXPECT_TRUE(compare_two_traces(open_trace(folder / "good"), truth).agrees());
  EXPECT_TRUE(compare_two_traces(truth, open_trace(folder / "good")).agrees());
  const auto first = compare_two_traces(open_trace(folder / "bad"), truth).first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->name, "h.0.ln_1");
  EXPECT_TRUE(compare_with_own_reference(truth).agrees()) << "its own reference is itself";
}

TEST(TraceSuite, TwoRunsAreComparedWithTwiceTheBound) {
  const TestFolder folder;
  TracedStep wrong = small_step();
  wrong.parameters.at("h.1.mlp.c_fc.bias")[3] += 0.1;
  write_float_run(folder / "a", small_step(), small_step());
  write_float_run(folder / "b", wrong, wrong);
  EXPECT_TRUE(compare_two_traces(open_trace(folder / "a"), open_trace(folder / "a")).agrees());
  const TraceComparison comparison = compare_two_traces(open_trace(folder / "b"), open_trace(folder / "a"));
  EXPECT_EQ(comparison.bounds.allowances, 2);
  ASSERT_TRUE(comparison.first_divergence());
  EXPECT_EQ(comparison.first_divergence()->name, "h.1.mlp.c_fc.bias") << "they start from different weights";
  EXPECT_EQ(comparison.first_divergence()->phase, "parameters");
}

TEST(TraceSuite, TandemsDropoutMasksAreMadeAgain) {
  const TestFolder folder;
  TracedStep step = small_step();
  step.model.embedding_dropout = step.model.attention_dropout = step.model.residual_dropout = 0.25;
  step.dropout = reference::DropoutStep{17, 3};
  write_float_run(folder / "a", step, step);
  EXPECT_TRUE(compare_with_own_reference(open_trace(folder / "a")).agrees());
  TracedStep other = step;
  other.dropout->step = 4;
  write_float_run(folder / "b", step, other);
  EXPECT_EQ(compare_with_own_reference(open_trace(folder / "b")).first_divergence()->name, "embedding");
}

TEST(TraceSuite, AModelWithExpertsIsTracedToo) {
  const TestFolder folder;
  write_float_run(folder / "a", small_step(3), small_step(3));
  const TraceComparison comparison = compare_with_own_reference(open_trace(folder / "a"));
  EXPECT_TRUE(comparison.agrees()) << verdict_line(comparison);
  EXPECT_TRUE(comparison.incomplete.empty());
}

TEST(TraceSuite, SixteenBitRunsHaveAYardstickThatRoundsAsTheyDo) {
  for (const DType precision : {DType::bf16, DType::f16}) {
    const auto truth = record_reference(small_step(), ReferenceSide::truth);
    const auto rounded = record_reference(small_step(), ReferenceSide::yardstick, precision);
    const auto plain = record_reference(small_step(), ReferenceSide::yardstick, DType::f32);
    const TraceBounds bounds = trace_bounds(rounded->header(), 48);
    EXPECT_FALSE(first_divergence(*rounded, *truth, rounded.get(), bounds));
    EXPECT_FALSE(first_divergence(*plain, *truth, rounded.get(), bounds)) << "a finer run is within the bounds of a coarser one";
    EXPECT_TRUE(first_divergence(*rounded, *truth, plain.get(), trace_bounds(plain->header(), 48)));
  }
}

TEST(TraceSuite, TheYardstickOfADoubleRunIsTheTruth) {
  const auto truth = record_reference(small_step(), ReferenceSide::truth);
  const auto yardstick = record_reference(small_step(), ReferenceSide::yardstick, DType::f64);
  EXPECT_FALSE(yardstick->header().is_reference);
  const TraceComparison comparison = compare_traces({yardstick.get(), truth.get()}, trace_bounds(yardstick->header(), 48));
  EXPECT_DOUBLE_EQ(comparison.bounds.accumulate_roundoff, 0x1p-53);
  for (const TraceVerdict& verdict : comparison.tensors) EXPECT_EQ(verdict.tensor.error, 0);
}

TEST(TraceSuite, SaysWhyTheReferenceCannotRunAStep) {
  const TestFolder folder;
  const auto message = [&](const Written& what) {
    write_float_run(folder / "a", small_step(), small_step(), what);
    return message_of<InputError>([&] { static_cast<void>(compare_with_own_reference(open_trace(folder / "a"))); });
  };
  EXPECT_NE(message({.with_weights = false}).find("it carries no weights"), std::string::npos);
  EXPECT_NE(message({.with_batch = false}).find("it carries no batch"), std::string::npos);
  EXPECT_NE(message({.dropout = TraceDropout::other}).find("masks are those of another program"), std::string::npos);
}

TEST(TraceSuite, ComparesWithoutAYardstickWhereNoReferenceCanRun) {
  const TestFolder folder;
  write_float_run(folder / "a", small_step(), small_step(), {.with_weights = false});
  const TraceComparison comparison = compare_two_traces(open_trace(folder / "a"), open_trace(folder / "a"));
  EXPECT_TRUE(comparison.agrees());
  EXPECT_FALSE(comparison.has_yardstick);
}

// Two tensor ranks: the entries of a float run, those of `c_fc` cut by columns.
TEST(TraceSuite, MergedRanksGiveTheSameVerdict) {
  const TestFolder folder;
  const TracedStep step = small_step();
  TracedStep wrong = step;
  for (std::int64_t i = 0; i < 24; ++i) wrong.parameters.at("h.2.mlp.c_fc.weight")[static_cast<std::size_t>(96 * i + 60)] *= 1.1;
  write_float_run(folder / "whole", step, wrong);
  const TraceReader whole_run = open_trace(folder / "whole");
  for (int rank = 0; rank < 2; ++rank) {
    TraceWriter writer(folder / fmt::format("ranks/{}", rank), whole_run.header());
    for (std::size_t i = 0; i < whole_run.entries().size(); ++i) {
      TraceEntry entry = whole_run.entries()[i];
      entry.rank = rank;
      const std::int64_t width = entry.shard.global_shape.back();
      if (entry.name.find("c_fc") != std::string::npos) entry.shard.slices.back() = {{rank * width / 2, (rank + 1) * width / 2}};
      std::vector<double> values = gather_from(entry.shard, whole_run.values(i));
      writer.append(entry, view_of(values, {static_cast<std::int64_t>(values.size())}));
    }
    writer.set_batch(step.batch);
    writer.close();
  }

  const auto first = compare_with_own_reference(open_trace(folder / "ranks")).first_divergence();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->name, "h.2.mlp.c_fc");
  EXPECT_EQ(first->rank, 1);
  EXPECT_EQ(first->slice, "[0:48, 48:96]");
  EXPECT_EQ(first->element % 96, 60);

  EXPECT_TRUE(write_merged_trace(open_trace(folder / "ranks"), folder / "joined").empty());
  const TraceReader joined = open_trace(folder / "joined");
  EXPECT_EQ(joined.entries().size(), whole_run.entries().size());
  const auto again = compare_with_own_reference(joined).first_divergence();
  ASSERT_TRUE(again);
  EXPECT_EQ(again->name, first->name);
  EXPECT_EQ(again->error, first->error);
}

}  // namespace
}  // namespace tandem
