// SPDX-License-Identifier: Apache-2.0
#include "suites/power_sgd_rounding.h"

#include <algorithm>
#include <cmath>

#include "reference/compression.h"

namespace tandem {
namespace {

using Values = std::vector<double>;

double squares_of(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
}

// [rows] c q
Values times(const reference::CodedTensor& tensor, const Values& c, std::span<const double> q) {
  Values product(static_cast<std::size_t>(tensor.rows));
  for (std::size_t i = 0; i < c.size(); ++i) product[i / q.size()] += c[i] * q[i % q.size()];
  return product;
}

// |p^T c|^2
double along(std::span<const double> p, const Values& c) {
  Values product(c.size() / p.size());
  for (std::size_t i = 0; i < c.size(); ++i) product[i % product.size()] += c[i] * p[i / product.size()];
  return squares_of(product);
}

}  // namespace

PowerSgdRounding power_sgd_rounding(const reference::CodedTensor& tensor, const std::vector<Values>& corrected,
                                    std::span<const double> start) {
  const auto rows = static_cast<std::size_t>(tensor.rows), columns = static_cast<std::size_t>(tensor.columns);
  Values whole(rows * columns);
  PowerSgdRounding result;
  for (const Values& c : corrected) {
    std::ranges::transform(whole, c, whole.begin(), std::plus<>());
    result.residuals.push_back(squares_of(c));
    result.sum += result.residuals.back();
  }
  Values left;  // [rank, rows]
  for (std::size_t at = 0; at < start.size(); at += columns) {
    const Values product = times(tensor, whole, start.subspan(at, columns));
    left.insert(left.end(), product.begin(), product.end());
  }
  Values p = left;
  reference::orthogonalize<double>(p, tensor.rows);
  Values turned;  // [rank] t_j^2
  for (std::size_t j = 0; j * rows < p.size(); ++j) {
    double length = 0;  // N l_j
    for (std::size_t i = j * rows; i < (j + 1) * rows; ++i) length += p[i] * left[i];
    turned.push_back(length > 0 ? result.sum * squares_of(start.subspan(j * columns, columns)) / (length * length) : 0);
  }
  const auto spread = [&](const Values& c) {
    double rest = squares_of(c), all = 0;
    for (std::size_t j = 0; j < turned.size(); ++j) rest -= along(std::span(p).subspan(j * rows, rows), c);
    for (std::size_t j = 0; j < turned.size(); ++j) {
      all += turned[j] * (along(std::span(p).subspan(j * rows, rows), c) + std::max(0.0, rest));
    }
    return all;
  };
  for (std::size_t n = 0; n < corrected.size(); ++n) result.residuals[n] += spread(corrected[n]);
  result.sum += spread(whole);
  return result;
}

}  // namespace tandem
