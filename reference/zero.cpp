// SPDX-License-Identifier: Apache-2.0
#include "reference/zero.h"

#include <cmath>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

std::string unit_name(const ParameterSpec& parameter) {
  if (parameter.layer >= 0) return fmt::format("h.{}{}", parameter.layer, parameter.expert >= 0 ? ".experts" : "");
  return parameter.name.substr(0, parameter.name.find('.'));
}

}  // namespace

std::vector<ZeroUnit> zero_units(const GptConfig& model) {
  std::vector<ZeroUnit> units;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const std::string name = unit_name(parameter);
    if (units.empty() || units.back().name != name) units.push_back({name, {}, 0});
    units.back().parameters.push_back(parameter);
    units.back().elements += parameter.num_elements();
  }
  return units;
}

int zero_gathers(const GptConfig& model, const ZeroUnit& unit) {
  if (unit.name == "wte") return model.tied ? 2 : 1;
  return unit.name == "wpe" || unit.name == "lm_head" ? 1 : 2;
}

template <class Real>
double norm_by_parts(const GptConfig& model, int ranks, const NamedTensors<Real>& gradients) {
  double sum = 0.0;
  for (const ZeroUnit& unit : zero_units(model)) {
    std::vector<Real> whole;
    for (const ParameterSpec& parameter : unit.parameters) {
      const auto values = tensor(gradients, parameter.name);
      whole.insert(whole.end(), values.begin(), values.end());
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const Interval part = balanced_part(unit.elements, ranks, rank);
      double partial = 0.0;
      for (std::int64_t i = part.begin; i < part.end; ++i) {
        const auto g = static_cast<double>(whole[static_cast<std::size_t>(i)]);
        partial += g * g;
      }
      sum += partial;
    }
  }
  return std::sqrt(sum);
}

ZeroElementBytes zero_element_bytes(const Numerics& numerics, OptimizerKind optimizer) {
  const auto master = static_cast<std::int64_t>(size_bytes(numerics.master));
  ZeroElementBytes bytes;
  bytes.parameters = static_cast<std::int64_t>(size_bytes(numerics.storage));
  bytes.gradients = static_cast<std::int64_t>(size_bytes(numerics.accumulate));
  bytes.optimizer = (numerics.has_master_copy() ? master : 0) + (optimizer == OptimizerKind::adamw ? 2 * master : 0);
  return bytes;
}

BytesByCategory zero_state_bytes(const std::vector<std::int64_t>& unit_elements, int ranks, int rank, int stage,
                                 const ZeroElementBytes& bytes) {
  TANDEM_CHECK(stage >= 0 && stage <= 3, fmt::format("ZeRO has no stage {}", stage));
  TANDEM_CHECK(rank >= 0 && rank < ranks, fmt::format("rank {} of {}", rank, ranks));
  std::int64_t whole = 0;
  std::int64_t part = 0;
  for (const std::int64_t elements : unit_elements) {
    whole += elements;
    part += balanced_part(elements, ranks, rank).size();
  }
  BytesByCategory held{};
  held[static_cast<std::size_t>(MemoryCategory::parameters)] = bytes.parameters * (stage >= 3 ? part : whole);
  held[static_cast<std::size_t>(MemoryCategory::gradients)] = bytes.gradients * (stage >= 2 ? part : whole);
  held[static_cast<std::size_t>(MemoryCategory::optimizer)] = bytes.optimizer * (stage >= 1 ? part : whole);
  return held;
}

double published_zero_bytes(double parameters, int ranks, int stage, const ZeroElementBytes& bytes) {
  TANDEM_CHECK(stage >= 0 && stage <= 3, fmt::format("ZeRO has no stage {}", stage));
  const double part = parameters / ranks;
  return static_cast<double>(bytes.parameters) * (stage >= 3 ? part : parameters) +
         static_cast<double>(bytes.gradients) * (stage >= 2 ? part : parameters) +
         static_cast<double>(bytes.optimizer) * (stage >= 1 ? part : parameters);
}

ZeroWireBytes zero_wire_bytes(std::int64_t elements, int gathers, int ranks, int stage, int micro_batches,
                              std::int64_t gradient_bytes, std::int64_t parameter_bytes) {
  TANDEM_CHECK(stage >= 0 && stage <= 3, fmt::format("ZeRO has no stage {}", stage));
  const std::int64_t moved = elements * (ranks - 1);
  const std::int64_t reductions = stage == 0 ? 2 : stage == 1 ? 1 : micro_batches;
  const std::int64_t all_gathers = stage == 0 ? 0 : stage == 3 ? std::int64_t{gathers} * micro_batches : 1;
  return {reductions * moved * gradient_bytes, all_gathers * moved * parameter_bytes};
}

template double norm_by_parts(const GptConfig&, int, const NamedTensors<float>&);
template double norm_by_parts(const GptConfig&, int, const NamedTensors<double>&);

}  // namespace tandem::reference
