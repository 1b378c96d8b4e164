// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "kernels/cpu/huge_buffer.h"
#include "optimized/probe/measure.h"

namespace tandem::probing {
namespace {

constexpr std::array<std::int64_t, 6> kMessageBytes = {8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20};
constexpr std::int64_t kCrowdBytes = 1 << 20;
constexpr std::int64_t kSumBytes = 4 << 20, kSumBytesInHaste = 512 << 10;
constexpr std::size_t kFewestChains = 5, kMostChains = 500;
constexpr int kRounds = 5;
constexpr int kMostPairs = 4;  // of each level

using Pair = std::pair<int, int>;

// Messages to and from one rank of the same bytes.
class Mail {
 public:
  explicit Mail(Communicator& comm)
      : comm_(comm), sent_(kMessageBytes.back() / 4, 1.0F), received_(kMessageBytes.back() / 4, 0.0F) {}

  void send(int to, std::int64_t bytes) { comm_.send(view(sent_, bytes), to, {}, options()).wait_host(); }
  void receive(int from, std::int64_t bytes) { comm_.recv(view(received_, bytes), from, {}, options()).wait_host(); }
  // Everybody sends to one rank and receives from another at the same time.
  void shift(int to, int from, std::int64_t bytes) {
    const CommOptions both{.name = "probe"};
    Work in = comm_.recv(view(received_, bytes), from, {}, both);
    Work out = comm_.send(view(sent_, bytes), to, {}, both);
    in.wait_host();
    out.wait_host();
  }
  [[nodiscard]] std::int64_t receive_number(int from) {
    std::vector<std::int64_t> number(1);
    comm_.recv(view_of(number, {1}), from, {}, options()).wait_host();
    return number[0];
  }
  void send_number(int to, std::int64_t value) {
    std::vector<std::int64_t> number(1, value);
    comm_.send(view_of(number, {1}), to, {}, options()).wait_host();
  }

 private:
  static TensorView view(const cpu::HugeBuffer& buffer, std::int64_t bytes) { return {buffer.data(), DType::f32, {bytes / 4}}; }
  static CommOptions options() { return {.name = "probe", .progress = Progress::on_wait}; }

  Communicator& comm_;
  cpu::HugeBuffer sent_, received_;
};

struct Chains {
  double chain_seconds = 1e-3;  ///< of one chain
  double seconds = 0;           ///< of all chains of one size
  double quantile = 0;          ///< of the chains' times, that is fitted
};
// Chains of trips that are short enough to find the machine undisturbed in between. On shaped links whoever sleeps until a
// message comes wakes up late, which the next one makes good, once in a chain by up to two milliseconds: those are longer, and
// the least of them is less than the link's own time.
Chains chains_of(bool shaped, double seconds) { return shaped ? Chains{8e-3, seconds, 0.3} : Chains{1e-3, seconds, 0}; }

// One of the two ends. The lower rank keeps the clock and says how many trips and when it is enough.
class PingPong {
 public:
  PingPong(Mail& mail, int own, const Pair& pair)
      : mail_(mail), own_(own), peer_(own == pair.first ? pair.second : pair.first), leads_(own == pair.first) {}

  [[nodiscard]] LinkSample measure(std::int64_t bytes, const Chains& chains) {
    trips(bytes, 1);
    const double trip = std::min(trips(bytes, 1), trips(bytes, 1));
    const double chain = std::min(chains.chain_seconds, chains.seconds / static_cast<double>(kFewestChains));
    const std::int64_t count = agreed(std::max<std::int64_t>(1, static_cast<std::int64_t>(chain / trip)));
    const double begin = now_seconds();
    std::vector<double> one_way;
    bool more = true;
    while (more) {
      one_way.push_back(trips(bytes, count) / static_cast<double>(2 * count));
      const bool wanted = one_way.size() < kFewestChains || now_seconds() - begin < chains.seconds;
      more = agreed(wanted && one_way.size() < kMostChains ? 1 : 0) == 1;
    }
    std::ranges::sort(one_way);
    const auto fitted = static_cast<std::size_t>(chains.quantile * static_cast<double>(one_way.size()));
    return {own_, peer_, bytes, one_way[one_way.size() / 2], one_way[fitted]};
  }
  // Of a slow link, larger messages would take longer than all there is.
  [[nodiscard]] bool has_time_for_more(const LinkSample& last, const Chains& chains) {
    return agreed(last.seconds < chains.seconds / 20 ? 1 : 0) == 1;
  }

