// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "reference/ops.h"
#include "reference/routing.h"
#include "reference/tensors.h"

/// A mixture-of-experts MLP on one device, in the parts that expert parallelism puts on different ranks: gather the rows that an
/// expert takes, run the expert, combine what the experts return. `name` is that of the layer, "h.0.mlp".
namespace tandem::reference {

/// "h.0.mlp.experts.2"
[[nodiscard]] std::string expert_name(const std::string& name, int expert);

/// What the backward pass of one expert reads. [rows that it was given, hidden or width]
template <class Real>
struct MlpActivations {
  std::vector<Real> x;
  std::vector<Real> before_gelu;
  std::vector<Real> after_gelu;
  std::vector<Real> y;
};

/// FFN(x) = c_proj(gelu(c_fc(x))), the parameters being `expert`.c_fc.weight and so on.
template <class Real>
[[nodiscard]] MlpActivations<Real> expert_forward(const ExpertLayer& layer, const NamedTensors<Real>& parameters,
                                                  const std::string& expert, std::vector<Real> x, MultiplyAdds* count = nullptr);
/// Returns dx; adds to the gradients of `expert`.
template <class Real>
[[nodiscard]] std::vector<Real> expert_backward(const ExpertLayer& layer, const NamedTensors<Real>& parameters,
                                                const std::string& expert, const MlpActivations<Real>& kept,
                                                std::span<const Real> dy, NamedTensors<Real>& gradients,
                                                MultiplyAdds* count = nullptr);

/// Rows of x [tokens, width], one for each assignment.
template <class Real>
[[nodiscard]] std::vector<Real> gather_assigned(std::span<const Real> x, std::int64_t width,
                                                std::span<const Assignment> assignments);

/// What each expert returned for the rows it took: [experts][assignments taken, hidden], in the order of Routing::taken.
template <class Real>
using OfExperts = std::vector<std::vector<Real>>;

/// out_t = sum over the kept choices i of t of gate_i y_i, y_i being what expert e_i returned for t; 0 where all were dropped.
template <class Real>
[[nodiscard]] std::vector<Real> combine(const ExpertLayer& layer, const Routing<Real>& routing, const OfExperts<Real>& y);

template <class Real>
struct CombineGradients {
  std::vector<Real> dgates;  ///< [tokens, choices]
  OfExperts<Real> dy;
};
/// dgate_i = dout_t . y_i for kept choices and 0 for dropped ones; dy_i = gate_i dout_t.
template <class Real>
[[nodiscard]] CombineGradients<Real> combine_backward(const ExpertLayer& layer, const Routing<Real>& routing,
                                                      const OfExperts<Real>& y, std::span<const Real> dout);

/// dx_t = dx_t of the router + sum over the kept choices i of dx_i.
template <class Real>
[[nodiscard]] std::vector<Real> add_gradients_of_experts(const ExpertLayer& layer, const Routing<Real>& routing,
                                                         const OfExperts<Real>& dx_of_experts,
                                                         std::span<const Real> dx_of_router);

template <class Real>
struct ExpertActivations {
  Routing<Real> routing;
  std::vector<MlpActivations<Real>> experts;  ///< [experts]
};

/// out_t = sum over the kept choices i of gate_i FFN_ei(x_t). x, out [tokens, hidden].
template <class Real>
[[nodiscard]] std::vector<Real> experts_forward(const ExpertLayer& layer, const NamedTensors<Real>& parameters,
                                                const std::string& name, std::span<const Real> x, ExpertActivations<Real>& kept,
                                                MultiplyAdds* count = nullptr);

template <class Real>
struct ExpertsGradients {
  std::vector<Real> dlogits;  ///< [tokens, experts], of the router
  std::vector<Real> dx;       ///< [tokens, hidden]
};
/// Adds to the gradients of the router and of all experts; that of an expert without tokens stays as it is.
template <class Real>
[[nodiscard]] ExpertsGradients<Real> experts_backward(const ExpertLayer& layer, const NamedTensors<Real>& parameters,
                                                      const std::string& name, std::span<const Real> x,
                                                      const ExpertActivations<Real>& kept, std::span<const Real> dout,
                                                      NamedTensors<Real>& gradients, MultiplyAdds* count = nullptr);

}  // namespace tandem::reference
