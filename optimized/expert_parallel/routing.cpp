// SPDX-License-Identifier: Apache-2.0
#include "optimized/expert_parallel/routing.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace tandem {
namespace {

template <class F>
void with_real(const TensorView& tensor, F f) {
  if (tensor.num_elements() == 0) return;
  if (tensor.dtype() == DType::f32) {
    f(float{});
  } else {
    TANDEM_CHECK(tensor.dtype() == DType::f64, "routing is in fp32 and fp64");
    f(double{});
  }
}

void check_shape(const RoutingShape& s) {
  TANDEM_CHECK(s.rows >= 0 && s.local_tokens >= 0 && s.row_tokens >= 0 && s.experts > 0 && s.capacity >= 0);
  TANDEM_CHECK((s.choices == 1 || s.choices == 2) && s.choices <= s.experts,
               fmt::format("{} choices of {} experts", s.choices, s.experts));
}

void check_tensor(const TensorView& tensor, std::string_view operand, const RoutingShape& s, int columns) {
  TANDEM_CHECK(tensor.num_elements() == s.rows * s.local_tokens * columns,
               fmt::format("{} is {}, expected {} rows of {} tokens x {}", operand, to_string(tensor.shape()), s.rows,
                           s.local_tokens, columns));
}

void check_choices(std::span<const std::int32_t> choices, const RoutingShape& s, std::int64_t row_length) {
  TANDEM_CHECK(static_cast<std::int64_t>(choices.size()) == s.rows * row_length * s.choices,
               fmt::format("{} choices for {} rows of {} tokens", choices.size(), s.rows, row_length));
  for (const std::int32_t expert : choices) {
    TANDEM_CHECK(expert >= 0 && expert < s.experts, fmt::format("expert {} of {}", expert, s.experts));
  }
}

template <class Real>
void softmax(std::span<const Real> logits, std::span<Real> probabilities) {
  const double largest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const Real logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  for (std::size_t e = 0; e < logits.size(); ++e) {
    probabilities[e] = static_cast<Real>(std::exp(static_cast<double>(logits[e]) - largest) / sum);
  }
}

/// The first of the largest ones, `left_out` aside.
template <class Real>
std::int32_t argmax(std::span<const Real> values, std::int32_t left_out) {
  std::int32_t best = left_out == 0 ? 1 : 0;
  for (std::int32_t e = best + 1; e < static_cast<std::int32_t>(values.size()); ++e) {
    if (e != left_out && values[static_cast<std::size_t>(e)] > values[static_cast<std::size_t>(best)]) best = e;
  }
  return best;
}

/// Gradients of one token's probabilities, in: 0 or the auxiliary loss's part.
template <class Real>
void add_gate_gradient(std::span<const Real> dgates, std::span<const Real> p, std::span<const std::int32_t> choices,
                       std::span<double> dp) {
  const auto first = static_cast<std::size_t>(choices[0]);
  if (choices.size() == 1) {
    dp[first] += static_cast<double>(dgates[0]);
    return;
  }
  const auto second = static_cast<std::size_t>(choices[1]);
  const double p1 = static_cast<double>(p[first]), p2 = static_cast<double>(p[second]), sum = p1 + p2;
  const double dg1 = static_cast<double>(dgates[0]), dg2 = static_cast<double>(dgates[1]);
  // dg_1 - (dg_1 g_1 + dg_2 g_2) = (dg_1 - dg_2) g_2, since the gates add up to one.
  dp[first] += (dg1 - dg2) * p2 / (sum * sum);
  dp[second] += (dg2 - dg1) * p1 / (sum * sum);
}

}  // namespace

void softmax_choices(TensorView logits, const RoutingShape& shape, TensorView probabilities, std::vector<std::int32_t>& choices) {
  check_shape(shape);
  check_tensor(logits, "logits", shape, shape.experts);
  check_tensor(probabilities, "probabilities", shape, shape.experts);
  choices.clear();
  with_real(logits, [&]<class Real>(Real) {
    const auto experts = static_cast<std::size_t>(shape.experts);
    const std::span<const Real> x = logits.as<const Real>();
    const std::span<Real> p = probabilities.as<Real>();
    for (std::size_t first = 0; first < x.size(); first += experts) {
      const std::span<Real> row = p.subspan(first, experts);
      softmax<Real>(x.subspan(first, experts), row);
      const std::int32_t best = argmax<Real>(row, -1);
      choices.push_back(best);
      if (shape.choices == 2) choices.push_back(argmax<Real>(row, best));
    }
  });
}

void choice_gates(TensorView probabilities, const RoutingShape& shape, std::span<const std::int32_t> choices, TensorView gates) {
  check_shape(shape);
  check_tensor(probabilities, "probabilities", shape, shape.experts);
  check_tensor(gates, "gates", shape, shape.choices);
  check_choices(choices, shape, shape.local_tokens);
  with_real(probabilities, [&]<class Real>(Real) {
    const std::span<const Real> p = probabilities.as<const Real>();
    const std::span<Real> g = gates.as<Real>();
    const auto k = static_cast<std::size_t>(shape.choices);
    for (std::size_t i = 0; i < g.size(); i += k) {
      const std::span<const Real> row = p.subspan(i / k * static_cast<std::size_t>(shape.experts));
      const double first = static_cast<double>(row[static_cast<std::size_t>(choices[i])]);
      if (k == 1) {
        g[i] = static_cast<Real>(first);
        continue;
      }
      const double second = static_cast<double>(row[static_cast<std::size_t>(choices[i + 1])]);
      g[i] = static_cast<Real>(first / (first + second));
      g[i + 1] = static_cast<Real>(second / (first + second));
    }
  });
}

