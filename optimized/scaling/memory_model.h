// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/pitfall.h"
#include "optimized/scaling/workload.h"

namespace tandem {

/// Bytes of the rank that needs the most, by formula (docs/techniques/scaling.md gives each with its source).
struct MemoryEstimate {
  double parameters = 0, gradients = 0, optimizer = 0, activations = 0, communication = 0, workspace = 0;
  /// What driver, runtime and fragmentation keep: the device's constant "reserved_bytes", else 4 GB, at most 5 % of its memory.
  double reserved = 0;
  [[nodiscard]] double model_state() const noexcept { return parameters + gradients + optimizer; }
  [[nodiscard]] double total() const noexcept {
    return parameters + gradients + optimizer + activations + communication + workspace + reserved;
  }
  double limit = 0;             ///< of the device
  int worst_pipeline_rank = 0;  ///< whose figures these are
  [[nodiscard]] bool fits() const noexcept { return total() <= limit; }
};
/// Fault point: memory_of_last_stage_for_all (the last pipeline rank's figures instead of the worst one's).
[[nodiscard]] MemoryEstimate estimate_memory(const Workload& workload, const ClusterSpec& cluster,
                                             const PitfallSet& pitfalls = {});

/// Bytes of one layer's activations that one rank keeps for its backward pass, of one micro-batch of `rows` rows in 16 bits:
/// Korthikanti et al. (MLSys 2023), table 2: one device s b h (34 + 5 a s / h); tensor parallel s b h (10 + 24/t + 5 a s/(h t));
/// with sequence parallelism (s b h / t) (34 + 5 a s / h); selective recomputation (or fused attention) without the term of a;
/// full recomputation 2 s b h (or / t where it is sharded). Generalised to grouped queries and gated MLPs in the docs.
[[nodiscard]] double activation_bytes_of_layer(const Workload& workload, double rows);

}  // namespace tandem
