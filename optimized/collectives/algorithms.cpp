// SPDX-License-Identifier: Apache-2.0
#include "optimized/collectives/algorithms.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/collectives/families.h"

namespace tandem {
namespace {

using Algorithm = CollectiveAlgorithm;
using collectives::Members;
using collectives::Parts;

constexpr std::size_t kSmallMessageBytes = 256;

// The algorithm that really carries the operation out.
Algorithm resolved(Algorithm algorithm, CollectiveKind kind) {
  TANDEM_CHECK(algorithm != Algorithm::automatic, "automatic must be resolved by choose_algorithm first");
  return supports(algorithm, kind) ? algorithm : Algorithm::direct;
}

std::int64_t size_of(std::span<const std::byte> bytes) { return static_cast<std::int64_t>(bytes.size()); }

void require_parts(const Members& members, const Parts& parts, std::span<const std::byte> whole, std::span<const std::byte> own) {
  TANDEM_CHECK(parts.size() == members.size(), fmt::format("{} counts for {} ranks", parts.size(), members.size()));
  TANDEM_CHECK(parts.bytes() == size_of(whole), fmt::format("parts of {} bytes, whole of {}", parts.bytes(), whole.size()));
  const std::int64_t expected = parts.bytes(members.place(), members.place() + 1);
  TANDEM_CHECK(expected == size_of(own), fmt::format("part of {} bytes, buffer of {}", expected, own.size()));
}

// A protocol for small messages whose flag is seen before its data: the last rank is left with what it had.
class StaleSmallMessage {
 public:
  StaleSmallMessage(const Peers& peers, std::span<std::byte> data) : data_(data) {
    if (!peers.planted(Pitfall::small_message_protocol_stale) || data.size() > kSmallMessageBytes) return;
    if (peers.rank() == peers.size() - 1) stale_.assign(data.begin(), data.end());
  }
  StaleSmallMessage(const StaleSmallMessage&) = delete;
  StaleSmallMessage& operator=(const StaleSmallMessage&) = delete;
  ~StaleSmallMessage() { std::ranges::copy(stale_, data_.begin()); }

