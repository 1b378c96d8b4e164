// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/dtype.h"
#include "core/memory_ledger.h"
#include "core/optimizer_config.h"
#include "reference/data_parallel.h"
#include "reference/optimizer.h"

/// ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020) over d data ranks,
/// simulated in lockstep (reference/data_parallel.h).
///
/// A *unit* is what is dealt, gathered and freed as one; its elements, parameter after parameter in definition order, are dealt
/// to the ranks by balanced_part(). Rank r *owns* part r of every unit.
///
/// Who holds what between steps, of every unit (`whole` or own `part`):
///              parameters   gradients   moments, master copy
///   stage 0    whole        whole       whole
///   stage 1    whole        whole       part
///   stage 2    whole        part        part
///   stage 3    part         part        part
/// During a step, from stage 2 on a unit's whole gradient exists beside that from the first pass of a micro-batch that adds to it
/// to its reduction after the last one; in stage 3 its whole parameters exist while a pass reads them.
///
/// What is exchanged, E being the elements of a unit and m the micro-batches:
///   gradients    reduce-scatter: the owner gets the sum over ranks r = 0, 1, ... of its part. Stage 1 once a step, of sums over
///                micro-batches; from stage 2 on once a micro-batch, and the owner adds micro-batch after micro-batch.
///   parameters   all-gather. Stages 1 and 2 once a step, after the update; stage 3 before every pass that reads them, which is
///                zero_gathers() times a micro-batch.
/// Each moves E (d - 1) / d elements from every rank on average, E (d - 1) from all of them together.
namespace tandem::reference {

struct ZeroUnit {
  std::string name;  ///< "wte", "wpe", "h.0", "h.0.experts", ..., "ln_f", "lm_head"
  std::vector<ParameterSpec> parameters;
  std::int64_t elements = 0;
};
/// In definition order: each table, the dense parameters of each block, its experts, the final norm, a separate head.
[[nodiscard]] std::vector<ZeroUnit> zero_units(const GptConfig& model);

/// Passes of a micro-batch that read the unit: 2 of a block (forward, backward) and of the final norm, 1 of a table for the
/// embedding and 1 for the head, whose forward and backward are one; so a tied wte has 2. With recomputation too: what is
/// computed again is computed in the backward pass.
[[nodiscard]] int zero_gathers(const GptConfig& model, const ZeroUnit& unit);

/// The L2 norm as all stages take it: squares are summed in double over each part, the parts' sums over units and ranks in
/// order.
template <class Real>
[[nodiscard]] double norm_by_parts(const GptConfig& model, int ranks, const NamedTensors<Real>& gradients);

struct ZeroLayout {
  int stage = 1;  ///< 1, 2 or 3
  DataParallelLayout data;
};

/// What a rank holds between steps. Outer index: unit.
template <class Real>
struct ZeroRank {
  std::vector<std::vector<Real>> parameters;  ///< whole, in stage 3 the own part
  std::vector<std::vector<Real>> gradients;   ///< stage 1 whole, else the own part; of the last step, before clipping
  std::vector<std::vector<Real>> m, v;        ///< own part; no units with SGD
};
template <class Real>
struct ZeroState {
  std::vector<ZeroUnit> units;
  std::vector<ZeroRank<Real>> ranks;
  std::int64_t updates = 0;  ///< steps done: Adam's t of the last one
};
/// Throws ContractError for another stage, for no ranks, and for parameters that are not the model's.
template <class Real>
[[nodiscard]] ZeroState<Real> initial_zero_state(const GptConfig& model, const ZeroLayout& layout, OptimizerKind optimizer,
                                                 const NamedTensors<Real>& parameters);

template <class Real>
struct ZeroStep {
  double loss = 0.0;
  RoutingRecord routing = {};
  double gradient_norm = 0.0;  ///< before clipping; norm_by_parts()
  double clip_coefficient = 1.0;
  NamedTensors<Real> gradients;  ///< the reduced ones, put together from their owners' parts, before clipping
  /// sizeof(Real) times the elements that a rank holds: between steps, and highest during this one (each category at its own
  /// moment). Element r: rank r.
  std::vector<BytesByCategory> held_bytes, peak_bytes;
  /// Sent by all ranks together; a rank sends what it does not keep of a sum, and what it owns once to each other rank.
  std::int64_t gradient_wire_bytes = 0;
  std::int64_t parameter_wire_bytes = 0;
};

/// One training step: gradients of the global batch, norm, clip, update of own parts, gather. Parameters that no rank has
/// gathered cannot be read: their tensors do not exist. With one micro-batch, and in stage 1 always, equal bit for bit to
/// data_parallel_gradients(), norm_by_parts(), scale() and optimizer_step().
template <class Real>
[[nodiscard]] ZeroStep<Real> zero_step(const GptConfig& model, const OptimizerConfig& optimizer, double learning_rate,
                                       const Batch& batch, const ZeroLayout& layout, const std::optional<DropoutStep>& dropout,
                                       ZeroState<Real>& state);

/// Put together from the parts of their owners.
template <class Real>
[[nodiscard]] NamedTensors<Real> joined_parameters(const ZeroState<Real>& state);
/// Moments are empty with SGD.
template <class Real>
[[nodiscard]] OptimizerState<Real> joined_optimizer_state(const ZeroState<Real>& state);

/// Bytes of model state of one parameter, with AdamW and SGD:
///   parameters  storage:                fp32 4, 16-bit 2
///   gradients   accumulate:             fp32 4, 16-bit storage 4 ("wide") or 2 ("stored")
///   optimizer   moments 2 x master, master copy where storage is narrower:   fp32 8, 16-bit 12;  SGD: 0, 4
/// Sums with AdamW: fp32 16; 16-bit 18 with wide gradients, 16 with 16-bit ones (the paper's 2 + 2 + K, K = 12).
struct ZeroElementBytes {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;
};
[[nodiscard]] ZeroElementBytes zero_element_bytes(const Numerics& numerics, OptimizerKind optimizer);

/// Model state that one rank of d holds between steps (categories parameters, gradients, optimizer), in bytes:
///   sum over units u of  b_p whole_or_part(u) + b_g whole_or_part(u) + b_o whole_or_part(u)
/// with the table above and part(u) = balanced_part(E_u, d, rank), which for rank 0, the fullest, is ceil(E_u / d). Stages 0
/// to 3.
[[nodiscard]] BytesByCategory zero_state_bytes(const std::vector<std::int64_t>& unit_elements, int ranks, int rank, int stage,
                                               const ZeroElementBytes& bytes);

/// The paper's (section 5), for parts that are all equal: P parameters, d ranks, b the bytes of an element:
///   stage 0  (b_p + b_g + b_o) P;  1  (b_p + b_g) P + b_o P / d;  2  b_p P + (b_g + b_o) P / d;  3  (b_p + b_g + b_o) P / d
[[nodiscard]] double published_zero_bytes(double parameters, int ranks, int stage, const ZeroElementBytes& bytes);

/// Bytes that all d ranks together put on the wire in a step of m micro-batches for one unit of E elements that is gathered g
/// times a micro-batch (zero_gathers()), elements being b_g bytes on the wire as gradients and b_p as parameters:
///                gradients        parameters        sum per rank, m = 1, b_g = b_p = b
///   stage 0      2 E (d - 1) b_g  0                 2 E b (d - 1) / d
///   stage 1      E (d - 1) b_g    E (d - 1) b_p     2 E b (d - 1) / d
///   stage 2      m E (d - 1) b_g  E (d - 1) b_p     2 E b (d - 1) / d
///   stage 3      m E (d - 1) b_g  m g E (d - 1) b_p 3 E b (d - 1) / d with g = 2
/// (section 7 of the paper: 2 P, 2 P, 3 P; its 2 P of stage 2 holds without accumulation).
struct ZeroWireBytes {
  std::int64_t gradients = 0, parameters = 0;
};
[[nodiscard]] ZeroWireBytes zero_wire_bytes(std::int64_t elements, int gathers, int ranks, int stage, int micro_batches,
                                            std::int64_t gradient_bytes, std::int64_t parameter_bytes);

}  // namespace tandem::reference
