// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_kernels.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/batch.h"
#include "kernels/cpu/test_support.h"
#include "reference/ops.h"

namespace tandem::cpu {
namespace {

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values) {
  return {values.begin(), values.end()};
}

class Elementwise : public testing::TestWithParam<const char*> {};

template <class Real>
void check_embedding(const char* set) {
  constexpr std::int64_t kVocabulary = 31, kSequence = 13, kHidden = 301;
  for (const std::int64_t tokens : {0, 1, 197}) {
    std::vector<std::int32_t> ids, positions;
    for (std::int64_t t = 0; t < tokens; ++t) {
      ids.push_back(static_cast<std::int32_t>(t * t % kVocabulary));
      positions.push_back(static_cast<std::int32_t>(t % kSequence));
    }
    const auto wte = random_values<Real>(kVocabulary * kHidden, 1), wpe = random_values<Real>(kSequence * kHidden, 2);
    const auto dout = random_values<Real>(tokens * kHidden, 3);
    const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
      Guarded<Real> gte({kVocabulary, kHidden}, wte), gpe({kSequence, kHidden}, wpe), out({tokens, kHidden});
      Guarded<Real> gdout({tokens, kHidden}, dout), dte({kVocabulary, kHidden}, wte), dpe({kSequence, kHidden}, wpe);
      kernels.embedding_forward(ids, positions, gte.view(), gpe.view(), out.view());
      kernels.embedding_backward(ids, positions, gdout.view(), dte.view(), dpe.view());
      return {out.values(), dte.values(), dpe.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";
    // The same additions in the same order: the same bits as the definition.
    std::vector<Real> out(dout.size()), dte = wte, dpe = wpe;
    reference::embedding_forward<Real>(wte, wpe, ids, positions, out);
    reference::embedding_backward<Real>(dout, ids, positions, dte, dpe);
    EXPECT_TRUE(same_bits<Real>(got, {out, dte, dpe})) << tokens << " tokens";
  }
}
TEST_P(Elementwise, EmbeddingIsExactlyTheDefinition) {
  check_embedding<float>(GetParam());
  check_embedding<double>(GetParam());
}

template <class Real>
Outputs<Real> reference_norm(std::int64_t tokens, const std::vector<Real>& x, const std::vector<Real>& w,
                             const std::vector<Real>& b, const std::vector<Real>& dy, const std::vector<Real>& residual) {
  std::vector<Real> y(x.size()), mean(static_cast<std::size_t>(tokens)), rstd(mean.size()), dx(x.size()), dw = w, db = b;
  reference::layer_norm_forward<Real>(x, w, b, 1e-5, y, {mean, rstd});
  reference::layer_norm_backward<Real>(x, w, {mean, rstd}, dy, dx, dw, db);
  std::vector<Real> with_residual = dx;
  for (std::size_t i = 0; i < dx.size(); ++i) with_residual[i] += residual[i];
  return {y, mean, rstd, dx, with_residual, dw, db};
}

template <class Real>
void check_norm(const char* set, std::int64_t tokens, std::int64_t hidden) {
  SCOPED_TRACE(fmt::format("{} x {}", tokens, hidden));
  const auto x = random_values<Real>(tokens * hidden, 1, 0.5, 2.0), w = random_values<Real>(hidden, 2),
             b = random_values<Real>(hidden, 3);
  const auto dy = random_values<Real>(tokens * hidden, 4), residual = random_values<Real>(tokens * hidden, 5);
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gx({tokens, hidden}, x), gw({hidden}, w), gb({hidden}, b), gdy({tokens, hidden}, dy);
    Guarded<Real> y({tokens, hidden}), mean({tokens}), rstd({tokens}), dx({tokens, hidden});
    Guarded<Real> in_place({tokens, hidden}, residual), dw({hidden}, w), db({hidden}, b);
    kernels.layer_norm_forward(gx.view(), gw.view(), gb.view(), 1e-5, y.view(), mean.view(), rstd.view());
    kernels.layer_norm_backward_input(gdy.view(), gx.view(), gw.view(), mean.view(), rstd.view(), {}, dx.view());
    kernels.layer_norm_backward_input(gdy.view(), gx.view(), gw.view(), mean.view(), rstd.view(), in_place.view(),
                                      in_place.view());
    kernels.layer_norm_backward_weight(gdy.view(), gx.view(), mean.view(), rstd.view(), dw.view(), db.view());
    return {y.values(), mean.values(), rstd.values(), dx.values(), in_place.values(), dw.values(), db.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  const auto truth = reference_norm<double>(tokens, converted<double>(x), converted<double>(w), converted<double>(b),
                                            converted<double>(dy), converted<double>(residual));
  expect_close<Real>(got, truth, reference_norm<Real>(tokens, x, w, b, dy, residual),
                     static_cast<double>(std::max(tokens, hidden)));
}
TEST_P(Elementwise, LayerNormMatchesTheDefinition) {
  for (const auto& [tokens, hidden] : {std::pair<std::int64_t, std::int64_t>{0, 7}, {1, 5}, {5, 3}, {67, 131}, {211, 768}}) {
    check_norm<float>(GetParam(), tokens, hidden);
    check_norm<double>(GetParam(), tokens, hidden);
  }
}

template <class Real>
void check_gelu(const char* set) {
  auto x = random_values<Real>(40'003, 1, 3.0);
  for (const double special : {0.0, -0.0, 30.0, -30.0, 1e-30, -1e-30, 5e3, -5e3}) x.push_back(static_cast<Real>(special));
  const auto dy = random_values<Real>(static_cast<std::int64_t>(x.size()), 2);
  const auto count = static_cast<std::int64_t>(x.size());
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gx({count}, x), y({count}), in_place({count}, dy);
    kernels.gelu_forward(gx.view(), y.view());
    kernels.gelu_backward(in_place.view(), gx.view(), in_place.view());
    return {y.values(), in_place.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  std::vector<double> y(x.size()), dx(x.size());
  reference::gelu_forward<double>(converted<double>(x), y);
  reference::gelu_backward<double>(converted<double>(x), converted<double>(dy), dx);
  // Element by element: both are sums of terms of at most 1.2 |x|; the exponent's own error, |2u| eps, counts where e^(-2u) does,
  // |2u| e^(-|2u|) < 1.
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double eps = static_cast<double>(std::numeric_limits<Real>::epsilon()), size = std::abs(static_cast<double>(x[i]));
    ASSERT_LE(std::abs(static_cast<double>(got[0][i]) - y[i]), 4 * eps * size + 1e-300) << "gelu of " << x[i];
    ASSERT_LE(std::abs(static_cast<double>(got[1][i]) - dx[i]), 16 * eps * std::abs(static_cast<double>(dy[i])))
        << "gelu' of " << x[i];
  }
}
TEST_P(Elementwise, GeluMatchesTheDefinition) {
  check_gelu<float>(GetParam());
  check_gelu<double>(GetParam());
}

template <class Real>
void check_dropout(const char* set) {
  constexpr std::int64_t kRows = 3, kTokens = 61, kHidden = 97, kSequence = 64;
  const std::vector<std::int64_t> row_ids = {5, 2, 1'000'000'007};  // far apart: the third's elements are beyond 2^32
  const DropoutKey key{.seed = 99, .step = 3, .layer = 1, .site = DropoutSite::mlp_residual};
  const auto x = random_values<Real>(kRows * kTokens * kHidden, 1), residual = random_values<Real>(kRows * kTokens * kHidden, 2);
  const Shape shape = {kRows * kTokens, kHidden};
  for (const double probability : {0.0, 0.25}) {
    const DropoutSpec spec{.key = key, .probability = probability, .row_ids = row_ids, .row_elements = kSequence * kHidden};
    const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
      Guarded<Real> gx(shape, x), gr(shape, residual), out(shape), alone(shape), in_place(shape, x), dx(shape, x);
      kernels.dropout_residual_forward(spec, gx.view(), gr.view(), out.view());
      kernels.dropout_residual_forward(spec, gx.view(), {}, alone.view());
      kernels.dropout_residual_forward(spec, in_place.view(), gr.view(), in_place.view());
      kernels.dropout_backward(spec, dx.view(), dx.view());
      return {out.values(), alone.values(), in_place.values(), dx.values()};
    });
    if (got.empty()) GTEST_SKIP() << "not available here";
    std::vector<Real> dropped(x.size()), sum(x.size());
    reference::apply_dropout<Real>({probability, key}, {row_ids, kTokens, kSequence}, x, dropped);
    reference::add<Real>(dropped, residual, sum);
    EXPECT_TRUE(got[1] == dropped && got[3] == dropped) << probability;
    // x / (1 - p) + residual may be one fused multiply-add.
    expect_close<Real>({got[0], got[2]}, {converted<double>(sum), converted<double>(sum)}, {}, 1);
  }
}
TEST_P(Elementwise, DropoutDrawsTheMaskOfTheGlobalElement) {
  check_dropout<float>(GetParam());
  check_dropout<double>(GetParam());
}

template <class Real>
void check_cross_entropy(const char* set, std::int64_t tokens, std::int64_t vocabulary) {
  SCOPED_TRACE(fmt::format("{} x {}", tokens, vocabulary));
  const auto logits = random_values<Real>(tokens * vocabulary, 1, 4.0);
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < tokens; ++t) {
    targets.push_back(t % 3 == 1 ? kIgnoredTarget : static_cast<std::int32_t>((t * 7919) % vocabulary));
  }
  constexpr std::int64_t kValid = 1000;
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gradient({tokens, vocabulary}, logits), kept({tokens, vocabulary}, logits);
    const double loss = kernels.cross_entropy_forward_backward(gradient.view(), targets, 1.0 / kValid);
    EXPECT_EQ(kernels.cross_entropy_forward(kept.view(), targets), loss);
    EXPECT_EQ(kept.values(), logits);
    return {gradient.values(), {static_cast<Real>(loss)}};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  std::vector<double> gradient(logits.size()), log_sum_exp(targets.size());
  const double loss = reference::cross_entropy_forward<double>(converted<double>(logits), targets, kValid, log_sum_exp) * kValid;
  reference::cross_entropy_backward<double>(converted<double>(logits), targets, kValid, log_sum_exp, gradient);
  // Roundings behind an element: the subtraction of the largest logit (|x| up to 40 eps in the exponent), the exponential, the
  // sum.
  expect_close<Real>(got, {gradient, {loss}}, {}, 100);
}
TEST_P(Elementwise, CrossEntropyMatchesTheDefinition) {
  for (const auto& [tokens, vocabulary] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {1, 1}, {7, 3}, {13, 257}, {6, 50257}}) {
    check_cross_entropy<float>(GetParam(), tokens, vocabulary);
    check_cross_entropy<double>(GetParam(), tokens, vocabulary);
  }
}

template <class Real>
Outputs<Real> plain_adamw(const AdamWStep& s, std::vector<Real> g, std::vector<Real> p, std::vector<Real> m,
                          std::vector<Real> v) {
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double gradient = s.gradient_scale * static_cast<double>(g[i]);
    const double first = s.beta1 * static_cast<double>(m[i]) + (1 - s.beta1) * gradient;
    const double second = s.beta2 * static_cast<double>(v[i]) + (1 - s.beta2) * gradient * gradient;
    const double decayed = static_cast<double>(p[i]) * (1 - s.learning_rate * s.weight_decay);
    const double corrected = first / (1 - std::pow(s.beta1, static_cast<double>(s.step_index)));
    const double root = std::sqrt(second / (1 - std::pow(s.beta2, static_cast<double>(s.step_index))));
    m[i] = static_cast<Real>(first);
    v[i] = static_cast<Real>(second);
    p[i] = static_cast<Real>(decayed - s.learning_rate * corrected / (root + s.epsilon));
  }
  return {p, m, v};
}

