// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "core/pitfall.h"
#include "kernels/cpu/simd/vector_ops.h"
#include "kernels/cpu/test_support.h"

namespace tandem::cpu {
namespace {

TEST(MakeCpuKernels, SaysWhatItChose) {
  const KernelsInfo info = make_cpu_kernels({})->info();
  EXPECT_EQ(info.backend, "cpu");
  EXPECT_FALSE(info.instruction_set.empty());
  EXPECT_FALSE(info.matrix_library.empty());

  const KernelsInfo plain = make_cpu_kernels({.threads = 1, .instruction_set = "baseline", .matrix_library = "own"})->info();
  EXPECT_EQ(plain.instruction_set, "baseline");
  EXPECT_EQ(plain.matrix_library, "own loops");
}

TEST(MakeCpuKernels, RefusesUnknownNamesAndListsTheKnown) {
  const auto message = [](const CpuKernelsOptions& options) {
    try {
      (void)make_cpu_kernels(options);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message({.threads = 1, .instruction_set = "avx1024"}).find("avx512, avx2"), std::string::npos);
  EXPECT_NE(message({.threads = 1, .matrix_library = "mkl"}).find("onednn, openblas"), std::string::npos);
  EXPECT_NE(message({.threads = 0}).find("threads is 0"), std::string::npos);
}

TEST(MakeCpuKernels, ChecksShapesAndTypes) {
  const auto kernels = make_cpu_kernels({});
  std::vector<float> a(6), b(8);
  std::vector<double> d(6);
  std::vector<std::int32_t> integers(6);
  EXPECT_THROW(kernels->add(view_of(a, {6}), view_of(b, {8})), ContractError);
  EXPECT_THROW(kernels->add(view_of(a, {6}), view_of(d, {6})), ContractError);
  EXPECT_THROW(kernels->fill(view_of(integers, {6}), 1), ContractError);
  EXPECT_THROW(kernels->linear_forward(view_of(a, {2, 3}), view_of(b, {2, 4}), {}, view_of(a, {2, 3})), ContractError);
  const std::vector<std::int32_t> ids = {7}, positions = {0};
  EXPECT_THROW(kernels->embedding_forward(ids, positions, view_of(a, {3, 2}), view_of(b, {4, 2}),
                                          TensorView(d.data(), DType::f32, {1, 2})),
               ContractError);
}

std::vector<float> exponential_of(const VectorTables& tables, const std::vector<float>& x) {
  std::vector<float> y(x.size());
  tables.f32.exponential(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  return y;
}

std::vector<const VectorTables*> available_tables() {
  std::vector<const VectorTables*> tables = {&baseline_tables()};
#if defined(__x86_64__)
  if (try_kernels(1, "avx2") != nullptr) tables.push_back(&avx2_tables());
  if (try_kernels(1, "avx512") != nullptr) tables.push_back(&avx512_tables());
#endif
  return tables;
}

TEST(Exponential, IsWithinTwoUnitsInTheLastPlace) {
  std::vector<float> x;
  for (float value = -87.3F; value < 88.7F; value += 0.00037F) x.push_back(value);
  for (float value = 1e-8F; value < 1e-2F; value *= 1.01F) x.push_back(-value);
  for (const VectorTables* tables : available_tables()) {
    const auto y = exponential_of(*tables, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double truth = std::exp(static_cast<double>(x[i]));
      const double ulp = std::ldexp(1.0, std::ilogb(truth) - 23);
      ASSERT_LE(std::abs(static_cast<double>(y[i]) - truth), 2 * ulp) << "exp(" << x[i] << ")";
    }
  }
}

TEST(Exponential, InDoubleIsWithinTwoUnitsInTheLastPlace) {
  std::vector<double> x;
  for (double value = -708.0; value < 709.5; value += 0.00371) x.push_back(value);
  std::vector<double> y(x.size());
  for (const VectorTables* tables : available_tables()) {
    tables->f64.exponential(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const long double truth = std::exp(static_cast<long double>(x[i]));
      const long double ulp = std::ldexp(1.0L, std::ilogb(truth) - 52);
      ASSERT_LE(std::abs(static_cast<long double>(y[i]) - truth), 2 * ulp) << "exp(" << x[i] << ")";
    }
  }
}

TEST(Exponential, HandlesTheEnds) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const VectorTables* tables : available_tables()) {
    const auto y = exponential_of(*tables, {-kInfinity, kInfinity, -1000.0F, 1000.0F, 0.0F, -100.0F, std::nanf("")});
    EXPECT_EQ(y[0], 0.0F);
    EXPECT_EQ(y[1], kInfinity);
    EXPECT_EQ(y[2], 0.0F);
    EXPECT_EQ(y[3], kInfinity);
    EXPECT_EQ(y[4], 1.0F);
    EXPECT_NEAR(y[5] / 3.7835059e-44F, 1.0F, 0.04F);  // subnormal: 27 units of 2^-149
    EXPECT_TRUE(std::isnan(y[6]));
  }
}

// Each fault point must change its operation, and nothing else may: a pitfall that does nothing proves nothing.
struct PitfallResults {
  std::vector<float> gelu, norm, adam;
};
PitfallResults results_with(const PitfallSet& pitfalls) {
  const auto kernels = try_kernels(1, "auto", "auto", pitfalls);
  std::vector<float> x = {-2.0F, -0.5F, 0.5F, 1.5F}, weight(4, 1.0F), bias(4, 0.0F), mean(1), rstd(1);
  PitfallResults results{std::vector<float>(4), std::vector<float>(4), std::vector<float>(4, 1.0F)};
  kernels->gelu_forward(view_of(x, {4}), view_of(results.gelu, {4}));
  std::vector<float> small = {1e-3F, 2e-3F, -1e-3F, 0.0F}, m(4), v(4);
  kernels->layer_norm_forward(view_of(small, {1, 4}), view_of(weight, {4}), view_of(bias, {4}), 1e-5,
                              view_of(results.norm, {1, 4}), view_of(mean, {1}), view_of(rstd, {1}));
  kernels->adamw({.learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8}, view_of(small, {4}),
                 view_of(results.adam, {4}), view_of(m, {4}), view_of(v, {4}), {});
  return results;
}

TEST(Pitfalls, ChangeTheirOperationAndNoOther) {
  const auto with = [](Pitfall pitfall) { return results_with(PitfallSet(std::array{pitfall})); };
  const PitfallResults right = results_with({});

  const PitfallResults erf = with(Pitfall::gelu_with_erf);
  EXPECT_NE(erf.gelu, right.gelu);
  EXPECT_NEAR(erf.gelu[3], right.gelu[3], 1e-3F);  // the two curves differ by less than this
  EXPECT_EQ(erf.norm, right.norm);
  EXPECT_EQ(erf.adam, right.adam);

  const PitfallResults epsilon = with(Pitfall::layer_norm_small_epsilon);
  EXPECT_EQ(epsilon.gelu, right.gelu);
  EXPECT_NE(epsilon.norm, right.norm);

  const PitfallResults root = with(Pitfall::adam_epsilon_inside_root);
  EXPECT_NE(root.adam, right.adam);
  EXPECT_EQ(root.norm, right.norm);
}

}  // namespace
}  // namespace tandem::cpu
