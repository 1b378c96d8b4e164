// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_steps.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "core/batch.h"
#include "core/error.h"

namespace tandem {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

std::optional<ncclDataType_t> summed_type(DType dtype) {
  switch (dtype) {
    case DType::f64: return ncclFloat64;
    case DType::f32: return ncclFloat32;
    case DType::f16: return ncclFloat16;
    case DType::bf16: return ncclBfloat16;
    case DType::i64: return ncclInt64;
    case DType::i32: return ncclInt32;
    case DType::i8: return ncclInt8;
    case DType::u8: return ncclUint8;
    case DType::i16:
    case DType::u16: break;
  }
  return std::nullopt;
}

// A step of one rank, with what all its parts need.
class Step {
 public:
  Step(const NcclFunctions& nccl, const Call& call, int rank, int ranks, const NcclBuffers& buffers, const NcclUse& use)
      : nccl_(nccl), call_(call), rank_(rank), ranks_(ranks), buffers_(buffers), use_(use), width_(size_bytes(call.dtype)) {}

  void all_reduce() const {
    require(nccl_.all_reduce(buffers_.input, buffers_.output, static_cast<std::size_t>(call_.elements), type(), ncclSum,
                             use_.comm, use_.stream),
            "ncclAllReduce");
  }

  void broadcast() const { move_from(call_.root, buffers_.input, buffers_.output, call_.elements); }

  void reduce_scatter() const {
    const std::size_t own = static_cast<std::size_t>(call_.counts[at(rank_)]);
    if (has_equal_parts()) {
      require(nccl_.reduce_scatter(buffers_.input, buffers_.output, own, type(), ncclSum, use_.comm, use_.stream),
              "ncclReduceScatter");
      return;
    }
    in_group([&] {
      std::int64_t begin = 0;
      for (int root = 0; root < ranks_; ++root) {
        const std::int64_t count = call_.counts[at(root)];
        if (count > 0) {
          require(nccl_.reduce(input_at(begin), root == rank_ ? buffers_.output : nullptr, static_cast<std::size_t>(count),
                               type(), ncclSum, root, use_.comm, use_.stream),
                  "ncclReduce");
        }
        begin += count;
      }
    });
  }

  // `input` is this rank's own part; null: it lies at its place in output.
  void all_gather(const std::byte* input, const std::vector<std::int64_t>& counts) const {
    if (has_equal(counts)) {
      const std::byte* const own = input != nullptr ? input : output_at(begin_of(counts, rank_));
      require(nccl_.all_gather(own, buffers_.output, bytes(counts[0]), ncclUint8, use_.comm, use_.stream), "ncclAllGather");
      return;
    }
    in_group([&] {
      for (int root = 0; root < ranks_; ++root) {
        std::byte* const part = output_at(begin_of(counts, root));
        if (counts[at(root)] > 0) move_from(root, root == rank_ && input != nullptr ? input : part, part, counts[at(root)]);
      }
    });
  }

  void all_to_all() const {
    in_group([&] {
      for (int peer = 0; peer < ranks_; ++peer) {
        send(input_at(begin_of(call_.counts, peer)), call_.counts[at(peer)], peer);
        receive(output_at(begin_of(call_.receive_counts, peer)), call_.receive_counts[at(peer)], peer);
      }
    });
  }

  // The others' parts of what this rank sums up come to lie one after the other, without its own.
  void exchange_parts(const std::vector<std::int64_t>& counts) const {
    in_group([&] {
      for (int peer = 0; peer < ranks_; ++peer) {
        if (peer == rank_) continue;
        send(input_at(begin_of(counts, peer)), counts[at(peer)], peer);
        receive(part_of(peer, counts), counts[at(rank_)], peer);
      }
    });
  }

  void sum_parts(const std::vector<std::int64_t>& counts, std::byte* to) const {
    std::vector<const std::byte*> sources;
    for (int peer = 0; peer < ranks_; ++peer) {
      sources.push_back(peer == rank_ ? input_at(begin_of(counts, rank_)) : part_of(peer, counts));
    }
    std::byte* const destinations[] = {to};
    if (counts[at(rank_)] > 0) use_.lane.sum_in_order(call_.dtype, sources, destinations, counts[at(rank_)]);
  }

  [[nodiscard]] std::byte* own_output(const std::vector<std::int64_t>& counts) const {
    return output_at(begin_of(counts, rank_));
  }

