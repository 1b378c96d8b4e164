// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device_test_support.h"

namespace tandem::device_test {
namespace {

class CudaUpdate : public DeviceTest {};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr AdamWStep kStep = {.learning_rate = 0.1,
                             .beta1 = 0.9,
                             .beta2 = 0.95,
                             .epsilon = 1e-3,
                             .weight_decay = 0.2,
                             .step_index = 3,
                             .gradient_scale = 0.7};

std::vector<double> squares(std::vector<double> values) {
  for (double& value : values) value = static_cast<double>(static_cast<float>(value * value));
  return values;
}

/// Parameter, m, v after a step, in Real.
template <class Real>
std::vector<std::vector<double>> adamw_definition(const AdamWStep& s, bool epsilon_inside_root, const std::vector<double>& g,
                                                  const std::vector<double>& p, const std::vector<double>& m,
                                                  const std::vector<double>& v) {
  std::vector<std::vector<double>> result(3, std::vector<double>(p.size()));
  const auto real = [](double x) { return static_cast<Real>(x); };
  const Real rate = real(s.learning_rate / (1 - std::pow(s.beta1, s.step_index))),
             correction = real(1 / (1 - std::pow(s.beta2, s.step_index)));
  for (std::size_t i = 0; i < p.size(); ++i) {
    const Real gradient = real(g[i]) * real(s.gradient_scale);
    const Real first = real(s.beta1) * real(m[i]) + real(1 - s.beta1) * gradient;
    const Real second = real(s.beta2) * real(v[i]) + real(1 - s.beta2) * (gradient * gradient);
    const Real denominator =
        epsilon_inside_root ? std::sqrt(second * correction + real(s.epsilon)) : std::sqrt(second * correction) + real(s.epsilon);
    result[0][i] = real(p[i]) * real(1 - s.learning_rate * s.weight_decay) - rate * (first / denominator);
    result[1][i] = first;
    result[2][i] = second;
  }
  return result;
}

/// The tensors of one parameter, and what becomes of them.
struct Parameter {
  AdamWStep step;
  std::vector<double> g, p, m, v;
  std::unique_ptr<DeviceTensor> gradient, parameter, first, second, stored;

  Parameter(Kernels& kernels, std::int64_t count, DType dtype, DType gradient_dtype, DType stored_dtype, Place place,
            std::uint64_t seed)
      : step(kStep),
        g(random_numbers(gradient_dtype, count, seed, 0.01)),
        p(random_numbers(dtype, count, seed + 1)),
        m(random_numbers(dtype, count, seed + 2, 0.01)),
        v(squares(random_numbers(dtype, count, seed + 3, 0.01))) {
    step.weight_decay = seed % 2 == 0 ? 0.2 : 0.0;
    gradient = std::make_unique<DeviceTensor>(kernels, gradient_dtype, Shape{count}, g, place);
    parameter = std::make_unique<DeviceTensor>(kernels, dtype, Shape{count}, p, place);
    first = std::make_unique<DeviceTensor>(kernels, dtype, Shape{count}, m, place);
    second = std::make_unique<DeviceTensor>(kernels, dtype, Shape{count}, v);
    if (is_16bit(stored_dtype)) stored = std::make_unique<DeviceTensor>(kernels, stored_dtype, Shape{count}, place);
  }
  [[nodiscard]] AdamWTensors tensors() const {
    return {step, gradient->view(), parameter->view(), first->view(), second->view(), stored ? stored->view() : TensorView()};
  }
  void expect_updated(bool epsilon_inside_root) const {
    const auto truth = adamw_definition<double>(step, epsilon_inside_root, g, p, m, v),
               single = adamw_definition<float>(step, epsilon_inside_root, g, p, m, v);
    const DeviceTensor* const outputs[] = {parameter.get(), first.get(), second.get()};
    for (std::size_t i = 0; i < 3; ++i) {
      const DType dtype = outputs[i]->dtype();
      expect_close(fmt::format("{} of {} elements, output {}", name(dtype), p.size(), i), outputs[i]->values(), truth[i], dtype,
                   dtype == DType::f64 ? std::vector<double>() : single[i], 8);
    }
    if (stored == nullptr) return;
    std::vector<double> rounded = parameter->values();
    for (double& value : rounded) value = rounded_to(value, stored->dtype());
    EXPECT_EQ(stored->values(), rounded) << "what is stored is the parameter rounded";
  }
};

TEST_F(CudaUpdate, AdamWOfManyTensorsIsTheDefinitionOfEach) {
  // Sizes around a block of the launch; tensors without elements in between; all pairs of dtypes in one call.
  std::vector<Parameter> parameters;
  std::uint64_t seed = 10;
  for (const std::int64_t count : {3, 0, 8192, 0, 0, 20011}) {
    for (const auto& [gradient, stored] :
         {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::f16, DType::f16}, {DType::f32, DType::bf16}}) {
      if (count > 10000 && gradient == DType::f16) continue;
      parameters.emplace_back(kernels(), count, DType::f32, gradient, stored, seed % 3 == 0 ? Place::odd : Place::aligned, seed);
      ++seed;
    }
  }
  for (const std::int64_t count : {0, 8193}) {
    parameters.emplace_back(kernels(), count, DType::f64, DType::f64, DType::f64, Place::odd, seed++);
  }
  std::vector<AdamWTensors> tensors;
  for (const Parameter& parameter : parameters) tensors.push_back(parameter.tensors());

