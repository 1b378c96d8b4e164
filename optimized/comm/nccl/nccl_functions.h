// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>

#include <memory>
#include <string>

namespace tandem {

/// The functions that are used of libnccl.so.2, with the types of nccl.h. A null pointer is a function that the library found
/// does not have; only those that the comment names as optional may be missing.
struct NcclFunctions {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;  // optional
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommSplit) split = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommRegister) register_buffer = nullptr;      // optional
  decltype(&ncclCommDeregister) deregister_buffer = nullptr;  // optional
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclReduce) reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
};

/// The library is found when the program runs, so that one build serves machines with and without it; it stays loaded as long as
/// somebody has the result. Null where it is not there or too old; `why_not` (may be null) then says so in one line.
[[nodiscard]] std::shared_ptr<const NcclFunctions> open_nccl(const std::string& library = "libnccl.so.2",
                                                             std::string* why_not = nullptr);

/// The first that is missing of those that must be there; empty: none.
[[nodiscard]] std::string find_missing(const NcclFunctions& functions);

/// Throws GpuError naming `what`, what NCCL calls the result and what it said last; not where it is success or "in progress".
/// `comm` may be null.
void require_nccl(const NcclFunctions& functions, ncclResult_t result, const std::string& what, ncclComm_t comm);

/// 2.28.9 of 22809.
[[nodiscard]] std::string version_text(int version);

}  // namespace tandem
