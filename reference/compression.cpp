// SPDX-License-Identifier: Apache-2.0
#include "reference/compression.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include <fmt/format.h>

#include "core/rng.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

// A vector's remainder below this part of its length is what rounding left of a linearly dependent one.
constexpr double kDependent = 1e-5;

constexpr std::size_t kSignLanes = 16;

template <class Real>
std::vector<Real> corrected(std::span<const Real> gradient, std::span<const Real> residual) {
  std::vector<Real> c(gradient.begin(), gradient.end());
  if (residual.empty()) return c;
  require_size(residual, static_cast<std::int64_t>(gradient.size()), "residual");
  for (std::size_t i = 0; i < c.size(); ++i) c[i] += residual[i];
  return c;
}

template <class Real>
bool all_finite(std::span<const Real> values) {
  return std::all_of(values.begin(), values.end(), [](Real value) { return std::isfinite(value); });
}

template <class Real>
Compressed<Real> not_finite(std::span<const Real> gradient, std::span<const Real> residual) {
  Compressed<Real> result;
  result.finite = false;
  result.residual.assign(residual.begin(), residual.end());
  result.residual.resize(gradient.size());
  return result;
}

/// residual <- c - decompressed
template <class Real>
void keep_rest(const std::vector<Real>& c, Compressed<Real>& result) {
  result.residual.resize(c.size());
  for (std::size_t i = 0; i < c.size(); ++i) result.residual[i] = c[i] - result.decompressed[i];
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The elements at result.indices: sent as they are, zero in the residual.
template <class Real>
void send_chosen(const std::vector<Real>& c, Compressed<Real>& result) {
  result.decompressed.assign(c.size(), Real{0});
  result.residual = c;
  for (const std::int32_t index : result.indices) {
    const auto i = static_cast<std::size_t>(index);
    result.values.push_back(c[i]);
    result.decompressed[i] = c[i];
    result.residual[i] = Real{0};
  }
}

void require_indexable(std::size_t elements, std::int64_t k) {
  TANDEM_CHECK(k >= 0, fmt::format("k is {}", k));
  TANDEM_CHECK(elements <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()),
               fmt::format("{} elements are more than int32 indices reach: use smaller buckets", elements));
}

}  // namespace

template <class Real>
Compressed<Real> quantize_blocks(std::span<const Real> gradient, std::span<const Real> residual, int bits, std::int64_t block) {
  TANDEM_CHECK((bits == 8 || bits == 4) && block >= 1, fmt::format("{} bits, block {}", bits, block));
  const Real levels = bits == 8 ? Real{127} : Real{7};
  const std::vector<Real> c = corrected(gradient, residual);
  if (!all_finite<Real>(c)) return not_finite(gradient, residual);
  Compressed<Real> result;
  for (std::size_t first = 0; first < c.size(); first += static_cast<std::size_t>(block)) {
    const std::size_t end = std::min(c.size(), first + static_cast<std::size_t>(block));
    Real largest = 0;
    for (std::size_t i = first; i < end; ++i) largest = std::max(largest, std::abs(c[i]));
    const Real scale = largest / levels;
    if (!std::isfinite(scale * levels)) return not_finite(gradient, residual);
    result.values.push_back(scale);
    for (std::size_t i = first; i < end; ++i) {
      const Real q = scale == Real{0} ? Real{0} : std::clamp(std::nearbyint(c[i] / scale), -levels, levels);
      result.codes.push_back(static_cast<std::int32_t>(q));
      result.decompressed.push_back(static_cast<Real>(result.codes.back()) * scale);
    }
  }
  keep_rest(c, result);
  return result;
}

template <class Real>
Compressed<Real> top_k(std::span<const Real> gradient, std::span<const Real> residual, std::int64_t k) {
  require_indexable(gradient.size(), k);
  const std::vector<Real> c = corrected(gradient, residual);
  if (!all_finite<Real>(c)) return not_finite(gradient, residual);
  Compressed<Real> result;
  result.indices.resize(c.size());
  std::iota(result.indices.begin(), result.indices.end(), 0);
  std::stable_sort(result.indices.begin(), result.indices.end(), [&c](std::int32_t a, std::int32_t b) {
    return std::abs(c[static_cast<std::size_t>(a)]) > std::abs(c[static_cast<std::size_t>(b)]);
  });
  result.indices.resize(std::min(c.size(), static_cast<std::size_t>(k)));
  std::sort(result.indices.begin(), result.indices.end());
  send_chosen(c, result);
  return result;
}

