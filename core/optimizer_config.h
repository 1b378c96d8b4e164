// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem {

enum class OptimizerKind : std::uint8_t { adamw, sgd };
[[nodiscard]] std::string_view name(OptimizerKind kind);

/// AdamW (Loshchilov & Hutter 2019; decoupled decay), step n = 1, 2, ...:
///   m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p (1 - lr wd) for tensors that decay;
///   p <- p - lr (m / (1 - b1^n)) / (sqrt(v / (1 - b2^n)) + eps)
/// SGD: p <- p (1 - lr wd) for tensors that decay; p <- p - lr g.
/// Before either: coefficient = min(1, max_grad_norm / (norm + 1e-6)), g <- coefficient g, when max_grad_norm > 0.
struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::adamw;
  double learning_rate = 1e-3;  ///< peak; the schedule scales it
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double max_grad_norm = 1.0;  ///< 0 switches clipping off

  friend bool operator==(const OptimizerConfig&, const OptimizerConfig&) = default;
};

/// Added to the norm in the clip coefficient (as torch.nn.utils.clip_grad_norm_ does).
inline constexpr double kClipEpsilon = 1e-6;

enum class ScheduleKind : std::uint8_t { constant, cosine };
[[nodiscard]] std::string_view name(ScheduleKind kind);

/// Learning-rate factor of step s = 0, 1, ...: linear warm-up (s + 1) / warmup_steps while s < warmup_steps; then 1 (constant),
/// or
///   min_ratio + (1 - min_ratio) (1 + cos(pi x)) / 2, x = min(1, (s - warmup_steps) / (decay_steps - warmup_steps)).
struct ScheduleConfig {
  ScheduleKind kind = ScheduleKind::constant;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;  ///< step at which min_ratio is reached; 0 means the number of steps of the run
  double min_ratio = 0.1;

  friend bool operator==(const ScheduleConfig&, const ScheduleConfig&) = default;
};

}  // namespace tandem
