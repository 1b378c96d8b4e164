// SPDX-License-Identifier: Apache-2.0
#include "reference/lockstep.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

/// Rows of x where each has `width` elements.
template <class Real>
std::int64_t rows_of_width(std::span<const Real> x, std::int64_t width) {
  const auto elements = static_cast<std::int64_t>(x.size());
  TANDEM_CHECK(width > 0 && elements % width == 0, fmt::format("{} elements in rows of {}", elements, width));
  return elements / width;
}

/// Size of a linear layer on one rank: W [in, out] by the width of its output.
template <class Real>
LinearSize size_by_output(std::span<const Real> x, std::span<const Real> weight, std::int64_t out) {
  const std::int64_t in = rows_of_width(weight, out);
  return {rows_of_width(x, in), in, out};
}

}  // namespace

template <class Real>
std::vector<Real> sum_over_ranks(const PerRank<Real>& values) {
  TANDEM_CHECK(!values.empty(), "no ranks");
  std::vector<Real> sum(values.front().size(), Real{0});
  for (const std::vector<Real>& of_rank : values) {
    require_size(std::span(of_rank), static_cast<std::int64_t>(sum.size()), "a rank's values");
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += of_rank[i];
  }
  return sum;
}

template <class Real>
std::vector<Real> joined_over_ranks(const PerRank<Real>& values) {
  std::vector<Real> joined;
  for (const std::vector<Real>& of_rank : values) joined.insert(joined.end(), of_rank.begin(), of_rank.end());
  return joined;
}

template <class Real>
NormOfRanks<Real> norm_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name, double epsilon,
                               const PerRank<Real>& x) {
  NormOfRanks<Real> kept;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto weight = tensor(ranks[r].parameters, name + ".weight");
    const auto tokens = static_cast<std::size_t>(rows_of_width<Real>(x[r], static_cast<std::int64_t>(weight.size())));
    kept.out.emplace_back(x[r].size());
    kept.mean.emplace_back(tokens);
    kept.reciprocal_stddev.emplace_back(tokens);
    layer_norm_forward<Real>(x[r], weight, tensor(ranks[r].parameters, name + ".bias"), epsilon, kept.out[r],
                             {kept.mean[r], kept.reciprocal_stddev[r]});
  }
  return kept;
}

template <class Real>
PerRank<Real> norm_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& x,
                            const NormOfRanks<Real>& kept, const PerRank<Real>& dy) {
  PerRank<Real> dx;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    dx.emplace_back(x[r].size());
    layer_norm_backward<Real>(x[r], tensor(std::as_const(ranks[r].parameters), name + ".weight"),
                              {kept.mean[r], kept.reciprocal_stddev[r]}, dy[r], dx[r],
                              tensor(ranks[r].gradients, name + ".weight"), tensor(ranks[r].gradients, name + ".bias"));
  }
  return dx;
}

template <class Real>
PerRank<Real> column_linear_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name,
                                    const PerRank<Real>& x) {
  PerRank<Real> y;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto weight = tensor(ranks[r].parameters, name + ".weight");
    const auto bias = tensor(ranks[r].parameters, name + ".bias");
    const LinearSize size = size_by_output<Real>(x[r], weight, static_cast<std::int64_t>(bias.size()));
    y.emplace_back(static_cast<std::size_t>(size.rows * size.out));
    linear_forward<Real>(size, x[r], weight, bias, y[r]);
  }
  return y;
}

template <class Real>
PerRank<Real> column_linear_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& x,
                                     const PerRank<Real>& dy) {
  PerRank<Real> dx;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto weight = tensor(std::as_const(ranks[r].parameters), name + ".weight");
    const auto dbias = tensor(ranks[r].gradients, name + ".bias");
    dx.emplace_back(x[r].size());
    linear_backward<Real>(size_by_output<Real>(x[r], weight, static_cast<std::int64_t>(dbias.size())), x[r], weight, dy[r], dx[r],
                          tensor(ranks[r].gradients, name + ".weight"), dbias);
  }
  return dx;
}

template <class Real>
PerRank<Real> row_linear_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& x) {
  PerRank<Real> y;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto weight = tensor(ranks[r].parameters, name + ".weight");
    const std::vector<Real> no_bias(tensor(ranks[r].parameters, name + ".bias").size(), Real{0});
    const LinearSize size = size_by_output<Real>(x[r], weight, static_cast<std::int64_t>(no_bias.size()));
    y.emplace_back(static_cast<std::size_t>(size.rows * size.out));
    linear_forward<Real>(size, x[r], weight, no_bias, y[r]);
  }
  return y;
}

template <class Real>
PerRank<Real> row_linear_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& x,
                                  const PerRank<Real>& dy) {
  PerRank<Real> dx;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto weight = tensor(std::as_const(ranks[r].parameters), name + ".weight");
    std::vector<Real> no_dbias(tensor(std::as_const(ranks[r].parameters), name + ".bias").size(), Real{0});
    dx.emplace_back(x[r].size());
    linear_backward<Real>(size_by_output<Real>(x[r], weight, static_cast<std::int64_t>(no_dbias.size())), x[r], weight, dy[r],
                          dx[r], tensor(ranks[r].gradients, name + ".weight"), no_dbias);
  }
  return dx;
}

