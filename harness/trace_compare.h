// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/trace_file.h"
#include "harness/text_table.h"
#include "harness/verdict.h"

namespace tandem {

/// What the bounds of a comparison are made of.
struct TraceBounds {
  double storage_roundoff = 0;     ///< of the dtype that activations are stored in
  double accumulate_roundoff = 0;  ///< of the dtype that sums are formed in
  double gradient_roundoff = 0;    ///< of the dtype that gradients of parameters are summed in
  double forward_length = 1;       ///< K of activations, the longest sum behind one element
  double backward_length = 1;      ///< K of the loss and of gradients, which the vocabulary enters
  /// 1 against the truth; 2 between two candidates, each of which may lie at the end of its own bound.
  double allowances = 1;
  /// max(u_storage, u_accumulate sqrt(K)); gradients of parameters: with u_gradient; parameters: u_storage.
  [[nodiscard]] double rounding(TraceKind kind) const;
};

/// Of the coarser precision of the two, where two are given; K = max(tokens of the batch, MLP width), from the loss on max(..,
/// vocabulary).
[[nodiscard]] TraceBounds trace_bounds(const TraceHeader& header, std::int64_t tokens, const TraceHeader* other = nullptr);

enum class TraceProblem : std::uint8_t {
  beyond_bound,
  replicas_differ,
  not_finite,
  part_missing,
  tensor_missing,
  unknown_tensor,
  size_differs
};
[[nodiscard]] std::string_view name(TraceProblem problem);

/// Where a trace leaves the truth.
struct Divergence {
  TraceProblem problem = TraceProblem::beyond_bound;
  std::string name;  ///< "d.h.3.attn.c_proj"
  TraceKind kind = TraceKind::activation;
  int layer = -1;         ///< -1: outside the blocks
  std::string operation;  ///< "attn.c_proj", "block output", "ln_f", ...
  std::string phase;      ///< "forward", "backward", "parameters"
  int rank = -1;          ///< whose part is worst; -1: a sum over ranks, or no one's
  int micro_batch = -1;
  std::string slice;  ///< of that part
  double error = 0, bound = 0, error_over_bound = 0;
  std::int64_t element = -1;    ///< global row-major index of the worst element of that part
  std::string element_indices;  ///< the same by dimension, "[5, 17]"
  double value = 0, truth = 0;  ///< there
};

/// One tensor that both sides have.
struct TraceVerdict {
  TensorVerdict tensor;                ///< `stage` is the name of the kind
  std::int64_t replica_conflicts = 0;  ///< values on which ranks that hold the same part differ, within the bound or not
  std::optional<Divergence> divergence;
};

struct TraceComparison {
  std::string candidate, truth;  ///< how the sides are called in the output
  TraceBounds bounds;
  bool has_yardstick = false;
  std::vector<TraceVerdict> tensors;   ///< in the order of execution
  std::vector<Divergence> incomplete;  ///< tensors that only one side has; a fault only where completeness was asked for
  bool must_be_complete = false;
  std::set<TraceKind> recorded_kinds;  ///< of the candidate

  /// In the order of execution; a tensor that is missing or unknown comes after all that were compared.
  [[nodiscard]] std::optional<Divergence> first_divergence() const;
  [[nodiscard]] bool agrees() const { return !first_divergence(); }
};

/// Borrows. `yardstick` is the reference in the candidate's precision; its own error is measured against `yardstick_truth`, or
/// `truth` where that is empty.
struct TraceSides {
  const TraceSource* candidate = nullptr;
  const TraceSource* truth = nullptr;
  const TraceSource* yardstick = nullptr;
  const TraceSource* yardstick_truth = nullptr;
};

/// required: every tensor of those kinds that the candidate recorded at all.
enum class Completeness : std::uint8_t { any_subset, required };

/// Every tensor that both sides have, whole:
///   err(x) = |x - truth| / |truth|;  bound = allowances * 4 max(err(yardstick), max(u_storage, u_sum sqrt(K)))
/// in L2 norms, u_sum being u_gradient for gradients of parameters and u_accumulate for all else. Gradients are divided by their
/// side's loss scale. Where |truth| is (nearly) zero, err is |x - truth| and the second term is multiplied by sqrt(n / total)
/// times the norm of all tensors of that kind (harness/verdict.h). Errors that a correct run accumulates along the depth are in
/// err(yardstick), which accumulates them likewise. attn.c_attn.bias is judged whole: the gradient of its query third is a small
/// difference of large terms, that of its key third zero, so that an error relative to either says little.
///
/// Throws InputError where no tensor is in both, and where a side contradicts itself.
[[nodiscard]] TraceComparison compare_traces(const TraceSides& sides, const TraceBounds& bounds,
                                             Completeness completeness = Completeness::any_subset);

/// compare_traces() of a complete record, for suites. A record made through TraceSinks has no gradients of parameters: append()
/// them to the recorder to have them compared too.
[[nodiscard]] std::optional<Divergence> first_divergence(const TraceSource& recorded, const TraceSource& truth,
                                                         const TraceSource* yardstick, const TraceBounds& bounds);

/// "layer 3, attn.c_proj, forward (h.3.attn.c_proj): rank 1, micro-batch 0, slice [...]: error ... is ... times the bound ..."
[[nodiscard]] std::string describe(const Divergence& divergence);
/// "agrees: ..." or "diverges: ..."; one line without a line break.
[[nodiscard]] std::string verdict_line(const TraceComparison& comparison);
/// The diverging tensors (at most `most_rows`), or the worst ones where there are none; what was not compared; the verdict.
[[nodiscard]] std::string render(const TraceComparison& comparison, TableStyle style, std::size_t most_rows);
[[nodiscard]] std::string to_json(const std::vector<TraceComparison>& comparisons);

}  // namespace tandem
