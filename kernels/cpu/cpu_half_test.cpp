// SPDX-License-Identifier: Apache-2.0
// Operations of a layer on bf16 and fp16 tensors: those on fp32 tensors of the same numbers, every output rounded once.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/batch.h"
#include "kernels/cpu/half_test_support.h"

namespace tandem::cpu {
namespace {

class Half : public HalfTest {};

TEST_P(Half, EmbeddingIsRoundedOnceAfterItsSum) {
  constexpr std::int64_t kVocabulary = 31, kSequence = 13;
  for (const auto& [tokens, hidden] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {1, 1}, {197, 301}, {40, 3000}}) {
    expect_rounded([tokens = tokens, hidden = hidden](Kernels& kernels, CallTensors& tensors) {
      std::vector<std::int32_t> ids, positions;
      for (std::int64_t t = 0; t < tokens; ++t) {
        ids.push_back(static_cast<std::int32_t>(t * t % kVocabulary));
        positions.push_back(static_cast<std::int32_t>(t % kSequence));
      }
      const Shape table = {kVocabulary, hidden}, places = {kSequence, hidden}, rows = {tokens, hidden};
      const auto wte = tensors.data(table, floats(kVocabulary * hidden, 1)),
                 wpe = tensors.data(places, floats(kSequence * hidden, 2));
      const auto out = tensors.data(rows), dout = tensors.data(rows, floats(tokens * hidden, 3));
      const auto dwte = tensors.sum(table, floats(kVocabulary * hidden, 4, 100.0)),
                 dwpe = tensors.sum(places, floats(kSequence * hidden, 5));
      kernels.embedding_forward(ids, positions, wte, wpe, out);
      kernels.embedding_backward(ids, positions, dout, dwte, dwpe);
    });
  }
}

TEST_P(Half, LayerNormRoundsItsOutputsAndKeepsStatisticsInFp32) {
  for (const auto& [tokens, hidden] :
       {std::pair<std::int64_t, std::int64_t>{0, 7}, {1, 5}, {5, 3}, {67, 131}, {211, 768}, {3, 5003}}) {
    SCOPED_TRACE(fmt::format("{} x {}", tokens, hidden));
    expect_rounded([tokens = tokens, hidden = hidden](Kernels& kernels, CallTensors& tensors) {
      const Shape rows = {tokens, hidden};
      const std::int64_t count = tokens * hidden;
      const auto x = tensors.data(rows, floats(count, 1, 0.5, 2.0)), w = tensors.data({hidden}, floats(hidden, 2)),
                 b = tensors.data({hidden}, floats(hidden, 3)), dy = tensors.data(rows, floats(count, 4));
      const auto y = tensors.data(rows), mean = tensors.statistic({tokens}), rstd = tensors.statistic({tokens});
      kernels.layer_norm_forward(x, w, b, 1e-5, y, mean, rstd);
      const auto residual = tensors.data(rows, floats(count, 5)), alone = tensors.data(rows), with_residual = tensors.data(rows),
                 over_residual = tensors.data(rows, floats(count, 5)), over_dy = tensors.data(rows, floats(count, 4));
      kernels.layer_norm_backward_input(dy, x, w, mean, rstd, {}, alone);
      kernels.layer_norm_backward_input(dy, x, w, mean, rstd, residual, with_residual);
      kernels.layer_norm_backward_input(dy, x, w, mean, rstd, over_residual, over_residual);
      kernels.layer_norm_backward_input(over_dy, x, w, mean, rstd, {}, over_dy);
      const auto dw = tensors.sum({hidden}, floats(hidden, 6)), db = tensors.sum({hidden}, floats(hidden, 7, 300.0));
      kernels.layer_norm_backward_weight(dy, x, mean, rstd, dw, db);
    });
  }
}

TEST_P(Half, GeluIsRoundedOnceAlsoInPlace) {
  for (const std::int64_t count : {0, 1, 2047, 40'003}) {
    expect_rounded([count = count](Kernels& kernels, CallTensors& tensors) {
      const auto x = tensors.data({count}, floats(count, 1, 3.0)), y = tensors.data({count}),
                 dy = tensors.data({count}, floats(count, 2)), dx = tensors.data({count}),
                 in_place = tensors.data({count}, floats(count, 2));
      kernels.gelu_forward(x, y);
      kernels.gelu_backward(dy, x, dx);
      kernels.gelu_backward(in_place, x, in_place);
    });
  }
}

TEST_P(Half, DropoutAddsTheResidualBeforeItRounds) {
  struct Sizes {
    std::int64_t rows, per_row, row_elements;
  };
  const std::vector<std::int64_t> ids = {5, 6, 7, 2, 1'000'000'007, 9, 10, 11};
  for (const Sizes& s : {Sizes{8, 1, 3}, {8, 97, 97}, {8, 768, 768}, {3, 2917, 3000}, {2, 8'201, 8'201}}) {
    SCOPED_TRACE(fmt::format("{} rows of {}", s.rows, s.per_row));
    for (const double probability : {0.0, 0.25}) {
      expect_rounded([&](Kernels& kernels, CallTensors& tensors) {
        const Shape shape = {s.rows, s.per_row};
        const std::int64_t count = s.rows * s.per_row;
        const DropoutSpec spec{.key = {.seed = 99, .step = 3, .layer = 1, .site = DropoutSite::mlp_residual},
                               .probability = probability,
                               .row_ids = std::span(ids).first(static_cast<std::size_t>(s.rows)),
                               .row_elements = s.row_elements};
        const auto x = tensors.data(shape, floats(count, 1)), residual = tensors.data(shape, floats(count, 2));
        const auto out = tensors.data(shape), alone = tensors.data(shape), over_x = tensors.data(shape, floats(count, 1)),
                   over_residual = tensors.data(shape, floats(count, 2)), dx = tensors.data(shape, floats(count, 3));
        kernels.dropout_residual_forward(spec, x, residual, out);
        kernels.dropout_residual_forward(spec, x, {}, alone);
        kernels.dropout_residual_forward(spec, over_x, residual, over_x);
        kernels.dropout_residual_forward(spec, x, over_residual, over_residual);
        kernels.dropout_backward(spec, dx, dx);
      });
    }
  }
}

std::vector<std::int32_t> some_targets(std::int64_t tokens, std::int64_t columns, std::int32_t none) {
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < tokens; ++t) {
    targets.push_back(t % 3 == 1 ? none : static_cast<std::int32_t>((t * 7919) % columns));
  }
  return targets;
}

TEST_P(Half, CrossEntropyIsComputedInFp32FromTheRoundedLogits) {
  for (const auto& [tokens, vocabulary] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {1, 1}, {7, 3}, {13, 257}, {6, 50257}}) {
    SCOPED_TRACE(fmt::format("{} x {}", tokens, vocabulary));
    const auto targets = some_targets(tokens, vocabulary, kIgnoredTarget);
    const auto logits = floats(tokens * vocabulary, 1, 4.0);
    expect_rounded([&, shape = Shape{tokens, vocabulary}](Kernels& kernels, CallTensors& tensors) {
      const auto kept = tensors.data(shape, logits), gradient = tensors.data(shape, logits);
      tensors.number(kernels.cross_entropy_forward(kept, targets));
      tensors.number(kernels.cross_entropy_forward_backward(gradient, targets, 1024.0 / 1000));
    });
  }
}

TEST_P(Half, CrossEntropyOfDealtColumnsKeepsItsStatisticsInFp32) {
  for (const auto& [tokens, width, columns] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{0, 5, 5}, {3, 4, 0}, {7, 5, 3}, {13, 300, 257}, {5, 12565, 12562}}) {
    SCOPED_TRACE(fmt::format("{} x {} of {}", tokens, columns, width));
    auto targets = some_targets(tokens, std::max<std::int64_t>(1, columns), -1);
    if (columns == 0) targets.assign(targets.size(), -1);
    std::vector<std::uint8_t> valid;
    for (std::int64_t t = 0; t < tokens; ++t) valid.push_back(t % 4 == 1 ? 0 : 1);
    const auto logits = floats(tokens * width, 1, 4.0), logsumexp = floats(tokens, 2, 0.5, 12.0);
    expect_rounded([&, shape = Shape{tokens, width}, tokens = tokens, columns = columns](Kernels& kernels, CallTensors& tensors) {
      const auto kept = tensors.data(shape, logits), gradient = tensors.data(shape, logits);
      kernels.cross_entropy_statistics(kept, columns, targets, tensors.statistic({tokens, 3}));
      kernels.cross_entropy_gradient(gradient, columns, targets, valid, tensors.statistic({tokens}, logsumexp), 2048.0);
    });
  }
}