  kernels().adamw_all(tensors);

  for (const Parameter& parameter : parameters) parameter.expect_updated(false);
  kernels().adamw_all({});
}

TEST_F(CudaUpdate, AdamWOfOneTensorHasTheBitsOfManyWhereverItLies) {
  Parameter one(kernels(), 5003, DType::f32, DType::bf16, DType::bf16, Place::aligned, 1),
      same(kernels(), 5003, DType::f32, DType::bf16, DType::bf16, Place::odd, 1),
      other(kernels(), 11, DType::f32, DType::bf16, DType::bf16, Place::odd, 2);
  const AdamWTensors t = one.tensors();
  kernels().adamw(t.step, t.gradient, t.parameter, t.m, t.v, t.stored);
  const std::vector<AdamWTensors> both = {other.tensors(), same.tensors()};
  kernels().adamw_all(both);
  EXPECT_EQ(one.parameter->bits(), same.parameter->bits());
  EXPECT_EQ(one.first->bits(), same.first->bits());
  EXPECT_EQ(one.second->bits(), same.second->bits());
  EXPECT_EQ(one.stored->bits(), same.stored->bits());
}

TEST_F(CudaUpdate, PlantedPitfallPutsEpsilonIntoTheRoot) {
  CudaKernelsOptions options;
  options.pitfalls = PitfallSet(std::array{Pitfall::adam_epsilon_inside_root});
  const auto planted = try_kernels(options);
  const Parameter parameter(*planted, 100, DType::f32, DType::f32, DType::f32, Place::aligned, 1);
  planted->adamw_all(std::vector<AdamWTensors>{parameter.tensors()});
  parameter.expect_updated(true);
}

TEST_F(CudaUpdate, SgdUpdatesAMasterWithItsCopyOrTheHalfParameterItself) {
  constexpr std::int64_t kCount = 8195;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const DType gradient_dtype : {DType::f64, DType::f32, DType::bf16}) {
      if ((dtype == DType::f64) != (gradient_dtype == DType::f64)) continue;
      for (const Place place : {Place::aligned, Place::odd}) {
        const auto g = random_numbers(gradient_dtype, kCount, 1), p = random_numbers(dtype, kCount, 2);
        const DeviceTensor gradient(kernels(), gradient_dtype, {kCount}, g, place),
            parameter(kernels(), dtype, {kCount}, p, place), stored(kernels(), DType::bf16, {kCount}, place);
        const bool has_stored = dtype == DType::f32;
        kernels().sgd(0.5, 0.25, 2.0, gradient.view(), parameter.view(), has_stored ? stored.view() : TensorView());
        std::vector<double> truth;
        for (std::size_t i = 0; i < g.size(); ++i) truth.push_back(p[i] * (1 - 0.5 * 0.25) - 0.5 * 2.0 * g[i]);
        const std::vector<double> got = parameter.values();
        expect_close(fmt::format("{} and {}", name(dtype), name(gradient_dtype)), got, truth, dtype, {}, 2);
        if (has_stored) {
          std::vector<double> rounded = got;
          for (double& value : rounded) value = rounded_to(value, DType::bf16);
          EXPECT_EQ(stored.values(), rounded);
        }
      }
    }
  }
}

