// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>

#include "core/batch_source.h"
#include "core/io/file_operations.h"
#include "core/tensor.h"
#include "optimized/engine/parameter_store.h"

/// What scripted faults do to numbers, files and batches. All of it is deterministic, so that a run with faults can be repeated.
namespace tandem {

/// subtle: the value grows, 2 to 2^64 times in fp32 and the more the smaller it was, and the run goes on: comparisons show it
/// fatal:  the top bit of the exponent: a value below 1 grows by 2^128 (fp64 2^1024, fp16 2^16), and nobody can overlook it
enum class FlipStrength : std::uint8_t { subtle, fatal };

/// Turns one bit of the exponent of one element: of the first, from the middle on and then around to the front, that is neither
/// zero (nor subnormal) nor 1 or more in magnitude, so that the result is finite too. subtle turns the highest bit below the top
/// one that is clear. Where all elements are zero or large it is the middle one's top bit (a zero becomes 2), or the one below
/// it where that would make infinity. Nothing for a tensor that has no elements or is not floating.
void turn_exponent_bit(TensorView values, FlipStrength strength) noexcept;

/// The middle element becomes a quiet NaN. Nothing for a tensor that has no elements or is not floating.
void put_nan(TensorView values) noexcept;

/// Which of the parts that this rank keeps is struck: the largest inside the blocks, the first of equal ones; where there is
/// none, the largest of all.
[[nodiscard]] const OwnedPart& part_to_strike(const ParameterStore& store);

/// The largest shard (the first of equal ones) of the newest step folder that has a manifest; empty where there is none.
[[nodiscard]] std::filesystem::path shard_to_corrupt(const std::filesystem::path& folder);
/// Turns one bit in the middle of a file. Throws IoError.
void turn_middle_bit(const std::filesystem::path& file);

/// A source whose batches of these indices are garbage: ids, and targets where they count, are drawn uniformly from the
/// vocabulary, a function of batch, row and place. Everything else, the identity included, is that of `inner`, which is borrowed.
[[nodiscard]] std::unique_ptr<BatchSource> make_poisoned(const BatchSource& inner, std::set<std::int64_t> batches);

/// File operations that refuse to write while `is_full` says so, as a full disk does. Borrows both arguments.
[[nodiscard]] std::unique_ptr<FileOperations> make_disk(FileOperations& inner, const std::atomic<bool>& is_full);

}  // namespace tandem
