// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/cluster.h"
#include "core/model_shape.h"
#include "core/pipeline_layout.h"
#include "core/plan.h"

namespace tandem {

/// What a training stack does that a plan does not say: facts of a published run's software, not constants to be fitted.
struct SoftwareTraits {
  bool fused_attention = true;           ///< no [T, T] matrix in memory (FlashAttention); otherwise materialized
  bool fused_elementwise = true;         ///< bias, dropout, residual, activation and norm in one pass each
  bool overlap_gradients = true;         ///< data-parallel sums behind the backward pass
  bool overlap_parameters = true;        ///< gathers (ZeRO 3; of the distributed optimizer) behind computing
  bool overlap_tensor = false;           ///< tensor-parallel communication in pieces behind products
  bool scatter_gather_pipeline = false;  ///< messages between stages cut over the tensor ranks
  std::string optimizer = "adam_fp32";   ///< moments and master in fp32; "adam_bf16": moments in 16 bits
  /// Operand type of the linear layers' products where it is not the plan's precision: fp8, mxfp8, nvfp4; empty: the plan's.
  std::string product_dtype = {};
  double host_offload_share = 0;  ///< of activations kept in host memory
  /// What recompute mode `selective` makes again. attention: its core, between the products around it (Korthikanti et al.;
  /// nothing where attention is fused, which keeps no more than its output anyway); norms: outputs of norms and of the activation
  /// function (the engine's); products: everything but every other product of a block (TorchTitan).
  std::string selective = "attention";
  /// Of the logits: fp32: they are kept in fp32, their gradient in 16 bits (Megatron-LM); fused: 16 bits, which their gradient
  /// replaces; unfused: each operation of the loss leaves a copy in fp32 (PyTorch's own).
  std::string loss = "fp32";
  /// That the stack keeps besides what the plan says (16-bit gradients beside fp32 sums: 2).
  double extra_bytes_per_parameter = 0;
  int recomputed_layers = 0;       ///< of the model, that recompute mode `full` concerns; 0: all
  bool cuda_graphs = false;        ///< kernels are launched by replaying a recording: the host does not hold them up
  bool overlap_pipeline = false;   ///< ranks compute while their messages to neighbouring stages are under way
  bool tuned_attention = true;     ///< fused attention written for this device's generation, not carried over from the one before
  bool fused_accumulation = true;  ///< products add to the sums of gradients themselves, no pass of its own per micro-batch does
  /// ZeRO 2 and 3 sum gradients over the data ranks after every micro-batch (the engine, FSDP); otherwise once a step, of sums
  /// that each rank keeps whole until then.
  bool scatter_each_micro_batch = true;
  bool gather_products = false;  ///< ZeRO 3 gathers parameters in the products' operand type
};

/// One training step to be predicted.
struct Workload {
  ModelShape model;
  TrainingPlan plan;  ///< parallel degrees, batch (rows, micro_batches), pipeline, zero_stage, recompute, precision, rank_order
  std::int64_t sequence = 0;  ///< tokens per row; 0: the model's
  SoftwareTraits software;

  [[nodiscard]] std::int64_t tokens_per_row() const noexcept { return sequence > 0 ? sequence : model.sequence; }
};

/// Empty: it can be simulated. Otherwise what does not fit together (degrees against heads, layers, rows, kinds of schedule).
[[nodiscard]] std::vector<Conflict> conflicts(const Workload& workload);
/// Throws InputError with every conflict in one line.
void require_possible(const Workload& workload);

/// Where its layers lie (core/pipeline_layout.h); stages that are listed may be without layers, where embedding or head alone are
/// one.
[[nodiscard]] PipelineLayout pipeline_layout(const Workload& workload);
/// Rows of a data rank's largest micro-batch.
[[nodiscard]] std::int64_t micro_batch_rows(const TrainingPlan& plan);

}  // namespace tandem
