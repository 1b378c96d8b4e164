// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "reference/ops.h"
#include "reference/require.h"

namespace tandem::reference {
namespace {

void count_product(MultiplyAdds* count, LinearSize size) {
  if (count != nullptr) count->linear += size.rows * size.in * size.out;
}

}  // namespace

template <class Real>
void linear_forward(LinearSize size, std::span<const Real> x, std::span<const Real> weight, std::span<const Real> bias,
                    std::span<Real> y, MultiplyAdds* count) {
  require_size(x, size.rows * size.in, "x");
  require_size(weight, size.in * size.out, "weight");
  require_size(bias, size.out, "bias");
  require_size(y, size.rows * size.out, "y");
  std::vector<double> sums;
  for (std::int64_t row = 0; row < size.rows; ++row) {
    const auto in = row_of(x, row, size.in);
    const auto out = row_of(y, row, size.out);
    sums.assign(bias.begin(), bias.end());
    for (std::int64_t i = 0; i < size.in; ++i) add_scaled(in[i], row_of(weight, i, size.out), std::span(sums));
    store(std::span<const double>(sums), out);
  }
  count_product(count, size);
}

template <class Real>
void linear_backward(LinearSize size, std::span<const Real> x, std::span<const Real> weight, std::span<const Real> dy,
                     std::span<Real> dx, std::span<Real> dweight, std::span<Real> dbias, MultiplyAdds* count) {
  require_size(x, size.rows * size.in, "x");
  require_size(weight, size.in * size.out, "weight");
  require_size(dy, size.rows * size.out, "dy");
  require_size(dx, size.rows * size.in, "dx");
  require_size(dweight, size.in * size.out, "dweight");
  if (!dbias.empty()) require_size(dbias, size.out, "dbias");
  for (std::int64_t row = 0; row < size.rows; ++row) {
    const auto in = row_of(x, row, size.in);
    const auto gradient = row_of(dy, row, size.out);
    const auto out = row_of(dx, row, size.in);
    for (std::int64_t i = 0; i < size.in; ++i) out[i] = static_cast<Real>(dot<Real>(gradient, row_of(weight, i, size.out)));
    for (std::int64_t i = 0; i < size.in; ++i) {
      const auto dweights = row_of(dweight, i, size.out);
      for (std::int64_t o = 0; o < size.out; ++o) dweights[o] += in[i] * gradient[o];
    }
  }
  if (!dbias.empty()) bias_backward<Real>(dy, dbias);
  count_product(count, size);
  count_product(count, size);
}

template <class Real>
void bias_backward(std::span<const Real> dy, std::span<Real> dbias) {
  TANDEM_CHECK(!dbias.empty() && dy.size() % dbias.size() == 0,
               fmt::format("{} gradients of {} outputs", dy.size(), dbias.size()));
  for (std::size_t i = 0; i < dy.size(); ++i) dbias[i % dbias.size()] += dy[i];
}

template <class Real>
void head_forward(LinearSize size, std::span<const Real> x, std::span<const Real> table, std::span<Real> logits,
                  MultiplyAdds* count) {
  require_size(x, size.rows * size.in, "x");
  require_size(table, size.in * size.out, "table");
  require_size(logits, size.rows * size.out, "logits");
  for (std::int64_t row = 0; row < size.rows; ++row) {
    const auto in = row_of(x, row, size.in);
    const auto out = row_of(logits, row, size.out);
    for (std::int64_t o = 0; o < size.out; ++o) {
      out[o] = static_cast<Real>(dot<Real>(in, row_of(table, o, size.in)));
    }
  }
  count_product(count, size);
}

template <class Real>
void head_backward(LinearSize size, std::span<const Real> x, std::span<const Real> table, std::span<const Real> dlogits,
                   std::span<Real> dx, std::span<Real> dtable, MultiplyAdds* count) {
  require_size(x, size.rows * size.in, "x");
  require_size(table, size.in * size.out, "table");
  require_size(dlogits, size.rows * size.out, "dlogits");
  require_size(dx, size.rows * size.in, "dx");
  require_size(dtable, size.in * size.out, "dtable");
  std::vector<double> sums;
  for (std::int64_t row = 0; row < size.rows; ++row) {
    const auto in = row_of(x, row, size.in);
    const auto gradient = row_of(dlogits, row, size.out);
    const auto out = row_of(dx, row, size.in);
    sums.assign(static_cast<std::size_t>(size.in), 0.0);
    for (std::int64_t o = 0; o < size.out; ++o) add_scaled(gradient[o], row_of(table, o, size.in), std::span(sums));
    store(std::span<const double>(sums), out);
    for (std::int64_t o = 0; o < size.out; ++o) {
      const auto dweights = row_of(dtable, o, size.in);
      for (std::int64_t i = 0; i < size.in; ++i) dweights[i] += gradient[o] * in[i];
    }
  }
  count_product(count, size);
  count_product(count, size);
}

template void linear_forward(LinearSize, std::span<const float>, std::span<const float>, std::span<const float>, std::span<float>,
                             MultiplyAdds*);
template void linear_forward(LinearSize, std::span<const double>, std::span<const double>, std::span<const double>,
                             std::span<double>, MultiplyAdds*);
template void linear_backward(LinearSize, std::span<const float>, std::span<const float>, std::span<const float>,
                              std::span<float>, std::span<float>, std::span<float>, MultiplyAdds*);
template void linear_backward(LinearSize, std::span<const double>, std::span<const double>, std::span<const double>,
                              std::span<double>, std::span<double>, std::span<double>, MultiplyAdds*);
template void bias_backward(std::span<const float>, std::span<float>);
template void bias_backward(std::span<const double>, std::span<double>);
template void head_forward(LinearSize, std::span<const float>, std::span<const float>, std::span<float>, MultiplyAdds*);
template void head_forward(LinearSize, std::span<const double>, std::span<const double>, std::span<double>, MultiplyAdds*);
template void head_backward(LinearSize, std::span<const float>, std::span<const float>, std::span<const float>, std::span<float>,
                            std::span<float>, MultiplyAdds*);
template void head_backward(LinearSize, std::span<const double>, std::span<const double>, std::span<const double>,
                            std::span<double>, std::span<double>, MultiplyAdds*);

}  // namespace tandem::reference
