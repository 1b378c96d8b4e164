// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/parameter_store.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace tandem {
namespace {

// Calls `use` with the elements of a floating tensor as float or double.
template <class Use>
void visit(TensorView tensor, const Use& use) {
  if (tensor.dtype() == DType::f64) {
    use(tensor.as<double>());
  } else {
    use(tensor.as<float>());
  }
}

void zero(TensorView tensor) {
  if (tensor) std::memset(tensor.data(), 0, static_cast<std::size_t>(tensor.size_bytes()));
}

}  // namespace

ParameterStore::ParameterStore(Arena& arena, const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, int rank)
    : parameters_(local_parameters(model, plan, ProcessGrid(plan), rank)),
      offsets_{0},
      storage_(plan.numerics.storage),
      accumulate_(plan.numerics.accumulate),
      master_(plan.numerics.master) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    shapes_.push_back(parameters_[i].shard.local_shape());
    offsets_.push_back(offsets_.back() + parameters_[i].num_elements());
    by_name_.emplace(parameters_[i].spec.name, i);
  }
  const Shape shape = {num_elements()};
  values_ = arena.allocate(storage_, shape, MemoryCategory::parameters);
  gradients_ = arena.allocate(accumulate_, shape, MemoryCategory::gradients);
  if (optimizer == OptimizerKind::adamw) {
    first_moments_ = arena.allocate(master_, shape, MemoryCategory::optimizer);
    second_moments_ = arena.allocate(master_, shape, MemoryCategory::optimizer);
  }
}

void ParameterStore::zero_moments() {
  zero(flat(first_moments_, master_));
  zero(flat(second_moments_, master_));
}

std::size_t ParameterStore::index_of(std::string_view name) const {
  const auto found = by_name_.find(name);
  TANDEM_CHECK(found != by_name_.end(), fmt::format("this rank holds no parameter '{}'", name));
  return found->second;
}

std::optional<std::size_t> ParameterStore::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? std::nullopt : std::optional(found->second);
}

TensorView ParameterStore::slice(const Arena::Buffer& buffer, DType dtype, std::size_t index) const {
  if (!buffer) return {};
  auto* first = static_cast<std::byte*>(buffer.data()) + offsets_[index] * static_cast<std::int64_t>(size_bytes(dtype));
  return {first, dtype, shapes_[index]};
}

TensorView ParameterStore::flat(const Arena::Buffer& buffer, DType dtype) const {
  if (!buffer) return {};
  return {buffer.data(), dtype, {num_elements()}};
}

void ParameterStore::initialise(const GptConfig& model, Initialization how, std::uint64_t seed) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_whole = parameters_[i].shard.is_whole();
    const std::vector<std::int64_t> indices = is_whole ? std::vector<std::int64_t>() : global_indices(parameters_[i].shard);
    visit(parameter(i), [&](auto values) {
      using Real = typename decltype(values)::value_type;
      for (std::size_t e = 0; e < values.size(); ++e) {
        const std::int64_t index = is_whole ? static_cast<std::int64_t>(e) : indices[e];
        values[e] = index < 0 ? Real{0} : static_cast<Real>(initial_value(model, parameters_[i].spec, how, seed, index));
      }
    });
  }
  zero_moments();
}

void ParameterStore::assign(TensorView target, const std::vector<double>& values) {
  TANDEM_CHECK(target.num_elements() == static_cast<std::int64_t>(values.size()),
               fmt::format("{} values for {} elements", values.size(), target.num_elements()));
  visit(target, [&](auto elements) {
    using Real = typename decltype(elements)::value_type;
    std::transform(values.begin(), values.end(), elements.begin(), [](double value) { return static_cast<Real>(value); });
  });
}

std::vector<double> ParameterStore::values_of(TensorView tensor) {
  std::vector<double> values;
  visit(tensor, [&](auto elements) { values.assign(elements.begin(), elements.end()); });
  return values;
}

}  // namespace tandem
