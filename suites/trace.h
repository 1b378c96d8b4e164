// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/io/trace_file.h"
#include "core/io/trace_file_reader.h"
#include "harness/trace_compare.h"
#include "harness/trace_compare_recorder.h"
#include "reference/gpt.h"

namespace tandem {

/// Told, while a reference runs, how many of its tensors are done. Empty: nobody is told.
using TraceProgress = std::function<void(std::int64_t done, std::int64_t total, const std::string& what)>;

/// What one traced step starts from.
struct TracedStep {
  GptConfig model;
  reference::NamedTensors<double> parameters;  ///< whole, before the step
  Batch batch;                                 ///< the global batch
  std::optional<reference::DropoutStep> dropout = {};
  std::int64_t step = 0;
  TraceProgress progress = {};
};

/// Which reference runs.
enum class ReferenceSide : std::uint8_t {
  truth,     ///< in double
  yardstick  ///< in float; for a 16-bit precision, activations and parameters rounded to it as they come to rest; fp64: the truth
             ///< again
};

/// Everything but the entries of a trace that the reference makes of `step`; `precision` is that of a yardstick.
[[nodiscard]] TraceHeader reference_header(const TracedStep& step, ReferenceSide side, DType precision = DType::f32);

/// Runs the reference and hands over every activation, gradient of one and, at the end, gradient of a parameter, whole. Returns
/// the loss. Throws InputError where tokens or parameters do not fit the model.
double run_traced_reference(const TracedStep& step, ReferenceSide side, DType precision, const TraceConsumer& consumer);

/// The same in memory, for suites.
[[nodiscard]] std::unique_ptr<TraceRecorder> record_reference(const TracedStep& step, ReferenceSide side,
                                                              DType precision = DType::f32);

/// What a trace starts from. Throws InputError where it carries no weights, not all of them, or no batch, and where its dropout
/// masks are those of another program.
[[nodiscard]] TracedStep traced_step(const TraceReader& trace);
/// The reason why traced_step() would throw, or nothing.
[[nodiscard]] std::optional<std::string> reason_not_traceable(const TraceReader& trace);

/// Writes the reference's trace for the weights, batch and dropout masks that `trace` carries; these go with it.
void write_reference_trace(const TraceReader& trace, const std::filesystem::path& folder, const TraceProgress& progress = {});
/// Writes `trace` with every tensor whole. Returns notes (replicas that differ).
std::vector<std::string> write_merged_trace(const TraceReader& trace, const std::filesystem::path& folder);

/// `trace` against the reference made of its own weights and batch, with the yardstick in its precision.
[[nodiscard]] TraceComparison compare_with_own_reference(const TraceReader& trace, const TraceProgress& progress = {});

/// `a` against `b`. Where one is a reference trace, it is the truth. Where neither is, `b` stands for it, each side may lie off
/// by a whole bound of the coarser precision, and the initial parameters are compared too. The yardstick is made on the fly where
/// one of the two carries weights and batch.
[[nodiscard]] TraceComparison compare_two_traces(const TraceReader& a, const TraceReader& b, const TraceProgress& progress = {});

}  // namespace tandem