 private:
  double trips(std::int64_t bytes, std::int64_t count) {
    const double begin = now_seconds();
    for (std::int64_t i = 0; i < count; ++i) {
      if (leads_) mail_.send(peer_, bytes);
      mail_.receive(peer_, bytes);
      if (!leads_) mail_.send(peer_, bytes);
    }
    return now_seconds() - begin;
  }
  std::int64_t agreed(std::int64_t count) {
    if (!leads_) return mail_.receive_number(peer_);
    mail_.send_number(peer_, count);
    return count;
  }

  Mail& mail_;
  int own_, peer_;
  bool leads_;
};

int size_of(const std::vector<RankPlace>& places, int node) {
  return static_cast<int>(std::ranges::count(places, node, &RankPlace::node));
}

int rank_at(const std::vector<RankPlace>& places, int node, int local) {
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank].node == node && places[rank].local == local) return static_cast<int>(rank);
  }
  return -1;
}

// Of every node the first rank with its next and with its last, and neighbouring nodes' first ranks; a few of each.
std::vector<Pair> chosen_pairs(const std::vector<RankPlace>& places) {
  std::vector<Pair> in_node, between;
  const int nodes = std::ranges::max(places, {}, &RankPlace::node).node + 1;
  for (int node = 0; node < nodes; ++node) {
    const int size = size_of(places, node), first = rank_at(places, node, 0);
    if (size > 1) in_node.emplace_back(first, rank_at(places, node, 1));
    if (size > 2) in_node.emplace_back(first, rank_at(places, node, size - 1));
    if (node > 0) between.emplace_back(rank_at(places, node - 1, 0), first);
  }
  std::vector<Pair> pairs;
  for (auto* const of_level : {&in_node, &between}) {
    // Spread over the nodes where there are too many.
    const std::size_t stride = (of_level->size() + kMostPairs - 1) / kMostPairs;
    for (std::size_t i = 0; i < of_level->size(); i += stride) {
      const auto [a, b] = (*of_level)[i];
      pairs.emplace_back(std::min(a, b), std::max(a, b));
    }
  }
  return pairs;
}

// 8 bytes with each of two neighbours, all ranks at once; a slow rank makes one partner of each neighbour slow, not both.
// Neighbours are in the node where nodes have several ranks, so that all figures are of one kind of link.
double least_message_seconds(Communicator& comm, const std::vector<RankPlace>& places, Mail& mail, const Chains& chains) {
  const bool in_node = std::ranges::any_of(places, [](const RankPlace& place) { return place.local > 0; });
  const RankPlace own = places[static_cast<std::size_t>(comm.rank())];
  const int index = in_node ? own.local : comm.rank();
  double least = 0;
  for (const int phase : {0, 1}) {
    comm.barrier();
    const int other = ((index + phase) % 2 == 0 ? index + 1 : index - 1);
    const int peer = !in_node ? (other < comm.size() ? other : -1) : rank_at(places, own.node, other);
    if (peer < 0) continue;
    const Pair pair{std::min(peer, comm.rank()), std::max(peer, comm.rank())};
    const double taken = PingPong(mail, comm.rank(), pair).measure(8, chains).fitted_seconds;
    least = least > 0 ? std::min(least, taken) : taken;
  }
  return least;
}

// Ranks to send to and to receive from, of a ring in the node or through the ranks of equal place of all nodes; -1: none.
Pair neighbours(const std::vector<RankPlace>& places, int rank, int level) {
  const RankPlace own = places[static_cast<std::size_t>(rank)];
  std::vector<int> ring;
  for (std::size_t other = 0; other < places.size(); ++other) {
    const bool together = level == 0 ? places[other].node == own.node : places[other].local == own.local;
    if (together) ring.push_back(static_cast<int>(other));
  }
  if (ring.size() < 2) return {-1, -1};
  const auto at = static_cast<std::size_t>(std::ranges::find(ring, rank) - ring.begin());
  return {ring[(at + 1) % ring.size()], ring[(at + ring.size() - 1) % ring.size()]};
}

// The largest of the ranks' counts, so that all do the same.
std::int64_t agreed(Communicator& comm, std::int64_t count) {
  std::uint64_t most = 1;
  for (const std::uint64_t of_rank : all_gather_u64(comm, static_cast<std::uint64_t>(std::max<std::int64_t>(count, 1)))) {
    most = std::max(most, of_rank);
  }
  return static_cast<std::int64_t>(most);
}