TEST_P(Half, RowsPickedByIndexAreCopiedOrRoundedOnceAfterTheirSum) {
  struct Sizes {
    std::int64_t tokens, table, width;
  };
  for (const Sizes& s : {Sizes{0, 3, 5}, {1, 1, 1}, {9, 4, 7}, {131, 17, 301}, {70, 200, 768}, {5, 0, 6}}) {
    SCOPED_TRACE(fmt::format("{} of {} x {}", s.tokens, s.table, s.width));
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      ids.push_back(t % 3 == 1 || s.table == 0 ? -1 - static_cast<std::int32_t>(t) : static_cast<std::int32_t>(t * t % s.table));
    }
    expect_rounded([&](Kernels& kernels, CallTensors& tensors) {
      const Shape rows = {s.tokens, s.width}, all = {s.table, s.width};
      const auto x = floats(s.tokens * s.width, 2);
      const auto table = tensors.data(all, floats(s.table * s.width, 1)), gathered = tensors.data(rows),
                 added = tensors.data(rows, x), from = tensors.data(rows, x);
      const auto sums = tensors.sum(all, floats(s.table * s.width, 3, 30.0));
      kernels.gather_rows(ids, table, gathered);
      kernels.add_gathered_rows(ids, table, added);
      kernels.scatter_add_rows(ids, from, sums);
    });
  }
}