std::vector<std::int32_t> random_indices(const RandomChoice& choice, std::int64_t k, std::int64_t count) {
  TANDEM_CHECK(k >= 0 && k <= count, fmt::format("{} different numbers of {}", k, count));
  CounterRng rng(choice.seed, fmt::format("random_k {} {}", choice.step, choice.bucket));
  std::set<std::int64_t> chosen;
  for (std::int64_t j = count - k; j < count; ++j) {
    const auto t = static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(j) + 1));
    if (!chosen.insert(t).second) chosen.insert(j);
  }
  return {chosen.begin(), chosen.end()};
}

template <class Real>
Compressed<Real> random_k(std::span<const Real> gradient, std::span<const Real> residual, std::int64_t k,
                          const RandomChoice& choice) {
  require_indexable(gradient.size(), k);
  const std::vector<Real> c = corrected(gradient, residual);
  if (!all_finite<Real>(c)) return not_finite(gradient, residual);
  const auto elements = static_cast<std::int64_t>(c.size());
  Compressed<Real> result;
  result.indices = random_indices(choice, std::min(k, elements), elements);
  send_chosen(c, result);
  return result;
}

template <class Real>
Compressed<Real> sign_blocks(std::span<const Real> gradient, std::span<const Real> residual, std::int64_t block) {
  TANDEM_CHECK(block >= 1, fmt::format("block {}", block));
  const std::vector<Real> c = corrected(gradient, residual);
  if (!all_finite<Real>(c)) return not_finite(gradient, residual);
  Compressed<Real> result;
  for (std::size_t first = 0; first < c.size(); first += static_cast<std::size_t>(block)) {
    const std::size_t end = std::min(c.size(), first + static_cast<std::size_t>(block));
    std::array<double, kSignLanes> lanes{};
    for (std::size_t i = first; i < end; ++i) lanes[(i - first) % kSignLanes] += static_cast<double>(std::abs(c[i]));
    double sum = 0.0;
    for (const double lane : lanes) sum += lane;
    const auto scale = static_cast<Real>(sum / static_cast<double>(end - first));
    result.values.push_back(scale);
    for (std::size_t i = first; i < end; ++i) {
      result.codes.push_back(std::signbit(c[i]) ? 1 : 0);
      result.decompressed.push_back(std::signbit(c[i]) ? -scale : scale);
    }
  }
  keep_rest(c, result);
  return result;
}

template <class Real>
std::vector<Real> power_sgd_start(std::uint64_t seed, std::string_view name, int rank, std::int64_t columns) {
  std::vector<Real> q(static_cast<std::size_t>(rank * columns));
  const std::string key = fmt::format("power_sgd/{}", name);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<Real>(parameter_normal(seed, key, i));
  return q;
}

template <class Real>
void orthogonalize(std::span<Real> p, std::int64_t length) {
  const auto n = static_cast<std::size_t>(length);
  for (std::size_t j = 0; j < p.size() / std::max<std::size_t>(n, 1); ++j) {
    const std::span<Real> vector = p.subspan(j * n, n);
    std::vector<double> rest(vector.begin(), vector.end());
    const auto norm = [&rest] { return std::sqrt(dot<double>(rest, rest)); };
    const double whole = norm();
    for (const int round : {1, 2}) {
      for (std::size_t earlier = 0; earlier < j; ++earlier) {
        const std::vector<double> direction(p.begin() + static_cast<std::ptrdiff_t>(earlier * n),
                                            p.begin() + static_cast<std::ptrdiff_t>((earlier + 1) * n));
        add_scaled<double>(-dot<double>(direction, rest), direction, rest);
      }
      if (round == 1 && norm() <= kDependent * whole) std::fill(rest.begin(), rest.end(), 0.0);
    }
    const double left = norm();
    for (std::size_t i = 0; i < n; ++i) vector[i] = static_cast<Real>(left > 0.0 ? rest[i] / left : 0.0);
  }
}

