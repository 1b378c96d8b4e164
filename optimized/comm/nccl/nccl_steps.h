// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "optimized/comm/call.h"
#include "optimized/comm/nccl/nccl_functions.h"
#include "optimized/comm/nccl/nccl_operation.h"

namespace tandem {

/// Where a collective's bytes lie on the device.
struct NcclBuffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::byte* parts = nullptr;  ///< parts_bytes() of them
};

/// Sums by NCCL have its own order: the same bits on every rank, and in every run as long as it chooses the same algorithm;
/// 16-bit floats are rounded after every addition. CommOptions::algorithm = direct asks for sums in the order of ranks instead:
/// every rank gets its part of all inputs and adds them up itself (Memory::sum_in_order).
[[nodiscard]] bool is_in_rank_order(const Call& call) noexcept;
/// Of the memory that such a sum needs for the others' parts.
[[nodiscard]] std::int64_t parts_bytes(const Call& call, int rank, int ranks);

/// Throws ContractError where NCCL cannot carry the call out: a sum of a dtype that it has not, an algorithm that it cannot be
/// told.
void require_possible(const Call& call);

/// Issues step number `step` of the collective (NcclOperation::issue()).
///
///   all_reduce      ncclAllReduce
///   reduce_scatter  ncclReduceScatter; of unequal parts one ncclReduce to each rank, in a group
///   all_gather      ncclAllGather; of unequal parts one ncclBroadcast from each rank, in a group
///   all_to_all      ncclSend and ncclRecv in a group
///   broadcast       ncclBroadcast
///
/// barrier and split are not among them: they are made of these.
[[nodiscard]] bool issue_collective(const NcclFunctions& nccl, const Call& call, int rank, int ranks, const NcclBuffers& buffers,
                                    const NcclUse& use, int step);

}  // namespace tandem
