// SPDX-License-Identifier: Apache-2.0
#include "reference/ops.h"

#include <cmath>
#include <numbers>

#include "core/error.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

constexpr double kGeluCubic = 0.044715;

template <class Real>
Real gelu_slope() {
  return static_cast<Real>(std::sqrt(2.0 / std::numbers::pi));
}

std::int64_t rows_of(std::int64_t elements, std::size_t width, std::string_view what) {
  const auto columns = static_cast<std::int64_t>(width);
  TANDEM_CHECK(columns > 0 && elements % columns == 0, fmt::format("{}: {} elements in rows of {}", what, elements, columns));
  return elements / columns;
}

std::int64_t table_row(std::int32_t index, std::int64_t rows, std::string_view what) {
  TANDEM_CHECK(index >= 0 && index < rows, fmt::format("{} {} is outside a table of {} rows", what, index, rows));
  return index;
}

}  // namespace

template <class Real>
void embedding_forward(std::span<const Real> token_table, std::span<const Real> position_table, std::span<const std::int32_t> ids,
                       std::span<const std::int32_t> positions, std::span<Real> out) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t hidden = rows_of(static_cast<std::int64_t>(out.size()), ids.size(), "embedding");
  require_size(positions, tokens, "positions");
  const std::int64_t vocabulary = rows_of(static_cast<std::int64_t>(token_table.size()), static_cast<std::size_t>(hidden), "wte");
  const std::int64_t sequence =
      rows_of(static_cast<std::int64_t>(position_table.size()), static_cast<std::size_t>(hidden), "wpe");
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto token = row_of(token_table, table_row(ids[t], vocabulary, "token"), hidden);
    const auto position = row_of(position_table, table_row(positions[t], sequence, "position"), hidden);
    const auto sum = row_of(out, t, hidden);
    for (std::int64_t c = 0; c < hidden; ++c) sum[c] = token[c] + position[c];
  }
}

template <class Real>
void embedding_backward(std::span<const Real> dout, std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                        std::span<Real> dtoken_table, std::span<Real> dposition_table) {
  const auto tokens = static_cast<std::int64_t>(ids.size());
  if (tokens == 0) return;
  const std::int64_t hidden = rows_of(static_cast<std::int64_t>(dout.size()), ids.size(), "embedding");
  require_size(positions, tokens, "positions");
  const std::int64_t vocabulary =
      rows_of(static_cast<std::int64_t>(dtoken_table.size()), static_cast<std::size_t>(hidden), "wte");
  const std::int64_t sequence =
      rows_of(static_cast<std::int64_t>(dposition_table.size()), static_cast<std::size_t>(hidden), "wpe");
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto gradient = row_of(dout, t, hidden);
    const auto dtoken = row_of(dtoken_table, table_row(ids[t], vocabulary, "token"), hidden);
    const auto dposition = row_of(dposition_table, table_row(positions[t], sequence, "position"), hidden);
    for (std::int64_t c = 0; c < hidden; ++c) dtoken[c] += gradient[c];
    for (std::int64_t c = 0; c < hidden; ++c) dposition[c] += gradient[c];
  }
}

template <class Real>
void layer_norm_forward(std::span<const Real> x, std::span<const Real> weight, std::span<const Real> bias, double epsilon,
                        std::span<Real> y, NormStatistics<Real> statistics) {
  const auto hidden = static_cast<std::int64_t>(weight.size());
  const std::int64_t rows = rows_of(static_cast<std::int64_t>(x.size()), weight.size(), "layer norm");
  require_size(bias, hidden, "bias");
  require_size(y, rows * hidden, "y");
  require_size(statistics.mean, rows, "mean");
  require_size(statistics.reciprocal_stddev, rows, "reciprocal_stddev");
  const auto n = static_cast<double>(hidden);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto in = row_of(x, row, hidden);
    const auto out = row_of(y, row, hidden);
    double sum = 0.0;
    for (const Real value : in) sum += value;
    const double mean = sum / n;
    double squares = 0.0;
    for (const Real value : in) squares += (value - mean) * (value - mean);
    statistics.mean[row] = static_cast<Real>(mean);
    statistics.reciprocal_stddev[row] = static_cast<Real>(1.0 / std::sqrt(squares / n + epsilon));
    for (std::int64_t c = 0; c < hidden; ++c) {
      out[c] = (in[c] - statistics.mean[row]) * statistics.reciprocal_stddev[row] * weight[c] + bias[c];
    }
  }
}

template <class Real>
void layer_norm_backward(std::span<const Real> x, std::span<const Real> weight, NormStatistics<const Real> statistics,
                         std::span<const Real> dy, std::span<Real> dx, std::span<Real> dweight, std::span<Real> dbias) {
  const auto hidden = static_cast<std::int64_t>(weight.size());
  const std::int64_t rows = rows_of(static_cast<std::int64_t>(x.size()), weight.size(), "layer norm");
  require_size(dy, rows * hidden, "dy");
  require_size(dx, rows * hidden, "dx");
  require_size(dweight, hidden, "dweight");
  require_size(dbias, hidden, "dbias");
  require_size(statistics.mean, rows, "mean");
  require_size(statistics.reciprocal_stddev, rows, "reciprocal_stddev");
  const auto n = static_cast<double>(hidden);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto in = row_of(x, row, hidden);
    const auto gradient = row_of(dy, row, hidden);
    const auto out = row_of(dx, row, hidden);
    const Real mean = statistics.mean[row];
    const Real rstd = statistics.reciprocal_stddev[row];
    double sum_g = 0.0;
    double sum_g_normed = 0.0;
    for (std::int64_t c = 0; c < hidden; ++c) {
      const Real normed = (in[c] - mean) * rstd;
      const Real g = gradient[c] * weight[c];
      sum_g += g;
      sum_g_normed += g * normed;
      dweight[c] += gradient[c] * normed;
      dbias[c] += gradient[c];
    }
    const auto mean_g = static_cast<Real>(sum_g / n);
    const auto mean_g_normed = static_cast<Real>(sum_g_normed / n);
    for (std::int64_t c = 0; c < hidden; ++c) {
      const Real normed = (in[c] - mean) * rstd;
      out[c] = rstd * (gradient[c] * weight[c] - mean_g - normed * mean_g_normed);
    }
  }
}

