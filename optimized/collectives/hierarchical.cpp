// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "optimized/collectives/families.h"

namespace tandem::collectives {
namespace {

// The ranks of each node, and where this rank is among them.
class Nodes {
 public:
  explicit Nodes(Peers& peers) : peers_(&peers) {
    for (int rank = 0; rank < peers.size(); ++rank) {
      if (rank == 0 || peers.node(rank) != peers.node(rank - 1)) ranks_.emplace_back();
      if (rank == peers.rank()) own_ = ranks_.size() - 1;
      ranks_.back().push_back(rank);
    }
  }
  [[nodiscard]] bool even() const {
    return std::ranges::all_of(ranks_, [&](const std::vector<int>& ranks) { return ranks.size() == ranks_[0].size(); });
  }
  [[nodiscard]] const std::vector<std::vector<int>>& ranks() const { return ranks_; }
  [[nodiscard]] int own() const { return static_cast<int>(own_); }
  [[nodiscard]] int first_rank(int node) const { return ranks_[static_cast<std::size_t>(node)].front(); }
  [[nodiscard]] std::vector<int> sizes() const {
    std::vector<int> sizes;
    for (const std::vector<int>& ranks : ranks_) sizes.push_back(static_cast<int>(ranks.size()));
    return sizes;
  }
  [[nodiscard]] Members in_node() const { return {*peers_, ranks_[own_]}; }
  /// The members of all nodes with the same place in theirs; one per node, in order of nodes.
  [[nodiscard]] Members of_place(int place) const {
    std::vector<int> members;
    for (const std::vector<int>& ranks : ranks_) members.push_back(ranks[static_cast<std::size_t>(place)]);
    return {*peers_, members};
  }

