// SPDX-License-Identifier: Apache-2.0
#include "reference/compressed_reduction.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/hash.h"
#include "reference/compression.h"

namespace tandem::reference {
namespace {

bool is_quantized(const CompressionConfig& config) {
  return config.codec == "int8" || config.codec == "int4" || config.codec == "sign";
}

template <class Real>
Compressed<Real> coded(const CompressionConfig& config, const RandomChoice& choice, std::span<const Real> gradient,
                       std::span<const Real> residual) {
  if (config.codec == "int8") return quantize_blocks(gradient, residual, 8, config.block);
  if (config.codec == "int4") return quantize_blocks(gradient, residual, 4, config.block);
  if (config.codec == "sign") return sign_blocks(gradient, residual, config.block);
  const std::int64_t k = sent_elements(config.density, static_cast<std::int64_t>(gradient.size()));
  if (config.codec == "top_k") return top_k(gradient, residual, k);
  TANDEM_CHECK(config.codec == "random_k", fmt::format("no codec '{}'", config.codec));
  return random_k(gradient, residual, k, choice);
}

template <class Real>
std::vector<Real> sum_in_rank_order(const std::vector<std::vector<Real>>& parts) {
  std::vector<Real> sum = parts.front();
  for (std::size_t n = 1; n < parts.size(); ++n) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += parts[n][i];
  }
  return sum;
}

template <class Real>
ReducedTensor<Real> not_finite(const CodedTensor& tensor, const ReductionState<Real>& state) {
  ReducedTensor<Real> result;
  result.finite = false;
  result.sum.assign(static_cast<std::size_t>(tensor.num_elements()), std::numeric_limits<Real>::quiet_NaN());
  result.next = state;
  return result;
}

template <class Real>
ReducedTensor<Real> power_sgd_sum(const CompressionConfig& config, const CodedTensor& tensor,
                                  const std::vector<std::vector<Real>>& gradients, const ReductionState<Real>& state) {
  const PowerSgdStep<Real> step =
      power_sgd<Real>(gradients, state.residuals, tensor.rows, tensor.columns, std::span<const Real>(state.start));
  if (!step.finite) return not_finite(tensor, state);
  ReducedTensor<Real> result;
  for (const Real mean : step.decompressed) result.sum.push_back(mean * static_cast<Real>(gradients.size()));
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    result.sent.push_back(gradients[n]);
    for (std::size_t i = 0; i < gradients[n].size(); ++i) {
      if (!state.residuals.empty()) result.sent[n][i] += state.residuals[n][i];
      result.sent[n][i] -= step.residuals[n][i];
    }
  }
  if (config.error_feedback) result.next.residuals = step.residuals;
  result.next.start = step.next_q;
  return result;
}

}  // namespace

template <class Real>
ReducedTensor<Real> compressed_sum(const CompressionConfig& config, std::uint64_t seed, std::int64_t step,
                                   const CodedTensor& tensor, const std::vector<std::vector<Real>>& gradients,
                                   const ReductionState<Real>& state) {
  ReducedTensor<Real> result;
  if (config.codec == "none" || (config.codec == "power_sgd" && !has_factors(config, tensor))) {
    result.sent = gradients;
    result.sum = sum_in_rank_order(gradients);
    return result;
  }
  if (config.codec == "power_sgd") return power_sgd_sum(config, tensor, gradients, state);
  const RandomChoice choice{seed, step, random_k_key(tensor.name)};
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    const std::span<const Real> residual = state.residuals.empty() ? std::span<const Real>() : state.residuals[n];
    Compressed<Real> code = coded<Real>(config, choice, gradients[n], residual);
    if (!code.finite) return not_finite(tensor, state);
    result.sent.push_back(std::move(code.decompressed));
    if (config.error_feedback) result.next.residuals.push_back(std::move(code.residual));
  }
  result.sum = sum_in_rank_order(result.sent);
  if (!is_quantized(config)) return result;
  Compressed<Real> code = coded<Real>(config, choice, result.sum, state.sum_residual);
  if (!code.finite) return not_finite(tensor, state);
  result.sum = std::move(code.decompressed);
  if (config.error_feedback) result.next.sum_residual = std::move(code.residual);
  return result;
}

template <class Real>
ReductionState<Real> initial_reduction_state(const CompressionConfig& config, std::uint64_t seed, const CodedTensor& tensor,
                                             int ranks) {
  ReductionState<Real> state;
  const std::vector<Real> zero(static_cast<std::size_t>(tensor.num_elements()));
  const bool factors = config.codec == "power_sgd";
  if (factors && !has_factors(config, tensor)) return state;
  if (factors) state.start = power_sgd_start<Real>(seed, tensor.name, config.rank, tensor.columns);
  if (!config.error_feedback) return state;
  state.residuals.assign(static_cast<std::size_t>(ranks), zero);
  if (is_quantized(config)) state.sum_residual = zero;
  return state;
}

std::int64_t sent_elements(double density, std::int64_t elements) {
  const auto wanted = static_cast<std::int64_t>(std::floor(density * static_cast<double>(elements) + 0.5));
  return std::min(std::max(std::int64_t{1}, wanted), elements);
}

std::int64_t random_k_key(const std::string& name) {
  return static_cast<std::int64_t>(hash64(std::as_bytes(std::span(name.data(), name.size()))) >> 1);
}

bool has_factors(const CompressionConfig& config, const CodedTensor& tensor) {
  return config.rank * (tensor.rows + tensor.columns) < tensor.num_elements();
}

std::int64_t compressed_sum_bytes(const CompressionConfig& config, const CodedTensor& tensor, int ranks) {
  const std::int64_t elements = tensor.num_elements();
  const std::int64_t both_ways = 2 * (std::int64_t{ranks} - 1);
  if (config.codec == "int8") return both_ways * quantized_bytes(elements, 8, config.block);
  if (config.codec == "int4") return both_ways * quantized_bytes(elements, 4, config.block);
  if (config.codec == "sign") return both_ways * sign_bytes(elements, config.block);
  const std::int64_t k = sent_elements(config.density, elements);
  if (config.codec == "top_k") return ranks * (std::int64_t{ranks} - 1) * top_k_bytes(elements, k);
  if (config.codec == "random_k") return both_ways * random_k_bytes(elements, k);
  if (config.codec == "power_sgd" && has_factors(config, tensor)) {
    return both_ways * power_sgd_bytes(tensor.rows, tensor.columns, config.rank);
  }
  return both_ways * 4 * elements;
}

template ReducedTensor<float> compressed_sum(const CompressionConfig&, std::uint64_t, std::int64_t, const CodedTensor&,
                                             const std::vector<std::vector<float>>&, const ReductionState<float>&);
template ReducedTensor<double> compressed_sum(const CompressionConfig&, std::uint64_t, std::int64_t, const CodedTensor&,
                                              const std::vector<std::vector<double>>&, const ReductionState<double>&);
template ReductionState<float> initial_reduction_state(const CompressionConfig&, std::uint64_t, const CodedTensor&, int);
template ReductionState<double> initial_reduction_state(const CompressionConfig&, std::uint64_t, const CodedTensor&, int);

}  // namespace tandem::reference
