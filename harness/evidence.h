// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory_ledger.h"
#include "core/tensor.h"
#include "core/timeline.h"

namespace tandem {

/// One global tensor as a side of a pair produced it, gathered from its shards by name.
struct EvidenceTensor {
  std::string name;
  std::vector<double> values;   ///< row-major, whole; fp32 values are exact in double
  double reduction_length = 1;  ///< K: terms of the longest sum behind one element
  /// The true value is zero whatever the inputs (the key bias: softmax ignores a shift of all scores). Judged absolutely as a
  /// gradient; left out after Adam, which turns rounding noise into full-size updates.
  bool true_value_is_zero = false;
};

/// Named moments of a comparison, in execution order. Adam and clipping hide constant factors, hence the first ones.
///   initial_parameters before step 0. Both sides start from the same bits, so this one is always compared bit for bit; a stage
///                      whose name ends in "_parameters" and that equals it shows that nothing was trained
///   gradients          of step 0, before clipping and optimizer
///   gradient_norm      of step 0, as a tensor of one element
///   sgd_parameters     after one plain SGD step without clipping
///   adamw_parameters   after K steps of the case's own optimizer
///   losses, gradient_norms   one value per step of those K, as tensors of K elements
inline constexpr std::string_view kInitialParameters = "initial_parameters";
inline constexpr std::string_view kGradients = "gradients";
inline constexpr std::string_view kLosses = "losses";
inline constexpr std::string_view kGradientNorms = "gradient_norms";
struct StageEvidence {
  std::string stage;
  int step = 0;  ///< the step whose end (or, for gradients, whose backward) this is
  std::vector<EvidenceTensor> tensors;
};

/// One copy of (a part of) a tensor as one rank holds it. All copies of the same (stage, tensor, part) must be equal bit for bit.
struct ReplicaHash {
  std::string tensor;
  std::string part;   ///< ShardSpec::describe_slices(): "whole", "[0:64, 0:16+64:80+128:144]"
  std::string stage;  ///< "gradients", "adamw_parameters", ...
  int rank = 0;
  std::uint64_t hash = 0;
};

/// What one side of a pair did, for the harness to judge.
struct Evidence {
  std::string side;          ///< "reference fp64", "engine fp32 data 4": its identity; two sides that share it are one side
  double unit_roundoff = 0;  ///< of the precision it computed in
  std::vector<StageEvidence> stages;
  int ranks = 1;
  /// [data x context parts] hash of the inputs (ids, targets) of each part of the global batch in step 0. The ranks of one tensor
  /// or pipeline group share their input and count once, so the number of parts divides the number of ranks. Equal inputs in all
  /// parts where there are several make the comparison invalid. A part without rows has 0.
  std::vector<std::uint64_t> input_hashes;
  /// [ranks] hash of all replicated state (gradients after reduction, parameters) of each rank, where every rank holds the whole
  /// model. All equal.
  std::vector<std::uint64_t> replica_hashes;
  /// Where ranks hold different parts of the model: every tensor of every rank in every stage, in execution order; every rank
  /// appears. With more than one rank this or replica_hashes is given.
  std::vector<ReplicaHash> replicas;
  std::vector<double> losses;  ///< per optimizer step, for liveness
};

/// Something that must hold exactly or within a limit that is derived: a benefit (bytes, memory, hidden share), an identity, a
/// convergence gap.
enum class Relation : std::uint8_t { at_most, at_least, equal };
/// "<=", ">=", "=="
[[nodiscard]] std::string_view symbol(Relation relation);

struct Property {
  std::string name;  ///< "gradient_bytes_on_the_wire"
  double value = 0;
  Relation relation = Relation::at_most;
  double limit = 0;
  std::string derivation;  ///< where the limit comes from, with the formula
  int step = -1;           ///< step at which it was seen; -1: whole run
  std::string tensor;      ///< tensor concerned, if one
  /// `!(value <= limit)` fails, so that NaN fails.
  [[nodiscard]] bool holds() const noexcept;
};

/// What was measured while the optimized side ran (steps after warm-up).
struct Measured {
  std::vector<std::vector<Span>> spans_by_rank;  ///< all spans, warm-up steps included
  int warm_up_steps = 1;
  std::vector<double> step_seconds;           ///< per measured step, the slowest rank
  double wall_seconds = 0;                    ///< end to end over all measured steps, one clock
  std::int64_t tokens_per_step = 0;           ///< valid (trained) tokens, all ranks
  double model_flops_per_step = 0;            ///< all ranks; formula in docs/measuring.md
  double peak_flops_per_second = 0;           ///< of all devices together, measured; 0: unknown
  BytesByCategory peak_bytes{};               ///< worst rank
  BytesByCategory predicted_peak_bytes{};     ///< formula; 0 where there is none
  std::int64_t predicted_bytes_on_wire = -1;  ///< per step, all ranks; -1: no formula
};

}  // namespace tandem
