// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/own_parts.h"

namespace tandem {

/// How a collective is carried out over messages (docs/techniques/collectives.md). `direct` adds in the order of ranks, like the
/// shared memory of threads does: the same bits. The others have their own order, the same on every rank and in every run.
enum class CollectiveAlgorithm : std::uint8_t {
  automatic,     ///< the one that the cost model of the link expects to be fastest for the size
  direct,        ///< every rank exchanges parts with every other
  ring,          ///< parts go around a ring, 2 (n - 1) steps for all_reduce
  recursive,     ///< halving and doubling of distances, 2 log2 n steps
  tree,          ///< to a root and back, along a binomial tree
  hierarchical,  ///< within each node, then between nodes, then within each node
};
[[nodiscard]] std::string_view name(CollectiveAlgorithm algorithm);
[[nodiscard]] std::optional<CollectiveAlgorithm> find_algorithm(std::string_view name);
[[nodiscard]] std::vector<CollectiveAlgorithm> all_algorithms();

/// One kind of link. A message of s bytes occupies the sender's port and the receiver's port for s / bytes_per_second each, and
/// arrives latency_seconds after it could have been received at the earliest (alpha-beta model, ports full duplex).
struct LinkLevel {
  double latency_seconds = 0;
  double bytes_per_second = 0;  ///< 0: no limit
  /// Each message's latency is multiplied by a number between 1 and 1 + jitter, drawn from (seed, sender, count of its messages).
  double jitter = 0;
  friend bool operator==(const LinkLevel&, const LinkLevel&) = default;
};

/// What the threads transport makes of its messages so that they take the time that they would on a cluster (results/links).
struct LinkProfile {
  std::string name;
  std::string description;
  int ranks_per_node = 1;
  LinkLevel in_node, between_nodes;
  /// Clock of the profile over the clock on the wall: with 100, a microsecond of the profile lasts 100 here. Times of links that
  /// are faster than this machine's memory can be shown only so; measured times are reported as they are on the wall.
  double dilation = 1;
  std::uint64_t jitter_seed = 1;

  [[nodiscard]] bool same_node(int rank, int other) const noexcept { return rank / ranks_per_node == other / ranks_per_node; }
  /// On the wall's clock.
  [[nodiscard]] LinkLevel level(int rank, int other) const noexcept;
  /// Messages take time on it.
  [[nodiscard]] bool is_shaped() const noexcept;
  friend bool operator==(const LinkProfile&, const LinkProfile&) = default;
};

/// Reads a profile: a file, or the name of one of `results/links` beside the program's sources (compiled in). Throws InputError
/// naming file and field.
[[nodiscard]] LinkProfile read_link_profile(const std::string& path_or_name);
[[nodiscard]] std::vector<std::string> shipped_link_profiles();
/// "pcie-25gbe dilated 10 x with jitter 0.2"
[[nodiscard]] std::string describe(const LinkProfile& link);
/// Overrides of the form NAME[,dilation=D][,jitter=J][,ranks_per_node=N]; "none" is no profile. Throws InputError.
[[nodiscard]] std::optional<LinkProfile> parse_link(const std::string& text);

/// A transport that does what a network may do: completes late, in any legal order, and shows what is in a buffer that nobody may
/// look at (optimized/comm/adversary.h).
struct AdversaryScript {
  std::uint64_t seed = 1;
  double longest_delay_seconds = 2e-3;  ///< of one operation; the script draws from 0 to this, by rank and operation
  friend bool operator==(const AdversaryScript&, const AdversaryScript&) = default;
};

/// Of what a world of ranks is made.
struct WorldSettings {
  std::string transport = "threads";                            ///< threads, mpi, nccl
  std::optional<LinkProfile> link{};                            ///< threads only
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::direct;  ///< of messages; threads without a link share memory
  std::optional<AdversaryScript> adversary{};
  double deadline_seconds = 0;                  ///< of each operation; 0: what the caller of run_world() thinks right
  std::shared_ptr<const OwnParts> own_parts{};  ///< somebody's own code instead of this program's; null: none
  friend bool operator==(const WorldSettings&, const WorldSettings&) = default;

  /// "threads", "mpi", "threads, link pcie-100gbe dilated 20 x, adversary 3": for results and tables.
  [[nodiscard]] std::string describe() const;
};

}  // namespace tandem