void measure_crowd(Communicator& comm, const std::vector<RankPlace>& places, Mail& mail, double seconds, LinkFigures& figures) {
  for (const int level : {0, 1}) {
    const Pair ring = neighbours(places, comm.rank(), level);
    const bool takes_part = ring.first >= 0;
    const auto rounds = [&](std::int64_t count) {
      const double begin = now_seconds();
      for (std::int64_t i = 0; i < count && takes_part; ++i) mail.shift(ring.first, ring.second, kCrowdBytes);
      return now_seconds() - begin;
    };
    comm.barrier();
    const double once = rounds(1);
    const std::int64_t count =
        agreed(comm, !takes_part ? 1 : std::min<std::int64_t>(200, static_cast<std::int64_t>(seconds / 2 / kRounds / once)));
    double least = 1e30;
    for (int chain = 0; chain < kRounds; ++chain) {
      comm.barrier();
      least = std::min(least, rounds(count) / static_cast<double>(count));
    }
    if (takes_part) figures.crowd.push_back({level, kCrowdBytes, least});
  }
}

void measure_sums(Communicator& comm, const std::vector<RankPlace>& places, double seconds, LinkFigures& figures) {
  const std::int64_t bytes = seconds < 0.1 ? kSumBytesInHaste : kSumBytes;
  cpu::HugeBuffer values(static_cast<std::size_t>(bytes / 4), 1.0F);
  const TensorView data(values.data(), DType::f32, {bytes / 4});
  const RankPlace own = places[static_cast<std::size_t>(comm.rank())];
  for (const int level : {0, 1}) {
    const auto group = comm.split(level == 0 ? own.node : own.local, comm.rank());
    // The slowest rank's time is the sum's; who left the barrier last may have found it half done.
    const auto sum = [&] {
      group->barrier();
      const double begin = now_seconds();
      all_reduce(*group, data, {.name = "probe"});
      const auto own_ns = static_cast<std::uint64_t>((now_seconds() - begin) * 1e9);
      const std::vector<std::uint64_t> of_ranks = all_gather_u64(*group, own_ns);
      return 1e-9 * static_cast<double>(std::ranges::max(of_ranks));
    };
    const double once = sum();
    const double affordable = group->size() > 1 ? seconds / 2 / once : 1;
    const std::int64_t count = std::min<std::int64_t>(20, agreed(comm, static_cast<std::int64_t>(affordable)));
    double least = 1e30;
    for (std::int64_t i = 0; i < count; ++i) {
      std::ranges::fill(values.span(), 1.0F);  // sums of sums would overflow
      least = std::min(least, sum());
    }
    if (group->size() > 1 && group->rank() == 0) {
      figures.collectives.push_back({level == 0 ? "node" : "network", group->size(), bytes, least, 0});
    }
  }
}

}  // namespace

LinkFigures measure_links(Communicator& comm, const std::vector<RankPlace>& places, bool shaped, double seconds) {
  LinkFigures figures;
  if (comm.size() < 2) return figures;
  Mail mail(comm);
  const std::vector<Pair> pairs = chosen_pairs(places);
  for (const Pair& pair : pairs) {
    comm.barrier();
    if (comm.rank() != pair.first && comm.rank() != pair.second) continue;
    const double each = 0.6 * seconds / static_cast<double>(pairs.size() * kMessageBytes.size());
    const Chains chains = chains_of(shaped, each);
    PingPong ping_pong(mail, comm.rank(), pair);
    int measured = 0;
    for (const std::int64_t bytes : kMessageBytes) {
      const LinkSample sample = ping_pong.measure(bytes, chains);
      if (comm.rank() == pair.first) figures.links.push_back(sample);
      const bool has_time = ping_pong.has_time_for_more(sample, chains);
      if (++measured >= 4 && !has_time) break;
    }
  }
  figures.message_seconds = least_message_seconds(comm, places, mail, chains_of(shaped, 0.05 * seconds));
  // Every rank of a shaped link has ports of its own: nothing to be shared.
  if (!shaped) measure_crowd(comm, places, mail, 0.15 * seconds, figures);
  measure_sums(comm, places, 0.15 * seconds, figures);
  comm.barrier();
  return figures;
}

}  // namespace tandem::probing
