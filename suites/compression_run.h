// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "suites/parallel_cases.h"

namespace tandem {

/// Training steps of the engine with compressed gradients, of which everything that is compressed is recorded.
struct CompressionScript {
  PairInputs inputs;  ///< `steps`: the step to stop before, and the length of the schedule
  /// Whether `rank` finds an infinite element in its reduced gradients. Empty: never.
  std::function<bool(int rank, std::int64_t step)> overflows = {};
  // Resume:
  std::int64_t first_step = 0;
  std::filesystem::path load = {};  ///< empty: from the start
  std::filesystem::path save = {};  ///< after the last step; empty: no
  bool record_tensors = true;       ///< false: losses, bytes and times alone
};

/// One tensor (or local part of one) of one rank.
struct CodedRecord {
  std::vector<float> before, after;  ///< gradient of this rank, and the sum that it got; empty before the first step
  std::vector<float> residual;       ///< after the step; empty: none
  std::vector<float> sum_residual;   ///< what this rank owns; NaN elsewhere; empty: none
};

struct CompressionStep {
  std::int64_t step = -1;
  double loss = 0;
  double loss_scale = 1;
  bool skipped = false;
  double seconds = 0;               ///< from when all ranks had finished the step before
  std::int64_t gradient_bytes = 0;  ///< that this rank sent
  std::map<std::string, CodedRecord> tensors;
  std::map<std::string, std::uint64_t> hashes;  ///< of parameters after the step, by name and slices
};

struct CompressionRun {
  std::vector<CompressionStep> start;               ///< [ranks] after loading
  std::vector<std::vector<CompressionStep>> steps;  ///< [ranks][steps run]
  double validation_loss = 0;                       ///< after the last step
};

/// With every transport: afterwards all processes have the records of all ranks.
[[nodiscard]] CompressionRun run_compressed(const CompressionScript& script, const RunContext& context);

/// A variant under a codec.
[[nodiscard]] PairInputs compressed_inputs(const ParallelVariant& variant, const CompressionConfig& compression,
                                           const RunContext& context);

// Properties. All read the run alone: none trusts what a codec says of itself.

/// Every step, rank and tensor: what a rank's residual has lost it has sent, what was sent is what all got, but for the sum's
/// residual. Worst error in units of the roundings that the law allows; of codes that are exact also elements that differ at all.
/// `order` is that in which a collective adds numbers (random_k): of ranks, which is repeated here, or another, where the sum is
/// known to rounding alone.
enum class SumOrder : std::uint8_t { ranks, other };
[[nodiscard]] std::vector<Property> conserved_each_step(const CompressionScript& script, const CompressionRun& run,
                                                        SumOrder order = SumOrder::ranks);
/// Over all steps of runs that continue each other (layouts may differ): applied sums + residuals at the end = gradients, by
/// global name, in the number of roundings.
[[nodiscard]] Property conserved_in_total(const std::vector<const CompressionScript*>& scripts,
                                          const std::vector<const CompressionRun*>& runs);
/// Sums, residuals and what is sent are those of reference/compressed_reduction.h, given the gradients of all ranks.
[[nodiscard]] std::vector<Property> as_the_reference(const CompressionScript& script, const CompressionRun& run);
/// Bytes are those of the formula, exactly, and by how much fewer than uncompressed.
[[nodiscard]] std::vector<Property> fewer_bytes(const CompressionScript& script, const CompressionRun& run, double ratio,
                                                const std::string& derivation);
/// Bytes are those that the step programs say, sums of copies over tensor ranks and pipeline ends included.
[[nodiscard]] Property bytes_as_programmed(const CompressionScript& script, const CompressionRun& run);
/// Copies of a parameter are equal on all ranks after every step.
[[nodiscard]] Property copies_agree(const CompressionRun& run);
/// Steps of `resumed` in which anything differs from the same step of `whole`: loss, sums, residuals, parameters.
[[nodiscard]] Property goes_on_bitwise(const CompressionRun& whole, const CompressionRun& resumed);

}  // namespace tandem
