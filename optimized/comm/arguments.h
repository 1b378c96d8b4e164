// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "core/tensor.h"

namespace tandem {

/// What the arguments of one rank's call must satisfy whatever carries it out (Communicator); ContractError where they do not.
void check_reduce_scatter(TensorView input, TensorView output, std::span<const std::int64_t> counts, int rank, int ranks);
void check_all_gather(TensorView input, TensorView output, std::span<const std::int64_t> counts, int rank, int ranks);
void check_all_to_all(TensorView input, std::span<const std::int64_t> send_counts, TensorView output,
                      std::span<const std::int64_t> receive_counts, int ranks);
void check_root(int root, int ranks);
void check_peer(int peer, int ranks);

}  // namespace tandem
