// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/collectives/algorithms.h"

// Seconds of each algorithm when all ranks begin together, for equal parts s = b / n: a message of s bytes takes a + s/B, and
// messages that a rank sends (receives) back to back over links of one level follow each other s/B apart. Exact on one level and
// for nodes of equal size; an estimate where the last node is smaller, and for recursive where ranks or nodes are no powers of
// two.
namespace tandem {
namespace {

using Algorithm = CollectiveAlgorithm;
using Cost = double;

constexpr std::array kCandidates = {Algorithm::direct, Algorithm::ring, Algorithm::recursive, Algorithm::tree,
                                    Algorithm::hierarchical};

class CostModel {
 public:
  CostModel(std::int64_t bytes, int ranks, const LinkProfile& link)
      : bytes_(static_cast<double>(bytes)), ranks_(ranks), per_node_(std::min(ranks, link.ranks_per_node)), link_(&link) {
    near_ = link.level(0, 0);
    far_ = ranks > per_node_ ? link.level(0, link.ranks_per_node) : near_;
  }

  [[nodiscard]] double seconds(Algorithm algorithm, CollectiveKind kind) const {
    switch (kind) {
      case CollectiveKind::all_reduce: return all_reduce(algorithm);
      case CollectiveKind::reduce_scatter: return reduce_scatter(algorithm);
      case CollectiveKind::all_gather: return all_gather(algorithm);
      case CollectiveKind::all_to_all: return direct_parts();
      case CollectiveKind::broadcast: return broadcast(algorithm);
    }
    return 0;
  }

 private:
  static Cost moving(const LinkLevel& level, double bytes) {
    return level.bytes_per_second > 0 ? bytes / level.bytes_per_second : 0;
  }
  static Cost message(const LinkLevel& level, double bytes) { return level.latency_seconds + moving(level, bytes); }
  [[nodiscard]] double part() const { return bytes_ / ranks_; }
  [[nodiscard]] int nodes() const { return (ranks_ + per_node_ - 1) / per_node_; }
  [[nodiscard]] bool even() const { return ranks_ % per_node_ == 0; }

  [[nodiscard]] Cost all_reduce(Algorithm algorithm) const {
    switch (algorithm) {
      case Algorithm::direct: return 2 * direct_parts();
      case Algorithm::ring: return ring(2 * (ranks_ - 1));
      case Algorithm::recursive: return recursive_all_reduce();
      case Algorithm::tree: return tree_reduce(ranks_) + tree_broadcast(ranks_);
      case Algorithm::hierarchical: return hierarchical_all_reduce();
      default: break;
    }
    return fastest(CollectiveKind::all_reduce);
  }

  [[nodiscard]] Cost reduce_scatter(Algorithm algorithm) const {
    switch (algorithm) {
      case Algorithm::direct: return direct_parts();
      case Algorithm::ring: return ring(ranks_ - 1);
      case Algorithm::recursive: return recursive_parts(bytes_, part());
      case Algorithm::hierarchical: return hierarchical_reduce_scatter();
      default: break;
    }
    return fastest(CollectiveKind::reduce_scatter);
  }

  [[nodiscard]] Cost all_gather(Algorithm algorithm) const {
    switch (algorithm) {
      case Algorithm::direct: return direct_parts();
      case Algorithm::ring: return ring(ranks_ - 1);
      case Algorithm::recursive: return recursive_parts(part(), bytes_ - part());
      case Algorithm::hierarchical: return hierarchical_all_gather();
      default: break;
    }
    return fastest(CollectiveKind::all_gather);
  }

  [[nodiscard]] Cost broadcast(Algorithm algorithm) const {
    switch (algorithm) {
      case Algorithm::direct: return direct(per_node_ - 1, bytes_);
      case Algorithm::ring: return direct_parts() + ring(ranks_ - 1);
      case Algorithm::tree: return tree_broadcast(ranks_);
      case Algorithm::hierarchical: return between_nodes_tree() + tree_broadcast(per_node_);
      default: break;
    }
    return fastest(CollectiveKind::broadcast);
  }

  [[nodiscard]] Cost fastest(CollectiveKind kind) const {
    double least = std::numeric_limits<double>::infinity();
    for (const Algorithm algorithm : kCandidates) {
      if (supports(algorithm, kind)) least = std::min(least, seconds(algorithm, kind));
    }
    return least;
  }

