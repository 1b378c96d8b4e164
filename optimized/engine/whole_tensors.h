// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/plan.h"
#include "optimized/comm/communicator.h"
#include "optimized/engine/parameter_store.h"

namespace tandem {

/// A whole tensor put together from the shards of all ranks. Owns its bytes unless a rank holds it whole.
struct WholeTensor {
  std::string name;
  TensorView values;
  std::vector<std::byte> memory;
};

/// Puts the tensors that `view` gives of every parameter together on rank 0, in definition order: from each part's first replica.
/// Collective over `world`; other ranks get nothing. A tensor that rank 0 keeps whole in the host's memory is lent from the
/// store, not copied.
[[nodiscard]] std::vector<WholeTensor> gather_whole_tensors(Communicator& world, const GptConfig& model, const TrainingPlan& plan,
                                                            const ParameterStore& store, PartView view);

}  // namespace tandem
