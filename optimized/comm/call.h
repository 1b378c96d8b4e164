// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/device_use.h"

namespace tandem {

class Group;  // group.h

enum class CallKind : std::uint8_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier, split };
[[nodiscard]] std::string_view name(CallKind kind);

/// What one rank asks of a collective. Read by the other ranks while the operation is under way.
struct Call {
  CallKind kind = CallKind::barrier;
  DType dtype = DType::u8;
  std::byte* input = nullptr;
  std::byte* output = nullptr;                 ///< all_reduce, broadcast: the same as input
  std::int64_t elements = 0;                   ///< all_reduce, broadcast
  std::vector<std::int64_t> counts{};          ///< reduce_scatter, all_gather: of each part; all_to_all: sent to each rank
  std::vector<std::int64_t> receive_counts{};  ///< all_to_all
  int root = -1;                               ///< broadcast
  int colour = 0;                              ///< split
  int key = 0;                                 ///< split
  CommOptions options{};
  std::int64_t issued_ns = 0;  ///< of background operations over several ranks: when the rank asked for it
  DeviceUse device{};          ///< empty: the buffers are the host's

  // Filled by the operation.
  std::shared_ptr<Group> new_group{};  ///< split
};

/// What `rank` reads and writes of the buffers of its call; the same bytes where it does both, and either may lie within the
/// other.
struct CallBuffers {
  std::span<std::byte> read, written;
};
[[nodiscard]] CallBuffers buffers_of(const Call& call, int rank);

/// "all_reduce 'bucket 2' of 100 fp32"
[[nodiscard]] std::string describe(const Call& call);

/// Bytes that `rank` sends by the count of the direct algorithm, which shared memory stands for. all_reduce over n ranks is a
/// reduce-scatter of n balanced parts (all but the own part are sent) and an all-gather (the own part is sent n - 1 times): 2 b
/// (n - 1) / n where n divides the elements.
[[nodiscard]] std::int64_t wire_bytes(const Call& call, int rank, int ranks);

/// What differs between the calls of two ranks, naming both; nothing when all calls match. `members` are world ranks.
[[nodiscard]] std::optional<std::string> find_mismatch(std::span<const Call* const> calls, std::span<const int> members);

/// The same of two calls, of the ranks `a` and `b` of the group.
[[nodiscard]] std::optional<std::string> find_mismatch(const Call& call_a, int a, const Call& call_b, int b,
                                                       std::span<const int> members);

/// Calls whose buffers do not all lie in one memory, where ranks work on each other's buffers; naming two ranks.
[[nodiscard]] std::optional<std::string> find_mixed_memory(std::span<const Call* const> calls, std::span<const int> members);

}  // namespace tandem