  // A message of so many bytes to every other rank, in its node and elsewhere at the same time:
  //   a_far + far s/B_far or a_near + near s/B_near, the larger
  [[nodiscard]] Cost direct(int near, double bytes) const {
    const int far = ranks_ - 1 - near;
    return std::max(near == 0 ? 0 : message(near_, near * bytes), far == 0 ? 0 : message(far_, far * bytes));
  }
  [[nodiscard]] Cost direct_parts() const { return direct(ranks_of(nodes() - 1) - 1, part()); }

  // k steps. One level: k (a + s/B). Two: a chain of messages that crosses c times between nodes, c a_far, with all ranks of the
  // nodes in between, and is in the queue of a link between nodes for the rest of the steps; the longest over c.
  [[nodiscard]] Cost ring(int steps) const {
    const Cost near = message(near_, part());
    if (nodes() == 1) return steps * near;
    const Cost rest = std::max(near, moving(far_, part()));
    Cost longest = 0;
    int crossings = 1, between = 0;
    // The first crossing is into the last node, which may be smaller than the others.
    for (int node = nodes() - 1; crossings + between <= steps; node = (node + 1) % nodes()) {
      longest = std::max(longest, crossings * message(far_, part()) + between * near + (steps - crossings - between) * rest);
      between += ranks_of(node) - 1;
      ++crossings;
    }
    return longest;
  }
  [[nodiscard]] int ranks_of(int node) const { return std::min(per_node_, ranks_ - node * per_node_); }

