// SPDX-License-Identifier: Apache-2.0
#include "reference/tensors.h"

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {

template <class Real>
std::span<const Real> tensor(const NamedTensors<Real>& tensors, std::string_view name) {
  const auto found = tensors.find(name);
  TANDEM_CHECK(found != tensors.end(), fmt::format("no tensor named {}", name));
  return found->second;
}

template <class Real>
std::span<Real> tensor(NamedTensors<Real>& tensors, std::string_view name) {
  const auto found = tensors.find(name);
  TANDEM_CHECK(found != tensors.end(), fmt::format("no tensor named {}", name));
  return found->second;
}

template <class Real>
NamedTensors<Real> initial_parameters(const GptConfig& model, Initialization how, std::uint64_t seed) {
  NamedTensors<Real> tensors = zero_tensors<Real>(model);
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    std::int64_t element_index = 0;
    for (Real& value : tensor(tensors, parameter.name)) {
      value = static_cast<Real>(initial_value(model, parameter, how, seed, element_index));
      ++element_index;
    }
  }
  return tensors;
}

template <class Real>
NamedTensors<Real> zero_tensors(const GptConfig& model) {
  NamedTensors<Real> tensors;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    tensors.emplace(parameter.name, std::vector<Real>(static_cast<std::size_t>(parameter.num_elements()), Real{0}));
  }
  return tensors;
}

template <class Real>
void require_parameters_of(const GptConfig& model, const NamedTensors<Real>& tensors) {
  const std::vector<ParameterSpec> parameters = gpt_parameters(model);
  for (const ParameterSpec& parameter : parameters) {
    require_size(tensor(tensors, parameter.name), parameter.num_elements(), parameter.name);
  }
  TANDEM_CHECK(tensors.size() == parameters.size(),
               fmt::format("{} tensors, the model has {} parameters", tensors.size(), parameters.size()));
}

template std::span<const float> tensor(const NamedTensors<float>&, std::string_view);
template std::span<const double> tensor(const NamedTensors<double>&, std::string_view);
template std::span<float> tensor(NamedTensors<float>&, std::string_view);
template std::span<double> tensor(NamedTensors<double>&, std::string_view);
template NamedTensors<float> initial_parameters(const GptConfig&, Initialization, std::uint64_t);
template NamedTensors<double> initial_parameters(const GptConfig&, Initialization, std::uint64_t);
template NamedTensors<float> zero_tensors(const GptConfig&);
template NamedTensors<double> zero_tensors(const GptConfig&);
template void require_parameters_of(const GptConfig&, const NamedTensors<float>&);
template void require_parameters_of(const GptConfig&, const NamedTensors<double>&);

}  // namespace tandem::reference
