// SPDX-License-Identifier: Apache-2.0
#include "own_adamw.h"

#include <cmath>
#include <cstddef>

namespace own {

using tandem::TensorView;

void OwnAdamW::adamw(const tandem::AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
                     TensorView stored) {
  const bool all_single = gradient.dtype() == tandem::DType::f32 && parameter.dtype() == tandem::DType::f32;
  if (!all_single || stored || !memory().on_host()) {
    inner().adamw(step, gradient, parameter, m, v, stored);
    return;
  }
  ++*calls_;
  const auto g = gradient.as<float>();
  const auto p = parameter.as<float>();
  const auto first = m.as<float>();
  const auto second = v.as<float>();
  const auto steps = static_cast<double>(step.step_index);
  const auto beta1 = static_cast<float>(step.beta1);
  const auto beta2 = static_cast<float>(step.beta2);
  // Both corrections and the learning rate are folded into two factors, so that the loop has one division and one root.
  const double correction1 = 1.0 - std::pow(step.beta1, steps);
  const double correction2 = bug_ == AdamWBug::bias_correction ? 1.0 : 1.0 - std::pow(step.beta2, steps);
  const auto rate = static_cast<float>(step.learning_rate * std::sqrt(correction2) / correction1);
  const auto epsilon = static_cast<float>(step.epsilon * std::sqrt(correction2));
  const auto keep = static_cast<float>(1.0 - step.learning_rate * step.weight_decay);
  const auto scale = bug_ == AdamWBug::gradient_scale ? 1.0F : static_cast<float>(step.gradient_scale);
  for (std::size_t i = 0; i < p.size(); ++i) {
    const float clipped = scale * g[i];
    first[i] = beta1 * first[i] + (1.0F - beta1) * clipped;
    second[i] = beta2 * second[i] + (1.0F - beta2) * clipped * clipped;
    p[i] = p[i] * keep - rate * first[i] / (std::sqrt(second[i]) + epsilon);
  }
}

}  // namespace own