template <class Real>
void check_adamw(const char* set) {
  constexpr std::int64_t kCount = 40'009;
  const AdamWStep step{.learning_rate = 0.1,
                       .beta1 = 0.9,
                       .beta2 = 0.95,
                       .epsilon = 1e-3,
                       .weight_decay = 0.2,
                       .step_index = 3,
                       .gradient_scale = 0.7};
  const auto g = random_values<Real>(kCount, 1, 0.01), p = random_values<Real>(kCount, 2),
             m = random_values<Real>(kCount, 3, 0.01);
  auto v = random_values<Real>(kCount, 4, 0.01);
  for (Real& value : v) value *= value;
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gg({kCount}, g), gp({kCount}, p), gm({kCount}, m), gv({kCount}, v);
    kernels.adamw(step, gg.view(), gp.view(), gm.view(), gv.view(), {});
    return {gp.values(), gm.values(), gv.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  const auto truth =
      plain_adamw<double>(step, converted<double>(g), converted<double>(p), converted<double>(m), converted<double>(v));
  expect_close<Real>(got, truth, {}, 8);  // about eight operations in a row
}
TEST_P(Elementwise, AdamWMatchesItsEquation) {
  check_adamw<float>(GetParam());
  check_adamw<double>(GetParam());
}

template <class Real>
void check_vectors(const char* set) {
  constexpr std::int64_t kCount = 50'021;
  const auto x = random_values<Real>(kCount, 1), y = random_values<Real>(kCount, 2);
  std::vector<double> norms;
  const auto got = with_any_threads<Real>(set, "auto", [&](Kernels& kernels) -> Outputs<Real> {
    Guarded<Real> gx({kCount}, x), filled({kCount}), scaled({kCount}, x), added({kCount}, y), stepped({kCount}, y);
    kernels.fill(filled.view(), 0.375);
    kernels.scale(scaled.view(), 0.3);
    kernels.add(gx.view(), added.view());
    kernels.sgd(0.5, 0.25, 2.0, gx.view(), stepped.view(), {});
    norms.push_back(kernels.squared_norm(gx.view()));
    return {filled.values(), scaled.values(), added.values(), stepped.values()};
  });
  if (got.empty()) GTEST_SKIP() << "not available here";
  Outputs<double> truth(4, std::vector<double>(kCount, 0.375));
  double norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double a = static_cast<double>(x[i]), b = static_cast<double>(y[i]);
    truth[1][i] = 0.3 * a;
    truth[2][i] = a + b;
    truth[3][i] = b * (1 - 0.5 * 0.25) - 0.5 * 2.0 * a;
    norm += a * a;
  }
  expect_close<Real>(got, truth, {}, 3);
  EXPECT_NEAR(norms[0] / norm, 1.0, 1e-13);  // double sums of 5e4 positive terms: eps sqrt(5e4)
  EXPECT_EQ(norms[0], norms[1]);
  EXPECT_EQ(norms[0], norms[2]);
}
TEST_P(Elementwise, VectorOperationsMatchTheirEquations) {
  check_vectors<float>(GetParam());
  check_vectors<double>(GetParam());
}

