// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "core/tensor.h"

namespace tandem {

/// [sum, L2 norm, max abs] of a whole tensor.
struct TensorSummary {
  double sum = 0.0;
  double l2_norm = 0.0;
  double max_abs = 0.0;
};

/// One tensor as a golden set stores it: whole, or every stride-th of its row-major elements.
struct GoldenTensor {
  Shape shape;                ///< of the whole tensor
  std::int64_t stride = 1;    ///< values[i] is element i * stride
  DType stored = DType::f64;  ///< f32 in some files: then the values carry that rounding
  std::vector<double> values;
  TensorSummary summary;  ///< always of the whole tensor
};

/// One result file of a set.
struct GoldenResults {
  std::string file;                             ///< "grads_step0", "params_stepK", ...
  std::map<std::string, GoldenTensor> tensors;  ///< by global name
  double float32_deviation = 0.0;               ///< worst tensor's relative L2 of the same program run in float32
};

/// A recorded training run to check an implementation against (format "gpt2-golden-1", results/golden/README.md).
struct GoldenSet {
  std::filesystem::path folder;
  std::string name;
  GptConfig model;
  OptimizerConfig optimizer;  ///< AdamW, constant learning rate
  std::int64_t steps = 0;
  std::int64_t micro_batches = 0;
  std::int64_t micro_batch_size = 0;  ///< rows of a micro-batch
  /// [steps] global batches: the rows of all micro-batches one after the other, micro_batches * micro_batch_size of them.
  std::vector<Batch> batches;
  std::map<std::string, std::vector<float>> initial_parameters;  ///< whole tensors

  std::vector<double> losses;             ///< [steps] of the parameters before update s, as are the norms
  std::vector<double> gradient_norms;     ///< [steps] before clipping
  std::vector<double> clip_coefficients;  ///< [steps]
  double loss_float32_deviation = 0.0;    ///< largest relative one of the same program run in float32
  double norm_float32_deviation = 0.0;

  GoldenResults gradients_step0;  ///< before clipping
  GoldenResults parameters_step1;
  GoldenResults parameters_last;
  GoldenResults first_moments_last;
  GoldenResults second_moments_last;
};

/// Reads and checks the set in `folder`. Throws InputError naming file and field where a file is missing, is not of this format,
/// or contradicts another one (shapes, token ranges, numbers of valid tokens), and where the set asks for something that tandem
/// cannot reproduce (another activation, decay of one-dimensional tensors, dropout).
[[nodiscard]] GoldenSet read_golden_set(const std::filesystem::path& folder);

/// How far `values` (all elements of the tensor `name`) lie from the expected ones: ||values - expected|| / ||expected||
/// over the elements that the set stores. The key third of `attn.c_attn.bias` is left out: its true gradient is zero, so that
/// what is stored there is rounding noise, which Adam turns into visible updates. Where ||expected|| is 0, the result is
/// ||values||. NaN where a value is NaN; throws ContractError where the number of values is not that of the shape.
template <class Real>
[[nodiscard]] double golden_deviation(const GoldenTensor& expected, std::string_view name, std::span<const Real> values);

/// Largest of the relative deviations of sum (relative to sqrt(n) * l2_norm, its largest possible value), L2 norm and max abs
/// of the whole tensor. The whole of `attn.c_attn.bias` is left out (the result is 0), for the reason above.
template <class Real>
[[nodiscard]] double golden_summary_deviation(const GoldenTensor& expected, std::string_view name, std::span<const Real> values);

}  // namespace tandem