 private:
  Peers* peers_;
  std::vector<std::vector<int>> ranks_;
  std::size_t own_ = 0;
};

// Counts of the parts of the ranks with equal places, place by place: what lies in order of places in the packed buffers.
struct ByPlace {
  ByPlace(const Nodes& nodes, const Parts& parts) : packed({}, parts.dtype()) {
    std::vector<std::int64_t> totals;
    for (std::size_t place = 0; place < nodes.ranks()[0].size(); ++place) {
      std::vector<std::int64_t> counts;
      std::int64_t total = 0;
      for (const std::vector<int>& ranks : nodes.ranks()) {
        counts.push_back(parts.elements(ranks[place]));
        total += counts.back();
      }
      of_place.emplace_back(counts, parts.dtype());
      totals.push_back(total);
    }
    packed = Parts(totals, parts.dtype());
  }
  Parts packed;                 ///< one part per place
  std::vector<Parts> of_place;  ///< one part per node
};

// Calls move(part of a buffer in order of ranks, the same part of a buffer in order of places) for every rank.
template <class InRankOrder, class Move>
void for_each_part(const Nodes& nodes, const Parts& parts, const ByPlace& by_place, InRankOrder in_rank_order, Bytes packed,
                   const Move& move) {
  for (int place = 0; place < by_place.packed.size(); ++place) {
    const Parts& of_place = by_place.of_place[static_cast<std::size_t>(place)];
    for (int node = 0; node < of_place.size(); ++node) {
      move(parts.of(in_rank_order, nodes.ranks()[static_cast<std::size_t>(node)][static_cast<std::size_t>(place)]),
           of_place.of(by_place.packed.of(packed, place), node));
    }
  }
}

Parts parts_of_node(const Nodes& nodes, const Parts& parts) {
  std::vector<std::int64_t> counts;
  for (const int rank : nodes.ranks()[static_cast<std::size_t>(nodes.own())]) counts.push_back(parts.elements(rank));
  return {counts, parts.dtype()};
}

void reduce_scatter_over_leaders(const Nodes& nodes, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch) {
  const Members in_node = nodes.in_node();
  const Bytes sum = scratch.first(input.size());
  const Bytes rest = scratch.subspan(input.size());
  const Parts node_parts = parts.grouped(nodes.sizes());
  copy_bytes(input, sum);
  tree_reduce(in_node, parts.dtype(), sum, rest);
  const Bytes own_node = node_parts.of(sum, nodes.own());
  if (in_node.place() == 0) ring_reduce_scatter(nodes.of_place(0), node_parts, sum, own_node, rest);
  direct_scatter(in_node, parts_of_node(nodes, parts), own_node, output, 0);
}

}  // namespace

void hierarchical_all_reduce(Peers& peers, DType dtype, Bytes data, Bytes scratch) {
  const Nodes nodes(peers);
  const Members in_node = nodes.in_node();
  const bool counts_twice = in_node.place() == 0 && peers.planted(Pitfall::hierarchical_counts_leader_twice);
  if (counts_twice) add(dtype, data, data, data);
  if (nodes.even()) {
    const Parts parts = Parts::even(static_cast<std::int64_t>(data.size() / size_bytes(dtype)), in_node.size(), dtype);
    const Bytes own = parts.of(data, in_node.place());
    ring_reduce_scatter(in_node, parts, data, own, scratch);
    ring_all_reduce(nodes.of_place(in_node.place()), dtype, own, scratch);
    ring_all_gather(in_node, parts, own, data);
    return;
  }
  tree_reduce(in_node, dtype, data, scratch);
  if (in_node.place() == 0) ring_all_reduce(nodes.of_place(0), dtype, data, scratch);
  tree_broadcast(in_node, data, 0);
}

void hierarchical_reduce_scatter(Peers& peers, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch) {
  const Nodes nodes(peers);
  if (!nodes.even()) return reduce_scatter_over_leaders(nodes, parts, input, output, scratch);
  const Members in_node = nodes.in_node();
  const ByPlace by_place(nodes, parts);
  const Bytes packed = scratch.first(input.size());
  const Bytes rest = scratch.subspan(input.size());
  for_each_part(nodes, parts, by_place, input, packed, [](ConstBytes part, Bytes place) { copy_bytes(part, place); });
  const Bytes own = by_place.packed.of(packed, in_node.place());
  ring_reduce_scatter(in_node, by_place.packed, packed, own, rest);
  const Parts& between_nodes = by_place.of_place[static_cast<std::size_t>(in_node.place())];
  ring_reduce_scatter(nodes.of_place(in_node.place()), between_nodes, own, output, rest);
}

// Between nodes first, while each rank has but its own part: nothing crosses a link between nodes twice.
void hierarchical_all_gather(Peers& peers, const Parts& parts, ConstBytes input, Bytes output, Bytes scratch) {
  const Nodes nodes(peers);
  const Members in_node = nodes.in_node();
  if (!nodes.even()) {
    const Parts node_parts = parts.grouped(nodes.sizes());
    const Bytes own_node = node_parts.of(output, nodes.own());
    direct_gather(in_node, parts_of_node(nodes, parts), input, own_node, 0);
    if (in_node.place() == 0) ring_all_gather(nodes.of_place(0), node_parts, own_node, output);
    return tree_broadcast(in_node, output, 0);
  }
  const ByPlace by_place(nodes, parts);
  const Bytes packed = scratch.first(output.size());
  const Bytes own = by_place.packed.of(packed, in_node.place());
  ring_all_gather(nodes.of_place(in_node.place()), by_place.of_place[static_cast<std::size_t>(in_node.place())], input, own);
  ring_all_gather(in_node, by_place.packed, own, packed);
  for_each_part(nodes, parts, by_place, output, packed, [](Bytes part, ConstBytes place) { copy_bytes(place, part); });
}

void hierarchical_broadcast(Peers& peers, Bytes data, int root) {
  const Nodes nodes(peers);
  std::vector<int> speakers;  // the root, and the first rank of every other node
  int node_of_root = 0;
  for (std::size_t node = 0; node < nodes.ranks().size(); ++node) {
    const std::vector<int>& ranks = nodes.ranks()[node];
    const bool holds_root = std::ranges::find(ranks, root) != ranks.end();
    if (holds_root) node_of_root = static_cast<int>(node);
    speakers.push_back(holds_root ? root : ranks.front());
  }
  const int speaker = speakers[static_cast<std::size_t>(nodes.own())];
  if (peers.rank() == speaker) tree_broadcast(Members(peers, speakers), data, node_of_root);
  tree_broadcast(nodes.in_node(), data, speaker - nodes.first_rank(nodes.own()));
}

}  // namespace tandem::collectives