TEST_F(CudaUpdate, SquaredNormsAreThoseOfEachTensorWhereverItLies) {
  std::vector<std::unique_ptr<DeviceTensor>> tensors;
  std::vector<TensorView> views;
  std::vector<double> truth;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t count : {0, 1, 16384, 0, 33001}) {
      if (count > 20000 && dtype == DType::f64) continue;
      const std::vector<double> values = random_numbers(dtype, count, 5);
      double sum = 0;
      for (const double value : values) sum += value * value;
      for (const Place place : {Place::aligned, Place::odd}) {
        tensors.push_back(std::make_unique<DeviceTensor>(kernels(), dtype, Shape{count}, values, place));
        views.push_back(tensors.back()->view());
        truth.push_back(sum);
      }
    }
  }
  std::vector<double> norms(views.size(), -1);

  kernels().squared_norms(views, norms);

  for (std::size_t i = 0; i < norms.size(); ++i) {
    EXPECT_NEAR(norms[i], truth[i], 1e-13 * truth[i]) << i;
    EXPECT_EQ(norms[i], norms[i / 2 * 2]) << "another order at another address";
    EXPECT_EQ(i % 4 == 0 ? kernels().squared_norm(views[i]) : norms[i], norms[i]);
  }
}

TEST_F(CudaUpdate, SquaredNormIsFiniteExactlyWhereEveryElementIs) {
  constexpr std::int64_t kCount = 20'009;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const double large = dtype == DType::f16 ? 65504.0 : dtype == DType::bf16 ? 0x1.FEp127 : 0x1.FFFFFEp127;
    std::vector<double> values(kCount, large);
    EXPECT_TRUE(std::isfinite(kernels().squared_norm(DeviceTensor(kernels(), dtype, {kCount}, values).view()))) << name(dtype);
    for (const double bad : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
      for (const std::size_t at : {0UL, 16383UL, 20008UL}) {
        std::vector<double> spoilt = values;
        spoilt[at] = bad;
        EXPECT_FALSE(std::isfinite(kernels().squared_norm(DeviceTensor(kernels(), dtype, {kCount}, spoilt).view()))) << at;
      }
    }
  }
}

TEST_F(CudaUpdate, RefusesDtypesThatDoNotGoTogether) {
  const DeviceTensor d(kernels(), DType::f64, {4}), s(kernels(), DType::f32, {4}), h(kernels(), DType::bf16, {4}),
      short_half(kernels(), DType::bf16, {3});
  const auto refused = [&](const DeviceTensor& g, const DeviceTensor& p, const DeviceTensor& moments, TensorView stored) {
    EXPECT_THROW(kernels().adamw(kStep, g.view(), p.view(), moments.view(), moments.view(), stored), ContractError);
  };
  refused(h, d, d, {});
  refused(h, h, h, {});
  refused(s, s, d, {});
  refused(s, s, s, s.view());
  refused(s, s, s, short_half.view());
  EXPECT_THROW(kernels().sgd(1, 0, 1, d.view(), d.view(), h.view()), ContractError);
}

}  // namespace
}  // namespace tandem::device_test