 private:
  static bool has_equal(const std::vector<std::int64_t>& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](std::int64_t count) { return count == counts[0]; });
  }
  static std::int64_t begin_of(const std::vector<std::int64_t>& counts, int index) {
    return std::accumulate(counts.begin(), counts.begin() + index, std::int64_t{0});
  }

  [[nodiscard]] bool has_equal_parts() const { return has_equal(call_.counts); }
  [[nodiscard]] ncclDataType_t type() const { return summed_type(call_.dtype).value(); }
  [[nodiscard]] std::size_t bytes(std::int64_t elements) const { return static_cast<std::size_t>(elements) * width_; }
  [[nodiscard]] const std::byte* input_at(std::int64_t element) const { return buffers_.input + bytes(element); }
  [[nodiscard]] std::byte* output_at(std::int64_t element) const { return buffers_.output + bytes(element); }
  [[nodiscard]] std::byte* part_of(int peer, const std::vector<std::int64_t>& counts) const {
    return buffers_.parts + bytes(counts[at(rank_)] * (peer < rank_ ? peer : peer - 1));
  }

  void require(ncclResult_t result, const char* what) const { require_nccl(nccl_, result, what, use_.comm); }

  template <class Calls>
  void in_group(const Calls& calls) const {
    require(nccl_.group_start(), "ncclGroupStart");
    try {
      calls();
    } catch (...) {
      static_cast<void>(nccl_.group_end());  // the thread must come out of the group
      throw;
    }
    require(nccl_.group_end(), "ncclGroupEnd");
  }

  void move_from(int root, const std::byte* from, std::byte* to, std::int64_t count) const {
    require(nccl_.broadcast(from, to, bytes(count), ncclUint8, root, use_.comm, use_.stream), "ncclBroadcast");
  }
  void send(const std::byte* from, std::int64_t count, int peer) const {
    if (count > 0) require(nccl_.send(from, bytes(count), ncclUint8, peer, use_.comm, use_.stream), "ncclSend");
  }
  void receive(std::byte* to, std::int64_t count, int peer) const {
    if (count > 0) require(nccl_.recv(to, bytes(count), ncclUint8, peer, use_.comm, use_.stream), "ncclRecv");
  }

  const NcclFunctions& nccl_;
  const Call& call_;
  const int rank_, ranks_;
  const NcclBuffers& buffers_;
  const NcclUse& use_;
  const std::size_t width_;
};

// Whose part of a sum is how large, where every rank adds up its own.
std::vector<std::int64_t> part_counts(const Call& call, int ranks) {
  if (call.kind != CallKind::all_reduce) return call.counts;
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back(balanced_part(call.elements, ranks, rank).size());
  return counts;
}

bool issue_in_rank_order(const Step& issue, const Call& call, int ranks, const NcclBuffers& buffers, int step) {
  const std::vector<std::int64_t> counts = part_counts(call, ranks);
  if (step == 0) {
    issue.exchange_parts(counts);
  } else if (step == 1 && call.kind == CallKind::reduce_scatter) {
    issue.sum_parts(counts, buffers.output);
  } else if (step == 1) {
    issue.sum_parts(counts, issue.own_output(counts));
    issue.all_gather(nullptr, counts);
  }
  return step <= 1;
}

}  // namespace

bool is_in_rank_order(const Call& call) noexcept {
  return call.options.algorithm == CollectiveAlgorithm::direct &&
         (call.kind == CallKind::all_reduce || call.kind == CallKind::reduce_scatter);
}

std::int64_t parts_bytes(const Call& call, int rank, int ranks) {
  if (!is_in_rank_order(call)) return 0;
  return part_counts(call, ranks)[at(rank)] * (ranks - 1) * static_cast<std::int64_t>(size_bytes(call.dtype));
}

void require_possible(const Call& call) {
  const auto& algorithm = call.options.algorithm;
  TANDEM_CHECK(!algorithm || *algorithm == CollectiveAlgorithm::automatic || *algorithm == CollectiveAlgorithm::direct,
               fmt::format("{}: NCCL chooses its algorithms itself, but for direct", describe(call)));
  if (call.kind != CallKind::all_reduce && call.kind != CallKind::reduce_scatter) return;
  TANDEM_CHECK(summed_type(call.dtype).has_value(), fmt::format("{}: NCCL has no sums of {}", describe(call), name(call.dtype)));
}

bool issue_collective(const NcclFunctions& nccl, const Call& call, int rank, int ranks, const NcclBuffers& buffers,
                      const NcclUse& use, int step) {
  const Step issue(nccl, call, rank, ranks, buffers, use);
  if (is_in_rank_order(call)) return issue_in_rank_order(issue, call, ranks, buffers, step);
  if (step > 0) return false;
  switch (call.kind) {
    case CallKind::all_reduce: issue.all_reduce(); break;
    case CallKind::reduce_scatter: issue.reduce_scatter(); break;
    case CallKind::all_gather: issue.all_gather(buffers.input, call.counts); break;
    case CallKind::all_to_all: issue.all_to_all(); break;
    case CallKind::broadcast: issue.broadcast(); break;
    case CallKind::barrier:
    case CallKind::split: throw ContractError(fmt::format("{} is no operation of NCCL", name(call.kind)));
  }
  return true;
}

}  // namespace tandem
