// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/gpu_peaks.h"
#include "core/own_parts.h"
#include "core/plan.h"
#include "kernels/kernels.h"

namespace tandem {

/// What a rank computes on.
struct MachineChoice {
  std::string backend = "cpu";  ///< "cpu", "cuda", "simt"
  PitfallSet pitfalls = {};
  int device = 0;  ///< of a GPU, of those that CUDA_VISIBLE_DEVICES leaves
  /// Of a GPU: gelu within the matrix product where that is faster. Its bits are then not those of a gelu that is computed again
  /// alone, as selective recomputation does.
  bool fuse_gelu = false;
  std::shared_ptr<const OwnParts> own_parts = {};  ///< whose kernels stand around those; null: nobody's
};

/// The kernels that a rank of this plan computes with. Throws InputError where the backend is not available here.
[[nodiscard]] std::unique_ptr<Kernels> make_kernels(const TrainingPlan& plan, const MachineChoice& choice);
/// On the CPU.
[[nodiscard]] std::unique_ptr<Kernels> make_kernels(const TrainingPlan& plan, const PitfallSet& pitfalls = {});

/// Throws InputError where the backend is not available here, in one line that names --backend and says what else there is.
void require_backend(const std::string& backend);

/// The GPU that ranks of this process compute on: the one that it communicates with where `transport` is nccl (joins the job),
/// else the first.
[[nodiscard]] int device_of(const std::string& transport);

/// What the kernels run on here, and what they fell back from.
[[nodiscard]] KernelsInfo machine_kernels(const MachineChoice& choice = {});

/// Measured fp32 matrix-product peak in FLOP/s with 1, 2, ... threads, up to the number of cores (at most 8). About a second
/// each.
[[nodiscard]] std::vector<double> matrix_peaks_by_threads();

/// About a second, and 3 GiB of the GPU's memory. Nothing of another backend than cuda: an emulated GPU has no peak. With
/// transport nccl one of this process's job, which it joins.
[[nodiscard]] std::optional<GpuPeaks> measure_gpus(const std::string& backend, const std::string& transport);

}  // namespace tandem