namespace {

/// out[j][i] = sum over k of matrix[i][k] vectors[j][k]: the product of a matrix [rows, columns] with each vector.
template <class Real>
std::vector<Real> times_vectors(const std::vector<Real>& matrix, std::span<const Real> vectors, std::int64_t rows,
                                std::int64_t columns) {
  std::vector<Real> out;
  for (std::int64_t j = 0; j < static_cast<std::int64_t>(vectors.size()) / columns; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      out.push_back(static_cast<Real>(dot<Real>(row_of(std::span<const Real>(matrix), i, columns), row_of(vectors, j, columns))));
    }
  }
  return out;
}

template <class Real>
std::vector<Real> transposed(const std::vector<Real>& matrix, std::int64_t rows, std::int64_t columns) {
  std::vector<Real> out;
  for (std::int64_t k = 0; k < columns; ++k) {
    for (std::int64_t i = 0; i < rows; ++i) out.push_back(matrix[static_cast<std::size_t>(i * columns + k)]);
  }
  return out;
}

template <class Real>
std::vector<Real> mean_over_ranks(const std::vector<std::vector<Real>>& of_rank) {
  std::vector<Real> mean;
  for (std::size_t i = 0; i < of_rank[0].size(); ++i) {
    double sum = 0.0;
    for (const std::vector<Real>& values : of_rank) sum += static_cast<double>(values[i]);
    mean.push_back(static_cast<Real>(sum / static_cast<double>(of_rank.size())));
  }
  return mean;
}

/// sum over j of p[j] q[j]^T
template <class Real>
std::vector<Real> product_of_factors(const std::vector<Real>& p, const std::vector<Real>& q, std::int64_t rows,
                                     std::int64_t columns) {
  std::vector<Real> product;
  const std::int64_t rank = static_cast<std::int64_t>(q.size()) / columns;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t k = 0; k < columns; ++k) {
      double sum = 0.0;
      for (std::int64_t j = 0; j < rank; ++j) {
        sum += static_cast<double>(p[static_cast<std::size_t>(j * rows + i)]) *
               static_cast<double>(q[static_cast<std::size_t>(j * columns + k)]);
      }
      product.push_back(static_cast<Real>(sum));
    }
  }
  return product;
}

template <class Real>
std::vector<Real> next_start(const std::vector<Real>& q, std::span<const Real> old_q, std::int64_t columns) {
  std::vector<Real> next = q;
  for (std::size_t first = 0; first < q.size(); first += static_cast<std::size_t>(columns)) {
    const auto begin = next.begin() + static_cast<std::ptrdiff_t>(first);
    if (std::all_of(begin, begin + columns, [](Real value) { return value == Real{0}; })) {
      std::copy_n(old_q.begin() + static_cast<std::ptrdiff_t>(first), columns, begin);
    }
  }
  return next;
}

template <class Real>
bool every_rank_finite(const std::vector<std::vector<Real>>& of_rank) {
  return std::all_of(of_rank.begin(), of_rank.end(), [](const auto& values) { return all_finite<Real>(values); });
}

template <class Real>
PowerSgdStep<Real> skipped_step(std::span<const std::vector<Real>> gradients, std::span<const std::vector<Real>> residuals,
                                std::span<const Real> q) {
  PowerSgdStep<Real> step;
  step.finite = false;
  step.next_q.assign(q.begin(), q.end());
  step.residuals.assign(residuals.begin(), residuals.end());
  step.residuals.resize(gradients.size(), std::vector<Real>(gradients[0].size()));
  return step;
}

}  // namespace