template <class Real>
void bias_forward(const std::vector<LockstepRank<Real>>& ranks, const std::string& name, PerRank<Real>& y) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto bias = tensor(ranks[r].parameters, name + ".bias");
    for (std::size_t i = 0; i < y[r].size(); ++i) y[r][i] += bias[i % bias.size()];
  }
}

template <class Real>
void bias_backward(std::vector<LockstepRank<Real>>& ranks, const std::string& name, const PerRank<Real>& dy) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto dbias = tensor(ranks[r].gradients, name + ".bias");
    for (std::size_t i = 0; i < dy[r].size(); ++i) dbias[i % dbias.size()] += dy[r][i];
  }
}

std::vector<std::int64_t> token_places(const Batch& batch, std::int64_t sequence) {
  std::vector<std::int64_t> places;
  for (const std::int64_t row_id : batch.row_ids) {
    for (std::int64_t t = 0; t < batch.sequence; ++t) places.push_back(row_id * sequence + t);
  }
  return places;
}

template <class Real>
void apply_dropout_at(const Dropout& dropout, std::span<const std::int64_t> places, std::span<const Real> x, std::span<Real> y) {
  require_size(y, static_cast<std::int64_t>(x.size()), "y");
  if (places.empty()) return;
  const std::int64_t width = rows_of_width(x, static_cast<std::int64_t>(places.size()));
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(x.size()); ++i) {
    const std::int64_t element_index = places[i / width] * width + i % width;
    y[i] = x[i] * dropout_factor<Real>(dropout, static_cast<std::uint64_t>(element_index));
  }
}

template <class Real>
PerRank<Real> add_ranks(const PerRank<Real>& a, const PerRank<Real>& b) {
  PerRank<Real> sum = a;
  for (std::size_t r = 0; r < a.size(); ++r) add<Real>(a[r], b[r], sum[r]);
  return sum;
}

template std::vector<float> sum_over_ranks(const PerRank<float>&);
template std::vector<double> sum_over_ranks(const PerRank<double>&);
template std::vector<float> joined_over_ranks(const PerRank<float>&);
template std::vector<double> joined_over_ranks(const PerRank<double>&);
template NormOfRanks<float> norm_forward(const std::vector<LockstepRank<float>>&, const std::string&, double,
                                         const PerRank<float>&);
template NormOfRanks<double> norm_forward(const std::vector<LockstepRank<double>>&, const std::string&, double,
                                          const PerRank<double>&);
template PerRank<float> norm_backward(std::vector<LockstepRank<float>>&, const std::string&, const PerRank<float>&,
                                      const NormOfRanks<float>&, const PerRank<float>&);
template PerRank<double> norm_backward(std::vector<LockstepRank<double>>&, const std::string&, const PerRank<double>&,
                                       const NormOfRanks<double>&, const PerRank<double>&);
template PerRank<float> column_linear_forward(const std::vector<LockstepRank<float>>&, const std::string&, const PerRank<float>&);
template PerRank<double> column_linear_forward(const std::vector<LockstepRank<double>>&, const std::string&,
                                               const PerRank<double>&);
template PerRank<float> column_linear_backward(std::vector<LockstepRank<float>>&, const std::string&, const PerRank<float>&,
                                               const PerRank<float>&);
template PerRank<double> column_linear_backward(std::vector<LockstepRank<double>>&, const std::string&, const PerRank<double>&,
                                                const PerRank<double>&);
template PerRank<float> row_linear_forward(const std::vector<LockstepRank<float>>&, const std::string&, const PerRank<float>&);
template PerRank<double> row_linear_forward(const std::vector<LockstepRank<double>>&, const std::string&, const PerRank<double>&);
template PerRank<float> row_linear_backward(std::vector<LockstepRank<float>>&, const std::string&, const PerRank<float>&,
                                            const PerRank<float>&);
template PerRank<double> row_linear_backward(std::vector<LockstepRank<double>>&, const std::string&, const PerRank<double>&,
                                             const PerRank<double>&);
template void bias_forward(const std::vector<LockstepRank<float>>&, const std::string&, PerRank<float>&);
template void bias_forward(const std::vector<LockstepRank<double>>&, const std::string&, PerRank<double>&);
template void bias_backward(std::vector<LockstepRank<float>>&, const std::string&, const PerRank<float>&);
template void bias_backward(std::vector<LockstepRank<double>>&, const std::string&, const PerRank<double>&);
template void apply_dropout_at(const Dropout&, std::span<const std::int64_t>, std::span<const float>, std::span<float>);
template void apply_dropout_at(const Dropout&, std::span<const std::int64_t>, std::span<const double>, std::span<double>);
template PerRank<float> add_ranks(const PerRank<float>&, const PerRank<float>&);
template PerRank<double> add_ranks(const PerRank<double>&, const PerRank<double>&);

}  // namespace tandem::reference
