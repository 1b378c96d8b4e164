// SPDX-License-Identifier: Apache-2.0
#include "reference/data_parallel.h"

#include <utility>

#include <fmt/format.h>

#include "core/dtype.h"
#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

template <class Real>
void require_equal_lengths(std::span<const std::span<Real>> values_of_ranks) {
  TANDEM_CHECK(!values_of_ranks.empty(), "no ranks");
  const auto length = static_cast<std::int64_t>(values_of_ranks.front().size());
  for (const std::span<Real> values : values_of_ranks) require_size(values, length, "a rank's values");
}

/// `value` as it arrives after travelling as fp16.
template <class Real>
Real over_f16_wire(Real value) {
  return static_cast<Real>(from_f16_bits(to_f16_bits(static_cast<float>(value))));
}

/// loss_and_gradients(), its gradients added to a sum that is kept in `kept_in`.
template <class Real>
double add_micro_batch(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch, const Pass<Real>& pass,
                       DType kept_in, NamedTensors<Real>& sum) {
  if (!is_16bit(kept_in)) return loss_and_gradients(model, parameters, batch, pass, sum);
  NamedTensors<Real> gradients = zero_tensors<Real>(model);
  const double loss = loss_and_gradients(model, parameters, batch, pass, gradients);
  accumulate_gradients(kept_in, gradients, sum);
  return loss;
}

}  // namespace

template <class Real>
std::vector<RankGradients<Real>> local_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                                                 DataParallelLayout layout, const std::optional<DropoutStep>& dropout,
                                                 const StepNumerics& numerics) {
  Pass<Real> pass{.valid_tokens = batch.valid_tokens(),
                  .global_rows = batch.rows,
                  .dropout = dropout,
                  .rounding = numerics.rounding,
                  .loss_scale = numerics.loss_scale};
  std::vector<RankGradients<Real>> ranks;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    RankGradients<Real> own{0.0, zero_tensors<Real>(model)};
    pass.routing = &own.routing;
    for (int micro_batch = 0; micro_batch < layout.micro_batches; ++micro_batch) {
      const Interval rows = micro_batch_rows(batch.rows, layout.ranks, rank, layout.micro_batches, micro_batch);
      own.loss += add_micro_batch(model, parameters, slice_rows(batch, rows.begin, rows.size()), pass, numerics.accumulate,
                                  own.gradients);
    }
    ranks.push_back(std::move(own));
  }
  return ranks;
}

template <class Real>
void all_reduce_sum(std::span<const std::span<Real>> values_of_ranks) {
  require_equal_lengths(values_of_ranks);
  for (std::size_t i = 0; i < values_of_ranks.front().size(); ++i) {
    Real sum = 0;
    for (const std::span<Real> values : values_of_ranks) sum += values[i];
    for (const std::span<Real> values : values_of_ranks) values[i] = sum;
  }
}

template <class Real>
void all_reduce_mean_f16(std::span<const std::span<Real>> values_of_ranks) {
  require_equal_lengths(values_of_ranks);
  const auto ranks = static_cast<Real>(values_of_ranks.size());
  for (std::size_t i = 0; i < values_of_ranks.front().size(); ++i) {
    Real sum = 0;
    for (const std::span<Real> values : values_of_ranks) sum += over_f16_wire(values[i]);
    const Real mean = over_f16_wire(sum / ranks);
    for (const std::span<Real> values : values_of_ranks) values[i] = mean;
  }
}

template <class Real>
void all_reduce_sum(std::vector<RankGradients<Real>>& ranks, DType wire) {
  TANDEM_CHECK(!ranks.empty(), "no ranks");
  for (RankGradients<Real>& rank : ranks) round_all(wire, rank.gradients);
  for (const auto& [name, values] : ranks.front().gradients) {
    std::vector<std::span<Real>> values_of_ranks;
    values_of_ranks.reserve(ranks.size());
    for (RankGradients<Real>& rank : ranks) values_of_ranks.push_back(tensor(rank.gradients, name));
    all_reduce_sum<Real>(values_of_ranks);
    for (const std::span<Real> received : values_of_ranks) round_all(wire, received);
  }
  double loss = 0.0;
  RoutingRecord routing;
  for (const RankGradients<Real>& rank : ranks) {
    loss += rank.loss;
    routing.add(rank.routing);
  }
  for (RankGradients<Real>& rank : ranks) {
    rank.loss = loss;
    rank.routing = routing;
  }
}

template <class Real>
RankGradients<Real> data_parallel_gradients(const GptConfig& model, const NamedTensors<Real>& parameters, const Batch& batch,
                                            DataParallelLayout layout, const std::optional<DropoutStep>& dropout,
                                            const StepNumerics& numerics) {
  std::vector<RankGradients<Real>> ranks = local_gradients(model, parameters, batch, layout, dropout, numerics);
  all_reduce_sum(ranks, numerics.reduce);
  return std::move(ranks.front());
}

template std::vector<RankGradients<float>> local_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                           DataParallelLayout, const std::optional<DropoutStep>&,
                                                           const StepNumerics&);
template std::vector<RankGradients<double>> local_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                            DataParallelLayout, const std::optional<DropoutStep>&,
                                                            const StepNumerics&);
template void all_reduce_sum(std::span<const std::span<float>>);
template void all_reduce_sum(std::span<const std::span<double>>);
template void all_reduce_mean_f16(std::span<const std::span<float>>);
template void all_reduce_mean_f16(std::span<const std::span<double>>);
template void all_reduce_sum(std::vector<RankGradients<float>>&, DType);
template void all_reduce_sum(std::vector<RankGradients<double>>&, DType);
template RankGradients<float> data_parallel_gradients(const GptConfig&, const NamedTensors<float>&, const Batch&,
                                                      DataParallelLayout, const std::optional<DropoutStep>&, const StepNumerics&);
template RankGradients<double> data_parallel_gradients(const GptConfig&, const NamedTensors<double>&, const Batch&,
                                                       DataParallelLayout, const std::optional<DropoutStep>&,
                                                       const StepNumerics&);

}  // namespace tandem::reference
