// SPDX-License-Identifier: Apache-2.0
#include "optimized/probe/probe.h"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/binary.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "optimized/probe/assemble.h"

namespace tandem {

template <class Archive>
void serialize(Archive& archive, NodeInventory& node) {
  archive(node.host, node.cpu, node.cores, node.memory_bytes, node.gpus, node.nics, node.driver, node.nccl, node.kernel);
}
template <class Archive>
void serialize(Archive& archive, MatrixSample& sample) {
  archive(sample.m, sample.n, sample.k, sample.dtype, sample.seconds, sample.flops_per_second, sample.fitted);
}
template <class Archive>
void serialize(Archive& archive, LinkSample& sample) {
  archive(sample.rank, sample.peer, sample.bytes, sample.seconds, sample.fitted_seconds);
}
template <class Archive>
void serialize(Archive& archive, CollectiveSample& sample) {
  archive(sample.level, sample.ranks, sample.bytes, sample.seconds);
}
template <class Archive>
void serialize(Archive& archive, StorageSample& sample) {
  archive(sample.host, sample.read_bytes_per_second, sample.write_bytes_per_second, sample.direct);
}

namespace probing {

template <class Archive>
void serialize(Archive& archive, RankPlace& place) {
  archive(place.node, place.local);
}
template <class Archive>
void serialize(Archive& archive, CrowdSample& sample) {
  archive(sample.level, sample.bytes, sample.seconds);
}
template <class Archive>
void serialize(Archive& archive, AttentionProbe& probe) {
  archive(probe.rows, probe.sequence, probe.heads, probe.head_size, probe.dtype);
}
template <class Archive>
void serialize(Archive& archive, MachineFigures& figures) {
  archive(figures.matrices, figures.copy_bytes_per_second, figures.add_bytes_per_second, figures.fastest_copy_bytes_per_second,
          figures.snapshot_bytes_per_second, figures.attention, figures.attention_seconds, figures.attention_backward_seconds,
          figures.converts_bf16, figures.core_share, figures.gpu, figures.gpu_memory_bytes, figures.multiprocessors);
}
template <class Archive>
void serialize(Archive& archive, LinkFigures& figures) {
  archive(figures.links, figures.crowd, figures.collectives, figures.message_seconds);
}
template <class Archive>
void serialize(Archive& archive, RankFigures& figures) {
  archive(figures.place, figures.node, figures.machine, figures.links, figures.storage);
}

namespace {

// Nodes in order of their first rank; by the link's own word where it is shaped.
std::vector<RankPlace> places_of(const std::vector<std::string>& hosts, const std::optional<LinkProfile>& link) {
  std::vector<RankPlace> places;
  std::map<std::string, int> node_of;
  std::map<int, int> ranks_of;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const int by_host = node_of.try_emplace(hosts[rank], static_cast<int>(node_of.size())).first->second;
    const int node = link ? static_cast<int>(rank) / link->ranks_per_node : by_host;
    places.push_back({node, ranks_of[node]++});
  }
  return places;
}

// More ranks than there are cores or GPUs take turns, so that each is measured on one of its own. Neighbouring ranks may be bound
// to one core. `places`: of all ranks, the same for those that share `slots` of them.
void measure_in_turns(Communicator& comm, const std::vector<std::string>& places, int slots,
                      const std::function<void(double turns)>& measure) {
  const auto own = static_cast<std::size_t>(comm.rank());
  const auto on_host = static_cast<int>(std::ranges::count(places, places[own]));
  const auto place = static_cast<int>(std::count(places.begin(), places.begin() + comm.rank(), places[own]));
  std::uint64_t turns = 1;
  const int own_turns = (on_host + slots - 1) / slots;
  for (const std::uint64_t of_rank : all_gather_u64(comm, static_cast<std::uint64_t>(own_turns)))
    turns = std::max(turns, of_rank);
  for (std::uint64_t turn = 0; turn < turns; ++turn) {
    comm.barrier();
    if (static_cast<std::uint64_t>(place) % turns != turn) continue;
    measure(static_cast<double>(turns));
  }
  comm.barrier();
}

RankFigures measure_rank(Communicator& comm, const NodeInventory& node, const ProbeOptions& options) {
  RankFigures figures;
  figures.node = node;
  const std::vector<std::string> hosts = all_gather_bytes(comm, figures.node.host);
  const std::vector<RankPlace> places = places_of(hosts, options.world.link);
  figures.place = places[static_cast<std::size_t>(comm.rank())];
  const double seconds = 0.5 * options.seconds;
  if (options.backend == "cpu") {
    measure_in_turns(comm, hosts, figures.node.cores, [&](double turns) { figures.machine = measure_machine(seconds / turns); });
  } else {
    const int device = device_of(options.world.transport);
    const std::vector<std::string> gpus = all_gather_bytes(comm, fmt::format("{} {}", figures.node.host, device));
    measure_in_turns(comm, gpus, 1,
                     [&](double turns) { figures.machine = measure_gpu(options.backend, device, seconds / turns); });
  }
  figures.links = measure_links(comm, places, options.world.link.has_value(), 0.35 * options.seconds);
  const bool first_of_host = std::ranges::find(hosts, figures.node.host) - hosts.begin() == comm.rank();
  if (!options.storage_folder.empty() && first_of_host) {
    figures.storage.push_back(measure_storage(options.storage_folder, 0.1 * options.seconds));
    figures.storage.back().host = figures.node.host;
  }
  return figures;
}

}  // namespace
}  // namespace probing

ProbeReport probe(const ProbeOptions& options) {
  if (options.ranks < 1) throw InputError(fmt::format("a probe needs at least one rank, not {}", options.ranks));
  std::vector<probing::RankFigures> all;
  std::mutex mutex;
  // Before the ranks are bound to cores of their own.
  const NodeInventory node = node_inventory();
  WorldOptions world{.ranks = options.ranks};
  world.settings = options.world;
  run_world(world, [&](Communicator& comm) {
    const probing::RankFigures own = probing::measure_rank(comm, node, options);
    std::vector<probing::RankFigures> gathered;
    for (const std::string& of_rank : all_gather_bytes(comm, to_bytes(own))) {
      gathered.push_back(from_bytes<probing::RankFigures>(of_rank));
    }
    const std::scoped_lock lock(mutex);
    all = std::move(gathered);
  });
  // A process of the job that took no part.
  if (all.empty()) return {};
  return probing::assemble(all, options);
}

}  // namespace tandem
