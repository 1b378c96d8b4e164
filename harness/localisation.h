// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tandem {

/// Where a failure starts: the first traced tensor in execution order beyond its bound.
struct Localisation {
  std::string tensor;     ///< "h.1.attn.c_proj"; "d.h.1.ln_2" for the gradient of the loss with respect to one
  int layer = -1;         ///< -1: outside the layers (embedding, last norm, logits)
  std::string operation;  ///< that computed it: "attention_out", "mlp", ...
  std::string phase;      ///< "forward", "backward"
  int rank = 0;
  std::string slice;  ///< part of the global tensor, ShardSpec::describe_slices()
  int micro_batch = 0;
  double error = 0, bound = 0;
  double error_over_bound = 0;  ///< infinite where anything differs under a bound of zero, and for NaN
};

/// "starts at h.1.attn.c_proj (attention_out, forward), rank 3, micro-batch 1, [0:4, 0:8]: error 0.021 = 3.4e+04 x bound"
[[nodiscard]] std::string describe(const Localisation& localisation);

}  // namespace tandem