template <class Real>
PowerSgdStep<Real> power_sgd(std::span<const std::vector<Real>> gradients, std::span<const std::vector<Real>> residuals,
                             std::int64_t rows, std::int64_t columns, std::span<const Real> q) {
  TANDEM_CHECK(!gradients.empty() && (residuals.empty() || residuals.size() == gradients.size()), "one residual per rank");
  TANDEM_CHECK(rows >= 1 && columns >= 1 && !q.empty() && static_cast<std::int64_t>(q.size()) % columns == 0,
               fmt::format("[{}, {}] and a start of {} elements", rows, columns, q.size()));
  std::vector<std::vector<Real>> c, p_of_rank, q_of_rank;
  for (std::size_t n = 0; n < gradients.size(); ++n) {
    require_size(std::span<const Real>(gradients[n]), rows * columns, "gradient");
    const std::span<const Real> residual = residuals.empty() ? std::span<const Real>() : std::span<const Real>(residuals[n]);
    c.push_back(corrected<Real>(gradients[n], residual));
    p_of_rank.push_back(times_vectors(c.back(), q, rows, columns));
  }
  if (!every_rank_finite(c) || !every_rank_finite(p_of_rank)) return skipped_step(gradients, residuals, q);
  PowerSgdStep<Real> step;
  step.p = mean_over_ranks(p_of_rank);
  orthogonalize<Real>(step.p, rows);
  for (const std::vector<Real>& matrix : c) {
    q_of_rank.push_back(times_vectors<Real>(transposed(matrix, rows, columns), step.p, columns, rows));
  }
  if (!every_rank_finite(q_of_rank)) return skipped_step(gradients, residuals, q);
  step.q = mean_over_ranks(q_of_rank);
  step.next_q = next_start(step.q, q, columns);
  step.decompressed = product_of_factors(step.p, step.q, rows, columns);
  for (std::size_t n = 0; n < c.size(); ++n) {
    const std::vector<Real> sent = product_of_factors(step.p, q_of_rank[n], rows, columns);
    for (std::size_t i = 0; i < c[n].size(); ++i) c[n][i] -= sent[i];
  }
  step.residuals = std::move(c);
  return step;
}

std::int64_t quantized_bytes(std::int64_t elements, int bits, std::int64_t block) {
  const std::int64_t whole = elements / block;
  return 4 * ceil_div(elements, block) + whole * ceil_div(bits * block, 8) + ceil_div(bits * (elements % block), 8);
}

std::int64_t top_k_bytes(std::int64_t elements, std::int64_t k) { return 8 * std::min(k, elements); }

std::int64_t random_k_bytes(std::int64_t elements, std::int64_t k) { return 4 * std::min(k, elements); }

std::int64_t sign_bytes(std::int64_t elements, std::int64_t block) {
  const std::int64_t whole = elements / block;
  return 4 * ceil_div(elements, block) + whole * ceil_div(block, 8) + ceil_div(elements % block, 8);
}

std::int64_t power_sgd_bytes(std::int64_t rows, std::int64_t columns, int rank) { return 4 * rank * (rows + columns); }

template Compressed<float> quantize_blocks(std::span<const float>, std::span<const float>, int, std::int64_t);
template Compressed<double> quantize_blocks(std::span<const double>, std::span<const double>, int, std::int64_t);
template Compressed<float> top_k(std::span<const float>, std::span<const float>, std::int64_t);
template Compressed<double> top_k(std::span<const double>, std::span<const double>, std::int64_t);
template Compressed<float> random_k(std::span<const float>, std::span<const float>, std::int64_t, const RandomChoice&);
template Compressed<double> random_k(std::span<const double>, std::span<const double>, std::int64_t, const RandomChoice&);
template Compressed<float> sign_blocks(std::span<const float>, std::span<const float>, std::int64_t);
template Compressed<double> sign_blocks(std::span<const double>, std::span<const double>, std::int64_t);
template std::vector<float> power_sgd_start(std::uint64_t, std::string_view, int, std::int64_t);
template std::vector<double> power_sgd_start(std::uint64_t, std::string_view, int, std::int64_t);
template void orthogonalize(std::span<float>, std::int64_t);
template void orthogonalize(std::span<double>, std::int64_t);
template PowerSgdStep<float> power_sgd(std::span<const std::vector<float>>, std::span<const std::vector<float>>, std::int64_t,
                                       std::int64_t, std::span<const float>);
template PowerSgdStep<double> power_sgd(std::span<const std::vector<double>>, std::span<const std::vector<double>>, std::int64_t,
                                        std::int64_t, std::span<const double>);

}  // namespace tandem::reference
