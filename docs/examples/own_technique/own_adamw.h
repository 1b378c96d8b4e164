// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/forwarding_kernels.h"

namespace own {

enum class AdamWBug {
  none,
  bias_correction,  ///< of the second moment is forgotten: a factor that tends to one, so that nobody sees it later
  gradient_scale    ///< the clip coefficient is not applied
};

/// AdamW of one's own for fp32 (kernels/kernels.h, core/optimizer_config.h say what it must do); all other operations are those
/// of the kernels below: a stand-in for the fused optimizer, or the attention, that you would judge.
class OwnAdamW final : public tandem::ForwardingKernels {
 public:
  using Calls = std::shared_ptr<std::atomic<std::int64_t>>;
  OwnAdamW(std::unique_ptr<tandem::Kernels> inner, AdamWBug bug, Calls calls)
      : ForwardingKernels(std::move(inner)), bug_(bug), calls_(std::move(calls)) {}

  void adamw(const tandem::AdamWStep& step, tandem::TensorView gradient, tandem::TensorView parameter, tandem::TensorView m,
             tandem::TensorView v, tandem::TensorView stored) override;

 private:
  AdamWBug bug_;
  Calls calls_;
};

}  // namespace own