TEST_P(Elementwise, SquaredNormIsTheSameOnEveryInstructionSet) {
  const auto kernels = try_kernels(1, GetParam()), baseline = try_kernels(1, "baseline");
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  auto x = random_values<float>(33'333, 1);
  EXPECT_EQ(kernels->squared_norm(view_of(x, {33'333})), baseline->squared_norm(view_of(x, {33'333})));
}

TEST_P(Elementwise, NanAndInfinityPassThrough) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  std::vector<float> x(100, 1.0F);
  x[37] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> y(100), gradient = x, logits = x;
  const std::vector<std::int32_t> target = {5};

  EXPECT_TRUE(std::isnan(kernels->squared_norm(view_of(x, {100}))));
  kernels->gelu_forward(view_of(x, {100}), view_of(y, {100}));
  EXPECT_TRUE(std::isnan(y[37]) && !std::isnan(y[36]));
  EXPECT_TRUE(std::isnan(kernels->cross_entropy_forward_backward(view_of(logits, {1, 100}), target, 1.0)));
  std::vector<float> p(100, 1.0F), m(100, 0.0F), v(100, 0.0F);
  kernels->adamw({.learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8}, view_of(gradient, {100}),
                 view_of(p, {100}), view_of(m, {100}), view_of(v, {100}), {});
  EXPECT_TRUE(std::isnan(p[37]) && !std::isnan(p[36]));
  x[37] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(kernels->squared_norm(view_of(x, {100}))));
}

INSTANTIATE_TEST_SUITE_P(Sets, Elementwise, testing::ValuesIn(kInstructionSets),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tandem::cpu
