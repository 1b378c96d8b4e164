// SPDX-License-Identifier: Apache-2.0
#include "reference/experts.h"

#include <utility>

#include <fmt/format.h>

#include "reference/require.h"

namespace tandem::reference {
namespace {

/// The assignments that an expert took, and row `j` of what belongs to them.
template <class Real, class Function>
void for_each_taken(const ExpertLayer& layer, const Routing<Real>& routing, const Function& function) {
  for (int expert = 0; expert < layer.experts; ++expert) {
    const std::vector<Assignment>& taken = routing.taken[static_cast<std::size_t>(expert)];
    for (std::size_t j = 0; j < taken.size(); ++j) function(static_cast<std::size_t>(expert), j, taken[j]);
  }
}

template <class Real>
void require_sizes(const ExpertLayer& layer, const Routing<Real>& routing, const OfExperts<Real>& rows) {
  require_size(std::span(rows), layer.experts, "experts' rows");
  for (std::size_t e = 0; e < rows.size(); ++e) {
    require_size(std::span(rows[e]), static_cast<std::int64_t>(routing.taken[e].size()) * layer.hidden, "an expert's rows");
  }
}

template <class Real>
Real gate_of(const ExpertLayer& layer, const Routing<Real>& routing, const Assignment& assignment) {
  return routing.gates[static_cast<std::size_t>(assignment.token * layer.choices + assignment.choice)];
}

/// Row j of what expert `expert` was given or returned.
template <class Real>
std::span<const Real> row_at(const ExpertLayer& layer, const OfExperts<Real>& rows, std::size_t expert, std::size_t j) {
  return row_of(std::span<const Real>(rows[expert]), static_cast<std::int64_t>(j), layer.hidden);
}

}  // namespace

std::string expert_name(const std::string& name, int expert) { return fmt::format("{}.experts.{}", name, expert); }

template <class Real>
MlpActivations<Real> expert_forward(const ExpertLayer& layer, const NamedTensors<Real>& parameters, const std::string& expert,
                                    std::vector<Real> x, MultiplyAdds* count) {
  const std::int64_t rows = static_cast<std::int64_t>(x.size()) / layer.hidden;
  MlpActivations<Real> kept;
  kept.x = std::move(x);
  kept.before_gelu.resize(static_cast<std::size_t>(rows * layer.width));
  const std::string fc = expert + ".c_fc", projection = expert + ".c_proj";
  rounded_linear_forward<Real>(layer.rounding, fc, {rows, layer.hidden, layer.width}, kept.x, tensor(parameters, fc + ".weight"),
                               tensor(parameters, fc + ".bias"), kept.before_gelu, count);
  kept.after_gelu.resize(kept.before_gelu.size());
  gelu_forward<Real>(kept.before_gelu, kept.after_gelu);
  round_all<Real>(layer.rounding.storage, kept.after_gelu);
  kept.y.resize(kept.x.size());
  rounded_linear_forward<Real>(layer.rounding, projection, {rows, layer.width, layer.hidden}, kept.after_gelu,
                               tensor(parameters, projection + ".weight"), tensor(parameters, projection + ".bias"), kept.y,
                               count);
  return kept;
}

template <class Real>
std::vector<Real> expert_backward(const ExpertLayer& layer, const NamedTensors<Real>& parameters, const std::string& expert,
                                  const MlpActivations<Real>& kept, std::span<const Real> dy, NamedTensors<Real>& gradients,
                                  MultiplyAdds* count) {
  const std::int64_t rows = static_cast<std::int64_t>(kept.x.size()) / layer.hidden;
  std::vector<Real> dmiddle(kept.after_gelu.size()), dx(kept.x.size());
  const std::string fc = expert + ".c_fc", projection = expert + ".c_proj";
  rounded_linear_backward<Real>(layer.rounding, projection, {rows, layer.width, layer.hidden}, kept.after_gelu,
                                tensor(parameters, projection + ".weight"), dy, dmiddle,
                                tensor(gradients, projection + ".weight"), tensor(gradients, projection + ".bias"), count);
  gelu_backward<Real>(kept.before_gelu, dmiddle, dmiddle);
  round_all<Real>(layer.rounding.storage, dmiddle);
  rounded_linear_backward<Real>(layer.rounding, fc, {rows, layer.hidden, layer.width}, kept.x, tensor(parameters, fc + ".weight"),
                                dmiddle, dx, tensor(gradients, fc + ".weight"), tensor(gradients, fc + ".bias"), count);
  return dx;
}

template <class Real>
std::vector<Real> gather_assigned(std::span<const Real> x, std::int64_t width, std::span<const Assignment> assignments) {
  std::vector<Real> rows;
  for (const Assignment& assignment : assignments) {
    const auto row = row_of(x, assignment.token, width);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

template <class Real>
std::vector<Real> combine(const ExpertLayer& layer, const Routing<Real>& routing, const OfExperts<Real>& y) {
  require_sizes(layer, routing, y);
  std::vector<double> sums(routing.slots.size() / static_cast<std::size_t>(layer.choices) *
                           static_cast<std::size_t>(layer.hidden));
  for_each_taken(layer, routing, [&](std::size_t expert, std::size_t j, const Assignment& assignment) {
    add_scaled(gate_of(layer, routing, assignment), row_at(layer, y, expert, j),
               row_of(std::span(sums), assignment.token, layer.hidden));
  });
  std::vector<Real> out(sums.size());
  store(std::span<const double>(sums), std::span(out));
  return out;
}

template <class Real>
CombineGradients<Real> combine_backward(const ExpertLayer& layer, const Routing<Real>& routing, const OfExperts<Real>& y,
                                        std::span<const Real> dout) {
  require_sizes(layer, routing, y);
  CombineGradients<Real> result{std::vector<Real>(routing.gates.size()), OfExperts<Real>(y.size())};
  for_each_taken(layer, routing, [&](std::size_t expert, std::size_t j, const Assignment& assignment) {
    const auto dout_row = row_of(dout, assignment.token, layer.hidden);
    const Real gate = gate_of(layer, routing, assignment);
    const auto index = static_cast<std::size_t>(assignment.token * layer.choices + assignment.choice);
    result.dgates[index] = static_cast<Real>(dot<Real>(dout_row, row_at(layer, y, expert, j)));
    for (const Real value : dout_row) result.dy[expert].push_back(rounded(gate * value, layer.rounding.storage));
  });
  return result;
}

template <class Real>
std::vector<Real> add_gradients_of_experts(const ExpertLayer& layer, const Routing<Real>& routing,
                                           const OfExperts<Real>& dx_of_experts, std::span<const Real> dx_of_router) {
  require_sizes(layer, routing, dx_of_experts);
  std::vector<double> sums(dx_of_router.begin(), dx_of_router.end());
  for_each_taken(layer, routing, [&](std::size_t expert, std::size_t j, const Assignment& assignment) {
    add_scaled(1.0, row_at(layer, dx_of_experts, expert, j), row_of(std::span(sums), assignment.token, layer.hidden));
  });
  std::vector<Real> dx(sums.size());
  store(std::span<const double>(sums), std::span(dx));
  return dx;
}

template <class Real>
std::vector<Real> experts_forward(const ExpertLayer& layer, const NamedTensors<Real>& parameters, const std::string& name,
                                  std::span<const Real> x, ExpertActivations<Real>& kept, MultiplyAdds* count) {
  kept.routing = route<Real>(layer, x, tensor(parameters, name + ".router.weight"), count);
  OfExperts<Real> y;
  for (int expert = 0; expert < layer.experts; ++expert) {
    const std::vector<Assignment>& taken = kept.routing.taken[static_cast<std::size_t>(expert)];
    kept.experts.push_back(
        expert_forward<Real>(layer, parameters, expert_name(name, expert), gather_assigned<Real>(x, layer.hidden, taken), count));
    y.push_back(kept.experts.back().y);
  }
  return combine<Real>(layer, kept.routing, y);
}

template <class Real>
ExpertsGradients<Real> experts_backward(const ExpertLayer& layer, const NamedTensors<Real>& parameters, const std::string& name,
                                        std::span<const Real> x, const ExpertActivations<Real>& kept, std::span<const Real> dout,
                                        NamedTensors<Real>& gradients, MultiplyAdds* count) {
  OfExperts<Real> y, dx_of_experts;
  for (const MlpActivations<Real>& expert : kept.experts) y.push_back(expert.y);
  const CombineGradients<Real> combined = combine_backward<Real>(layer, kept.routing, y, dout);
  for (int expert = 0; expert < layer.experts; ++expert) {
    const auto e = static_cast<std::size_t>(expert);
    dx_of_experts.push_back(
        expert_backward<Real>(layer, parameters, expert_name(name, expert), kept.experts[e], combined.dy[e], gradients, count));
  }
  RouterGradients<Real> router = route_backward<Real>(layer, x, tensor(parameters, name + ".router.weight"), kept.routing,
                                                      combined.dgates, tensor(gradients, name + ".router.weight"), count);
  return {std::move(router.dlogits), add_gradients_of_experts<Real>(layer, kept.routing, dx_of_experts, router.dx)};
}

template MlpActivations<float> expert_forward(const ExpertLayer&, const NamedTensors<float>&, const std::string&,
                                              std::vector<float>, MultiplyAdds*);
template MlpActivations<double> expert_forward(const ExpertLayer&, const NamedTensors<double>&, const std::string&,
                                               std::vector<double>, MultiplyAdds*);
template std::vector<float> expert_backward(const ExpertLayer&, const NamedTensors<float>&, const std::string&,
                                            const MlpActivations<float>&, std::span<const float>, NamedTensors<float>&,
                                            MultiplyAdds*);
template std::vector<double> expert_backward(const ExpertLayer&, const NamedTensors<double>&, const std::string&,
                                             const MlpActivations<double>&, std::span<const double>, NamedTensors<double>&,
                                             MultiplyAdds*);
template std::vector<float> gather_assigned(std::span<const float>, std::int64_t, std::span<const Assignment>);
template std::vector<double> gather_assigned(std::span<const double>, std::int64_t, std::span<const Assignment>);
template std::vector<float> combine(const ExpertLayer&, const Routing<float>&, const OfExperts<float>&);
template std::vector<double> combine(const ExpertLayer&, const Routing<double>&, const OfExperts<double>&);
template CombineGradients<float> combine_backward(const ExpertLayer&, const Routing<float>&, const OfExperts<float>&,
                                                  std::span<const float>);
template CombineGradients<double> combine_backward(const ExpertLayer&, const Routing<double>&, const OfExperts<double>&,
                                                   std::span<const double>);
template std::vector<float> add_gradients_of_experts(const ExpertLayer&, const Routing<float>&, const OfExperts<float>&,
                                                     std::span<const float>);
template std::vector<double> add_gradients_of_experts(const ExpertLayer&, const Routing<double>&, const OfExperts<double>&,
                                                      std::span<const double>);
template std::vector<float> experts_forward(const ExpertLayer&, const NamedTensors<float>&, const std::string&,
                                            std::span<const float>, ExpertActivations<float>&, MultiplyAdds*);
template std::vector<double> experts_forward(const ExpertLayer&, const NamedTensors<double>&, const std::string&,
                                             std::span<const double>, ExpertActivations<double>&, MultiplyAdds*);
template ExpertsGradients<float> experts_backward(const ExpertLayer&, const NamedTensors<float>&, const std::string&,
                                                  std::span<const float>, const ExpertActivations<float>&, std::span<const float>,
                                                  NamedTensors<float>&, MultiplyAdds*);
template ExpertsGradients<double> experts_backward(const ExpertLayer&, const NamedTensors<double>&, const std::string&,
                                                   std::span<const double>, const ExpertActivations<double>&,
                                                   std::span<const double>, NamedTensors<double>&, MultiplyAdds*);

}  // namespace tandem::reference