std::vector<std::int32_t> assign_slots(const RoutingShape& shape, std::span<const std::int32_t> row_choices) {
  check_shape(shape);
  check_choices(row_choices, shape, shape.row_tokens);
  std::vector<std::int32_t> slots(row_choices.size(), -1);
  const auto k = static_cast<std::size_t>(shape.choices), length = static_cast<std::size_t>(shape.row_tokens) * k;
  std::vector<std::int64_t> taken(static_cast<std::size_t>(shape.experts));
  for (std::size_t row = 0; row < row_choices.size(); row += length) {
    std::fill(taken.begin(), taken.end(), 0);
    for (std::size_t choice = 0; choice < k; ++choice) {
      for (std::size_t i = row + choice; i < row + length; i += k) {
        std::int64_t& count = taken[static_cast<std::size_t>(row_choices[i])];
        if (count < shape.capacity) slots[i] = static_cast<std::int32_t>(count++);
      }
    }
  }
  return slots;
}

std::vector<double> first_choice_fractions(const RoutingShape& shape, std::span<const std::int32_t> row_choices) {
  check_shape(shape);
  check_choices(row_choices, shape, shape.row_tokens);
  const auto experts = static_cast<std::size_t>(shape.experts);
  std::vector<double> fractions(static_cast<std::size_t>(shape.rows) * experts, 0.0);
  const auto k = static_cast<std::size_t>(shape.choices), tokens = static_cast<std::size_t>(shape.row_tokens);
  for (std::size_t t = 0; t * k < row_choices.size(); ++t) {
    fractions[t / tokens * experts + static_cast<std::size_t>(row_choices[t * k])] += 1.0;
  }
  for (double& fraction : fractions) fraction /= static_cast<double>(std::max<std::int64_t>(1, shape.row_tokens));
  return fractions;
}

std::vector<std::int32_t> local_entries(const RoutingShape& shape, std::span<const std::int32_t> row_entries) {
  check_shape(shape);
  TANDEM_CHECK(static_cast<std::int64_t>(shape.positions.size()) == shape.local_tokens);
  TANDEM_CHECK(static_cast<std::int64_t>(row_entries.size()) == shape.rows * shape.row_tokens * shape.choices);
  std::vector<std::int32_t> result;
  result.reserve(static_cast<std::size_t>(shape.rows * shape.local_tokens * shape.choices));
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (const std::int64_t position : shape.positions) {
      TANDEM_CHECK(position >= 0 && position < shape.row_tokens, fmt::format("position {} of {}", position, shape.row_tokens));
      const auto first = row_entries.begin() + (row * shape.row_tokens + position) * shape.choices;
      result.insert(result.end(), first, first + shape.choices);
    }
  }
  return result;
}

double auxiliary_loss_share(TensorView probabilities, const RoutingShape& shape, std::span<const double> fractions, double weight,
                            std::int64_t global_rows) {
  check_shape(shape);
  check_tensor(probabilities, "probabilities", shape, shape.experts);
  TANDEM_CHECK(static_cast<std::int64_t>(fractions.size()) == shape.rows * shape.experts);
  double sum = 0;
  with_real(probabilities, [&]<class Real>(Real) {
    const std::span<const Real> p = probabilities.as<const Real>();
    const auto experts = static_cast<std::size_t>(shape.experts);
    const std::size_t row_elements = static_cast<std::size_t>(shape.local_tokens) * experts;
    for (std::size_t i = 0; i < p.size(); ++i) {
      sum += fractions[i / row_elements * experts + i % experts] * static_cast<double>(p[i]);
    }
  });
  if (sum == 0) return 0;  // no rows: global_rows may be zero too
  return weight / static_cast<double>(global_rows) * shape.experts * sum / static_cast<double>(shape.row_tokens);
}

void routing_backward(TensorView dgates, TensorView probabilities, const RoutingShape& shape,
                      std::span<const std::int32_t> choices, const RoutingGradient& gradient, TensorView dlogits) {
  check_shape(shape);
  check_tensor(dgates, "dgates", shape, shape.choices);
  check_tensor(probabilities, "probabilities", shape, shape.experts);
  check_tensor(dlogits, "dlogits", shape, shape.experts);
  check_choices(choices, shape, shape.local_tokens);
  TANDEM_CHECK(!gradient.add_auxiliary || static_cast<std::int64_t>(gradient.fractions.size()) == shape.rows * shape.experts);
  with_real(probabilities, [&]<class Real>(Real) {
    const auto experts = static_cast<std::size_t>(shape.experts), k = static_cast<std::size_t>(shape.choices);
    const auto row_tokens = static_cast<std::size_t>(shape.local_tokens);
    const std::span<Real> out = dlogits.as<Real>();
    std::vector<double> dp(experts);
    for (std::size_t t = 0; t * experts < out.size(); ++t) {
      const std::span<const Real> p = probabilities.as<const Real>().subspan(t * experts, experts);
      for (std::size_t e = 0; e < experts; ++e) {
        dp[e] = gradient.add_auxiliary ? gradient.auxiliary_scale * gradient.fractions[t / row_tokens * experts + e] : 0.0;
      }
      add_gate_gradient<Real>(dgates.as<const Real>().subspan(t * k, k), p, choices.subspan(t * k, k), dp);
      double mean = 0;
      for (std::size_t e = 0; e < experts; ++e) mean += static_cast<double>(p[e]) * dp[e];
      for (std::size_t e = 0; e < experts; ++e) {
        out[t * experts + e] = static_cast<Real>(static_cast<double>(p[e]) * (dp[e] - mean));
      }
    }
  });
}

}  // namespace tandem