TEST_P(Half, ExpertsOutputsAreCombinedWithFp32Gates) {
  for (const auto& [tokens, width] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {1, 1}, {9, 5}, {77, 131}, {40, 768}}) {
    for (const std::int64_t choices : {1, 2}) {
      SCOPED_TRACE(fmt::format("{} x {}, {} choices", tokens, width, choices));
      std::vector<std::int32_t> slots;
      for (std::int64_t i = 0; i < tokens * choices; ++i) {
        const bool dropped = i % 5 == 2 || i / choices % 7 == 3;
        slots.push_back(dropped ? -1 : static_cast<std::int32_t>(tokens * choices - i));  // slot 0 stays empty
      }
      expect_rounded([&, tokens = tokens, width = width](Kernels& kernels, CallTensors& tensors) {
        const std::int64_t table = tokens * choices + 1;
        const auto gates = tensors.statistic({tokens, choices}, floats(tokens * choices, 1)),
                   dgates = tensors.statistic({tokens, choices});
        const auto y = tensors.data({table, width}, floats(table * width, 2)), out = tensors.data({tokens, width}),
                   dout = tensors.data({tokens, width}, floats(tokens * width, 3)),
                   dy = tensors.data({table, width}, floats(table * width, 4));
        kernels.combine_rows(slots, gates, y, out);
        kernels.combine_rows_backward(slots, gates, dout, y, dgates, dy);
      });
    }
  }
}

TEST_P(Half, BiasAndItsGradientAreRoundedOnce) {
  for (const auto& [tokens, width] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {1, 1}, {67, 131}, {300, 768}, {3, 5003}}) {
    SCOPED_TRACE(fmt::format("{} x {}", tokens, width));
    expect_rounded([tokens = tokens, width = width](Kernels& kernels, CallTensors& tensors) {
      const auto bias = tensors.data({width}, floats(width, 1)), x = tensors.data({tokens, width}, floats(tokens * width, 2)),
                 dy = tensors.data({tokens, width}, floats(tokens * width, 3));
      const auto dbias = tensors.sum({width}, floats(width, 4, 50.0));
      kernels.add_bias(bias, x);
      kernels.bias_backward(dy, dbias);
    });
  }
}

TEST_P(Half, RefusesStatisticsOfTheDatasDtypeAndMixedHalves) {
  const DType d = dtype(), other = d == DType::bf16 ? DType::f16 : DType::bf16;
  std::vector<float> memory(16);
  const TensorView x(memory.data(), d, {2, 4}), w(memory.data(), d, {4}), half_statistic(memory.data(), d, {2}),
      statistic(memory.data(), DType::f32, {2}), of_other(memory.data(), other, {2, 4}),
      wide_rows(memory.data(), DType::f32, {2, 4});
  EXPECT_THROW(kernels().layer_norm_forward(x, w, w, 1e-5, x, half_statistic, statistic), ContractError);
  EXPECT_THROW(kernels().layer_norm_forward(x, w, w, 1e-5, wide_rows, statistic, statistic), ContractError);
  EXPECT_THROW(kernels().gelu_forward(x, of_other), ContractError);
  EXPECT_THROW(kernels().bias_backward(x, TensorView(memory.data(), other, {4})), ContractError);
  EXPECT_THROW(kernels().bias_backward(x, TensorView(memory.data(), DType::f64, {4})), ContractError);
  EXPECT_THROW(kernels().layer_norm_backward_weight(x, x, statistic, statistic, w, TensorView(memory.data(), DType::f32, {4})),
               ContractError);
}

INSTANTIATE_TEST_SUITE_P(Sets, Half, half_cases(), half_case_name);

}  // namespace
}  // namespace tandem::cpu
