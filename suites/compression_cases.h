// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "suites/compression_run.h"

namespace tandem {

/// Parts of the suite; docs/techniques/compression.md.
void add_compression_size_cases(CaseList& cases);         ///< odd sizes and worlds, wide indices, without the engine
void add_compression_resume_cases(CaseList& cases);       ///< checkpoints, other buckets, other layouts
void add_compression_convergence_cases(CaseList& cases);  ///< what error feedback is for
void add_compression_time_cases(CaseList& cases);         ///< when it pays

/// Bytes of the gradients that are summed in time, without a code.
inline constexpr double kTimedSumBytes = 4.0 * 1024 * 1024 * 4;

/// "compression/NAME" with model and plan of `shown` under a codec.
[[nodiscard]] Case compression_case(const std::string& name, const std::string& summary, const ParallelVariant& shown,
                                    const CompressionConfig& compression, bool quick = true);

/// A codec with its options as the suite uses them: blocks of 64, a twentieth of the elements, rank 2.
[[nodiscard]] CompressionConfig compression_of(const std::string& codec, bool error_feedback = true);

}  // namespace tandem
