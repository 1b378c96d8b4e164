// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/model_config.h"
#include "core/pitfall.h"
#include "harness/evidence.h"

namespace tandem {

/// The metrics checked against answers that are known without them. A suite adds these properties to its cases, so that a wrong
/// formula makes a case fail; each holds exactly while no pitfall is on.

/// Multiply-adds of the matrix products of one row of `row_tokens` tokens, counted one by one in loops as the definition writes
/// them: forward only. Position t attends to positions 0..t. For small shapes.
[[nodiscard]] std::int64_t count_forward_multiply_adds(const GptConfig& model, std::int64_t row_tokens);

/// model_flops_per_row() equals two times the multiply-adds that an instrumented training step of one row counted, forward and
/// backward.
[[nodiscard]] std::vector<Property> flops_properties(std::int64_t counted_multiply_adds, const GptConfig& model,
                                                     std::int64_t row_tokens, const PitfallSet& pitfalls);

/// utilization() of a made-up machine of four devices: 40 FLOPs in 1 s where each device could do 100 is a tenth; more than the
/// peak is refused.
[[nodiscard]] std::vector<Property> utilization_properties(const PitfallSet& pitfalls);

/// split_time() of made-up traces with answers known by hand: nested, overlapping, zero-length, waiting, hidden and unnamed
/// spans, spans outside the measured steps; each part, and the identity parts = wall.
[[nodiscard]] std::vector<Property> time_split_properties(const PitfallSet& pitfalls);

/// derive() of a made-up run of two ranks whose reduction ends after the last computation: median known, warm-up left out, order
/// of steps without influence, steps add up to the end-to-end time.
[[nodiscard]] std::vector<Property> timer_properties(const PitfallSet& pitfalls);

/// Of a real run: the measured steps add up to the end-to-end time within 1 %.
[[nodiscard]] std::vector<Property> timer_properties(const Measured& measured, const PitfallSet& pitfalls);

}  // namespace tandem