 private:
  std::span<std::byte> data_;
  std::vector<std::byte> stale_;
};

}  // namespace

bool supports(CollectiveAlgorithm algorithm, CollectiveKind kind) noexcept {
  switch (algorithm) {
    case Algorithm::automatic:
    case Algorithm::direct: return true;
    case Algorithm::ring:
    case Algorithm::hierarchical: return kind != CollectiveKind::all_to_all;
    case Algorithm::recursive: return kind != CollectiveKind::all_to_all && kind != CollectiveKind::broadcast;
    case Algorithm::tree: return kind == CollectiveKind::all_reduce || kind == CollectiveKind::broadcast;
  }
  return false;
}

void all_reduce(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<std::byte> data) {
  const Members members(peers);
  if (members.size() == 1) return;
  const StaleSmallMessage stale(peers, data);
  switch (resolved(algorithm, CollectiveKind::all_reduce)) {
    case Algorithm::ring: return collectives::ring_all_reduce(members, dtype, data, peers.scratch(size_of(data)));
    case Algorithm::recursive: return collectives::recursive_all_reduce(members, dtype, data, peers.scratch(size_of(data)));
    case Algorithm::tree:
      collectives::tree_reduce(members, dtype, data, peers.scratch(size_of(data)));
      return collectives::tree_broadcast(members, data, 0);
    case Algorithm::hierarchical: return collectives::hierarchical_all_reduce(peers, dtype, data, peers.scratch(size_of(data)));
    default: break;
  }
  const Parts parts = Parts::even(size_of(data) / static_cast<std::int64_t>(size_bytes(dtype)), members.size(), dtype);
  const std::span<std::byte> own = parts.of(data, members.place());
  const std::span<std::byte> scratch = peers.scratch(collectives::direct_scratch_bytes(members, parts));
  collectives::direct_reduce_scatter(members, parts, data, own, scratch);
  collectives::direct_all_gather(members, parts, own, data);
}

void reduce_scatter(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<const std::byte> input,
                    std::span<std::byte> output, std::span<const std::int64_t> counts) {
  const Members members(peers);
  const Parts parts(counts, dtype);
  require_parts(members, parts, input, output);
  switch (resolved(algorithm, CollectiveKind::reduce_scatter)) {
    case Algorithm::ring: return collectives::ring_reduce_scatter(members, parts, input, output, peers.scratch(size_of(input)));
    case Algorithm::recursive:
      return collectives::recursive_reduce_scatter(members, parts, input, output, peers.scratch(2 * size_of(input)));
    case Algorithm::hierarchical:
      return collectives::hierarchical_reduce_scatter(peers, parts, input, output, peers.scratch(2 * size_of(input)));
    default: break;
  }
  const std::span<std::byte> scratch = peers.scratch(collectives::direct_scratch_bytes(members, parts));
  collectives::direct_reduce_scatter(members, parts, input, output, scratch);
}

void all_gather(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<const std::byte> input,
                std::span<std::byte> output, std::span<const std::int64_t> counts) {
  const Members members(peers);
  const Parts parts(counts, dtype);
  require_parts(members, parts, output, input);
  switch (resolved(algorithm, CollectiveKind::all_gather)) {
    case Algorithm::ring: collectives::ring_all_gather(members, parts, input, output); break;
    case Algorithm::recursive: collectives::recursive_all_gather(members, parts, input, output); break;
    case Algorithm::hierarchical:
      collectives::hierarchical_all_gather(peers, parts, input, output, peers.scratch(size_of(output)));
      break;
    default: collectives::direct_all_gather(members, parts, input, output); break;
  }
  if (peers.planted(Pitfall::collective_parts_swapped) && parts.size() > 1) {
    // Laid out as they arrived, not as the ranks are numbered.
    const std::span<std::byte> both = parts.of(output, 0, 2);
    std::ranges::rotate(both, both.begin() + static_cast<std::ptrdiff_t>(parts.bytes(0, 1)));
  }
}

void all_to_all(Peers& peers, CollectiveAlgorithm algorithm, DType dtype, std::span<const std::byte> input,
                std::span<const std::int64_t> send_counts, std::span<std::byte> output,
                std::span<const std::int64_t> receive_counts) {
  const Members members(peers);
  const Parts sent(send_counts, dtype);
  const Parts received(receive_counts, dtype);
  TANDEM_CHECK(sent.size() == members.size() && received.size() == members.size(),
               fmt::format("{} and {} counts for {} ranks", sent.size(), received.size(), members.size()));
  TANDEM_CHECK(sent.bytes() == size_of(input) && received.bytes() == size_of(output),
               fmt::format("counts of {} and {} bytes, buffers of {} and {}", sent.bytes(), received.bytes(), input.size(),
                           output.size()));
  (void)resolved(algorithm, CollectiveKind::all_to_all);
  collectives::direct_all_to_all(members, sent, input, received, output);
}

void broadcast(Peers& peers, CollectiveAlgorithm algorithm, std::span<std::byte> data, int root) {
  const Members members(peers);
  TANDEM_CHECK(root >= 0 && root < members.size(), fmt::format("root {} of {} ranks", root, members.size()));
  const StaleSmallMessage stale(peers, data);
  switch (resolved(algorithm, CollectiveKind::broadcast)) {
    case Algorithm::ring: return collectives::ring_broadcast(members, data, root);
    case Algorithm::tree: return collectives::tree_broadcast(members, data, root);
    case Algorithm::hierarchical: return collectives::hierarchical_broadcast(peers, data, root);
    default: return collectives::direct_broadcast(members, data, root);
  }
}

void barrier(Peers& peers) {
  const int size = peers.size();
  for (int distance = 1; distance < size; distance *= 2) {
    const Peers::Ticket receive = peers.receive((peers.rank() - distance + size) % size, {});
    const Peers::Ticket send = peers.send((peers.rank() + distance) % size, {});
    peers.wait(receive);
    peers.wait(send);
  }
}

}  // namespace tandem
