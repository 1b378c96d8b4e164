// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optimized/scaling/cost_model.h"

namespace tandem {

/// What one pass of one micro-batch through something takes on its rank, split by what the rank does. Communication counts where
/// nothing hides it.
struct PassSeconds {
  double compute = 0;
  double recompute = 0;
  double tensor = 0, context = 0, expert = 0;
  double data = 0;    ///< waiting for gathered parameters or scattered gradients (ZeRO 2 and 3)
  double hidden = 0;  ///< communication that went on behind computing; no part of the total
  [[nodiscard]] double total() const noexcept { return compute + recompute + tensor + context + expert + data; }
  PassSeconds& operator+=(const PassSeconds& other);
  [[nodiscard]] PassSeconds times(double count) const;
};

/// Forward and backward. The backward pass is split as the schedules do: what the previous stage waits for (recomputation
/// belongs to it) and the gradients of the matrices.
struct PassTriple {
  PassSeconds forward, backward_input, backward_weight;
  PassTriple& operator+=(const PassTriple& other);
  [[nodiscard]] PassTriple times(double count) const;
};

/// Bytes that an optimizer step moves for each parameter whose gradient has `gradient_bytes`: norm and update read it; master
/// weight and two moments are read and written; the parameter in 16 bits is written.
[[nodiscard]] double update_bytes_of_parameter(const std::string& optimizer, double gradient_bytes);

/// Prices the parts of a model for one micro-batch on one rank.
class LayerCost {
 public:
  /// Both must outlive it. `contention_ignored`: a fault (GroupPlacement::alone).
  LayerCost(const Workload& workload, const CostModel& costs, bool contention_ignored = false);

  /// One block; recomputed as the plan's mode says, or not.
  [[nodiscard]] PassTriple layer(bool recomputed) const;
  [[nodiscard]] PassTriple embedding() const;
  /// Final norm, logits and loss.
  [[nodiscard]] PassTriple head() const;

  /// Elements of parameters on one rank, whole over the data ranks.
  [[nodiscard]] double layer_parameters() const noexcept { return layer_parameters_; }
  [[nodiscard]] double embedding_parameters() const noexcept;
  [[nodiscard]] double head_parameters() const noexcept;
  /// Bytes that one rank sends over a stage boundary for a micro-batch.
  [[nodiscard]] double boundary_bytes() const noexcept;
  /// Bytes of an element of the gradient sums.
  [[nodiscard]] double gradient_bytes() const noexcept { return gradient_bytes_; }
  /// Vocabulary of one rank: padded so that every rank's part is a multiple of 128.
  [[nodiscard]] double vocabulary_part() const noexcept;

  [[nodiscard]] const GroupPlacement& tensor_group() const noexcept { return tensor_group_; }
  [[nodiscard]] const GroupPlacement& gradient_group() const noexcept { return gradient_group_; }

  /// Computing of one layer's parts, products apart: what the step programs' operations are priced by, too (replay.h cost_on).
  struct Work {
    double seconds = 0, kernels = 0;
  };
  [[nodiscard]] Work attention(bool backward) const;
  [[nodiscard]] Work norms(bool backward) const;  ///< both
  [[nodiscard]] Work activation(bool backward) const;
  [[nodiscard]] Work residuals(bool backward) const;  ///< both, with bias and dropout

 private:
  struct Product {
    double inner, outer;  // [tokens, inner] x [inner, outer]
  };
  [[nodiscard]] Work products(bool input_gradient, bool weight_gradient) const;
  [[nodiscard]] Work product(double m, double n, double k) const;
  [[nodiscard]] Work casts(bool backward) const;
  [[nodiscard]] Work recomputed_work() const;
  [[nodiscard]] PassSeconds communicate(const Work& products, const Work& attention, bool backward) const;
  [[nodiscard]] double floor_of_host(const Work& work, double communication = 0) const;
  void wait_for_parameters(PassSeconds& pass, double parameters, bool gradients, bool gather) const;
  void overlap(double communication, double computing, double& exposed, double& hidden, double share = 1) const;

  const Workload& workload_;
  const CostModel& costs_;
  const ModelShape& model_;
  double rows_, sequence_, tokens_;  // of a micro-batch; of a row and of all rows on this context rank
  double tensor_, width_, key_value_width_, mlp_width_;
  double gradient_bytes_, layer_parameters_ = 0;
  std::string product_dtype_, dtype_;
  std::vector<Product> products_;
  GroupPlacement tensor_group_, context_group_, gradient_group_, expert_group_;
};

}  // namespace tandem