  // p = 2^floor(log2 n) ranks carry it out; n - p pairs of ranks meet before and after:
  //   2 [a + b/B]  +  2 sum over halves h = p/2, ..., 1 of (a + (h/p) b/B)
  [[nodiscard]] int core() const { return static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks_))); }
  [[nodiscard]] int rank_of_core(int index) const { return index < ranks_ - core() ? 2 * index : index + ranks_ - core(); }
  [[nodiscard]] LinkLevel level_of_half(int half) const {
    for (int index = 0; index < core(); ++index) {
      if (!link_->same_node(rank_of_core(index), rank_of_core(index ^ half))) return far_;
    }
    return near_;
  }
  [[nodiscard]] LinkLevel level_of_pairs() const { return per_node_ % 2 == 0 ? near_ : far_; }
  [[nodiscard]] Cost recursive_all_reduce() const {
    const int size = core();
    Cost total = size == ranks_ ? 0 : 2 * message(level_of_pairs(), bytes_);
    for (int half = size / 2; half > 0; half /= 2) total += 2 * message(level_of_half(half), bytes_ * half / size);
    return total;
  }
  // One way, with parts of ranks as they are: the first n - p of the core stand for two. `before` and `after` are the bytes
  // that pairs hand over; a gather meets them in the other order, at the same sum.
  [[nodiscard]] Cost recursive_parts(double before, double after) const {
    const int size = core();
    const int pairs = ranks_ - size;
    Cost total = pairs == 0 ? 0 : message(level_of_pairs(), before) + message(level_of_pairs(), after);
    for (int half = size / 2; half > 0; half /= 2) {
      total += message(level_of_half(half), (half + std::min(half, pairs)) * part());
    }
    return total;
  }

  struct Ports {
    Cost in_node = 0, between_nodes = 0;
    Cost& of(bool is_near) { return is_near ? in_node : between_nodes; }
  };

  // Arrival of the sum at rank 0: a rank takes its children's one after the other, the nearest first. ceil(log2 n) (a + b/B) for
  // powers of two, less for other n.
  [[nodiscard]] Cost tree_reduce(int count) const {
    std::vector<Ports> taken(static_cast<std::size_t>(count));
    for (int bit = 1; bit < count; bit *= 2) {
      for (int place = 0; place + bit < count; place += 2 * bit) {
        const LinkLevel level = link_->level(place, place + bit);
        const Ports& of_child = taken[static_cast<std::size_t>(place + bit)];
        const Cost ready = std::max(of_child.in_node, of_child.between_nodes);
        Cost& port = taken[static_cast<std::size_t>(place)].of(link_->same_node(place, place + bit));
        port = std::max(port, ready + level.latency_seconds) + moving(level, bytes_);
      }
    }
    return std::max(taken[0].in_node, taken[0].between_nodes);
  }

  // Latest arrival: a rank's sends to its children follow each other b/B apart, the farthest first. ceil(log2 n) (a + b/B) for
  // powers of two, less for other n.
  [[nodiscard]] Cost tree_broadcast(int count) const {
    std::vector<Ports> free(static_cast<std::size_t>(count));
    Cost latest = 0;
    for (auto bit = static_cast<int>(std::bit_ceil(static_cast<unsigned>(count)) / 2); bit > 0; bit /= 2) {
      for (int place = 0; place + bit < count; place += 2 * bit) {
        const LinkLevel level = link_->level(place, place + bit);
        Cost& port = free[static_cast<std::size_t>(place)].of(link_->same_node(place, place + bit));
        const Cost arrival = port + message(level, bytes_);
        port += moving(level, bytes_);
        free[static_cast<std::size_t>(place + bit)] = {arrival, arrival};
        latest = std::max(latest, arrival);
      }
    }
    return latest;
  }

  // Between one rank of each node: a level of its own, as if all n were such.
  [[nodiscard]] Cost between_nodes_tree() const {
    LinkProfile leaders = *link_;
    leaders.ranks_per_node = 1;
    return CostModel(static_cast<std::int64_t>(bytes_), nodes(), leaders).broadcast(Algorithm::tree);
  }

  // m ranks in each of N nodes:  2 (m-1) (a_near + b/(m B_near)) + 2 (N-1) (a_far + b/(n B_far)).
  // Uneven nodes: tree of the largest, ring of the N leaders on all b bytes, tree back.
  [[nodiscard]] Cost hierarchical_all_reduce() const {
    const int between = 2 * (nodes() - 1);
    if (even()) return 2 * (per_node_ - 1) * message(near_, bytes_ / per_node_) + between * message(far_, part());
    return tree_reduce(per_node_) + between * message(far_, bytes_ / nodes()) + tree_broadcast(per_node_);
  }
  // Half of the above; uneven: then the leader sends its node's parts.
  [[nodiscard]] Cost hierarchical_reduce_scatter() const {
    const int between = nodes() - 1;
    if (even()) return (per_node_ - 1) * message(near_, bytes_ / per_node_) + between * message(far_, part());
    return tree_reduce(per_node_) + between * message(far_, per_node_ * part()) + leader_to_node();
  }
  [[nodiscard]] Cost hierarchical_all_gather() const {
    const int between = nodes() - 1;
    if (even()) return (per_node_ - 1) * message(near_, bytes_ / per_node_) + between * message(far_, part());
    return leader_to_node() + between * message(far_, per_node_ * part()) + tree_broadcast(per_node_);
  }
  // Own parts between the first of a node and the others, all through its port.
  [[nodiscard]] Cost leader_to_node() const { return per_node_ == 1 ? 0 : message(near_, (per_node_ - 1) * part()); }

  double bytes_;
  int ranks_, per_node_;
  const LinkProfile* link_;
  LinkLevel near_, far_;
};

}  // namespace

double expected_seconds(CollectiveAlgorithm algorithm, CollectiveKind kind, std::int64_t bytes, int ranks,
                        const LinkProfile& link) {
  TANDEM_CHECK(ranks > 0 && bytes >= 0, fmt::format("{} bytes on {} ranks", bytes, ranks));
  if (ranks == 1 || bytes == 0) return 0;
  return CostModel(bytes, ranks, link).seconds(supports(algorithm, kind) ? algorithm : Algorithm::direct, kind);
}

CollectiveAlgorithm choose_algorithm(CollectiveKind kind, std::int64_t bytes, int ranks, const LinkProfile& link) {
  Algorithm best = Algorithm::direct;
  for (const Algorithm algorithm : kCandidates) {
    if (!supports(algorithm, kind)) continue;
    if (expected_seconds(algorithm, kind, bytes, ranks, link) < expected_seconds(best, kind, bytes, ranks, link))
      best = algorithm;
  }
  return best;
}

}  // namespace tandem