template <class Real>
void gelu_forward(std::span<const Real> x, std::span<Real> y) {
  require_size(y, static_cast<std::int64_t>(x.size()), "y");
  const auto cubic = static_cast<Real>(kGeluCubic);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const Real v = x[i];
    y[i] = Real{0.5} * v * (Real{1} + std::tanh(gelu_slope<Real>() * (v + cubic * v * v * v)));
  }
}

template <class Real>
void gelu_backward(std::span<const Real> x, std::span<const Real> dy, std::span<Real> dx) {
  require_size(dy, static_cast<std::int64_t>(x.size()), "dy");
  require_size(dx, static_cast<std::int64_t>(x.size()), "dx");
  const auto cubic = static_cast<Real>(kGeluCubic);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const Real v = x[i];
    const Real tanh_u = std::tanh(gelu_slope<Real>() * (v + cubic * v * v * v));
    const Real du_dx = gelu_slope<Real>() * (Real{1} + Real{3} * cubic * v * v);
    dx[i] = dy[i] * (Real{0.5} * (Real{1} + tanh_u) + Real{0.5} * v * (Real{1} - tanh_u * tanh_u) * du_dx);
  }
}

template <class Real>
Real dropout_factor(const Dropout& dropout, std::uint64_t element_index) {
  if (dropout.probability == 0.0) return Real{1};
  const bool kept = dropout.key.word(element_index) >= dropout_threshold(dropout.probability);
  return kept ? static_cast<Real>(1.0 / (1.0 - dropout.probability)) : Real{0};
}

template <class Real>
void apply_dropout(const Dropout& dropout, const RowPlacement& rows, std::span<const Real> x, std::span<Real> y) {
  require_size(y, static_cast<std::int64_t>(x.size()), "y");
  TANDEM_CHECK(rows.tokens <= rows.sequence, fmt::format("rows of {} tokens, sequence {}", rows.tokens, rows.sequence));
  if (x.empty()) return;
  const auto tokens = static_cast<std::int64_t>(rows.row_ids.size()) * rows.tokens;
  TANDEM_CHECK(tokens > 0, "values but no rows");
  const std::int64_t width = rows_of(static_cast<std::int64_t>(x.size()), static_cast<std::size_t>(tokens), "dropout");
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t row_id = rows.row_ids[i / rows.tokens];
    const std::int64_t position = i % rows.tokens;
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t element_index = (row_id * rows.sequence + position) * width + c;
      y[i * width + c] = x[i * width + c] * dropout_factor<Real>(dropout, static_cast<std::uint64_t>(element_index));
    }
  }
}

template <class Real>
void add(std::span<const Real> a, std::span<const Real> b, std::span<Real> y) {
  require_size(b, static_cast<std::int64_t>(a.size()), "b");
  require_size(y, static_cast<std::int64_t>(a.size()), "y");
  for (std::size_t i = 0; i < a.size(); ++i) y[i] = a[i] + b[i];
}

template void embedding_forward(std::span<const float>, std::span<const float>, std::span<const std::int32_t>,
                                std::span<const std::int32_t>, std::span<float>);
template void embedding_forward(std::span<const double>, std::span<const double>, std::span<const std::int32_t>,
                                std::span<const std::int32_t>, std::span<double>);
template void embedding_backward(std::span<const float>, std::span<const std::int32_t>, std::span<const std::int32_t>,
                                 std::span<float>, std::span<float>);
template void embedding_backward(std::span<const double>, std::span<const std::int32_t>, std::span<const std::int32_t>,
                                 std::span<double>, std::span<double>);
template void layer_norm_forward(std::span<const float>, std::span<const float>, std::span<const float>, double, std::span<float>,
                                 NormStatistics<float>);
template void layer_norm_forward(std::span<const double>, std::span<const double>, std::span<const double>, double,
                                 std::span<double>, NormStatistics<double>);
template void layer_norm_backward(std::span<const float>, std::span<const float>, NormStatistics<const float>,
                                  std::span<const float>, std::span<float>, std::span<float>, std::span<float>);
template void layer_norm_backward(std::span<const double>, std::span<const double>, NormStatistics<const double>,
                                  std::span<const double>, std::span<double>, std::span<double>, std::span<double>);
template void gelu_forward(std::span<const float>, std::span<float>);
template void gelu_forward(std::span<const double>, std::span<double>);
template void gelu_backward(std::span<const float>, std::span<const float>, std::span<float>);
template void gelu_backward(std::span<const double>, std::span<const double>, std::span<double>);
template float dropout_factor(const Dropout&, std::uint64_t);
template double dropout_factor(const Dropout&, std::uint64_t);
template void apply_dropout(const Dropout&, const RowPlacement&, std::span<const float>, std::span<float>);
template void apply_dropout(const Dropout&, const RowPlacement&, std::span<const double>, std::span<double>);
template void add(std::span<const float>, std::span<const float>, std::span<float>);
template void add(std::span<const double>, std::span<const double>, std::span<double>);

}  // namespace tandem::reference
