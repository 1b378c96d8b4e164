// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/model_config.h"

namespace tandem::reference {

/// Tensors by their global name, each the row-major elements of the shape that gpt_parameters() states: parameters, their
/// gradients and their moments. The order of the map is not the order of definition: walk gpt_parameters() for that.
template <class Real>
using NamedTensors = std::map<std::string, std::vector<Real>, std::less<>>;

/// The tensor `name`; throws ContractError where there is none.
template <class Real>
[[nodiscard]] std::span<const Real> tensor(const NamedTensors<Real>& tensors, std::string_view name);
template <class Real>
[[nodiscard]] std::span<Real> tensor(NamedTensors<Real>& tensors, std::string_view name);

/// Every parameter of `model`, element by element from initial_value().
template <class Real>
[[nodiscard]] NamedTensors<Real> initial_parameters(const GptConfig& model, Initialization how, std::uint64_t seed);

/// Every parameter's shape, filled with zeros: a place for gradients and moments.
template <class Real>
[[nodiscard]] NamedTensors<Real> zero_tensors(const GptConfig& model);

/// The same numbers rounded to Real. `Source` is float or double.
template <class Real, class Source>
[[nodiscard]] NamedTensors<Real> converted(const NamedTensors<Source>& tensors) {
  NamedTensors<Real> result;
  for (const auto& [name, values] : tensors) result.emplace(name, std::vector<Real>(values.begin(), values.end()));
  return result;
}

/// Throws ContractError, naming the tensor, unless `tensors` holds exactly the parameters of `model` in their sizes.
template <class Real>
void require_parameters_of(const GptConfig& model, const NamedTensors<Real>& tensors);

}  // namespace tandem::reference
