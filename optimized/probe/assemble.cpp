// SPDX-License-Identifier: Apache-2.0
#include "optimized/probe/assemble.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <fmt/format.h>

#include "optimized/collectives/algorithms.h"

namespace tandem::probing {
namespace {

// The lower one of the two in the middle.
double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[(values.size() - 1) / 2];
}

template <class Figure>
double median_over(const std::vector<RankFigures>& ranks, Figure figure) {
  std::vector<double> values;
  values.reserve(ranks.size());
  for (const RankFigures& rank : ranks) values.push_back(figure(rank));
  return median_of(std::move(values));
}

std::vector<MatrixSample> matrices_of(const std::vector<RankFigures>& ranks) {
  std::vector<MatrixSample> samples = ranks.front().machine.matrices;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    MatrixSample& sample = samples[i];
    sample.seconds = median_over(ranks, [i](const RankFigures& rank) { return rank.machine.matrices[i].seconds; });
    sample.flops_per_second = 2.0 * static_cast<double>(sample.m * sample.n * sample.k) / sample.seconds;
  }
  return samples;
}

// A multiply-add counts 2, half of the pairs are masked; backward has 5 products where forward has 2.
double attention_share(const AttentionProbe& probe, double seconds, int products, double peak, double kernel_seconds) {
  const auto length = static_cast<double>(probe.sequence), head = static_cast<double>(probe.head_size);
  const double flops = products * 2 * static_cast<double>(probe.rows) * probe.heads * length * length * head / 2;
  return flops / (peak * std::max(seconds - kernel_seconds, 1e-9));
}

void fit_attention(const std::vector<RankFigures>& ranks, DeviceSpec& device) {
  const AttentionProbe& probe = ranks.front().machine.attention;
  const double peak = device.peak_flops.at(std::string(name(probe.dtype))), kernel = device.constants.at("kernel_seconds");
  const double forward = median_over(ranks, [](const RankFigures& rank) { return rank.machine.attention_seconds; });
  const double backward = median_over(ranks, [](const RankFigures& rank) { return rank.machine.attention_backward_seconds; });
  device.constants["attention_forward_efficiency"] = std::min(1.0, attention_share(probe, forward, 2, peak, kernel));
  device.constants["attention_backward_efficiency"] = std::min(1.0, attention_share(probe, backward, 5, peak, kernel));
}

void fit_compute(const std::vector<RankFigures>& ranks, ProbeReport& report) {
  DeviceSpec& device = report.cluster.device;
  report.matrices = matrices_of(ranks);
  for (const MatrixSample& sample : report.matrices) {
    double& peak = device.peak_flops[sample.dtype];
    peak = std::max(peak, sample.flops_per_second);
  }
  const MachineFigures& first = ranks.front().machine;
  const double add = median_over(ranks, [](const RankFigures& rank) { return rank.machine.add_bytes_per_second; });
  report.copy_bytes_per_second = median_over(ranks, [](const RankFigures& rank) { return rank.machine.copy_bytes_per_second; });
  device.memory_bytes_per_second = std::max(add, report.copy_bytes_per_second);
  device.constants["memory_efficiency"] = add / device.memory_bytes_per_second;
  if (first.multiprocessors > 0) device.constants["multiprocessors"] = first.multiprocessors;
  fit_device(report.cluster, report.matrices);
  fit_attention(ranks, device);
  if (first.converts_bf16) report.notes.emplace_back("bf16 products: this machine converts to fp32, no peak of their own");
  report.notes.push_back(fmt::format("attention's efficiencies come from one {} shape: {} tokens, heads of {}",
                                     name(first.attention.dtype), first.attention.sequence, first.attention.head_size));
}

bool in_level(const std::vector<RankFigures>& ranks, const LinkSample& sample, int level) {
  const bool same_node =
      ranks[static_cast<std::size_t>(sample.rank)].place.node == ranks[static_cast<std::size_t>(sample.peer)].place.node;
  return same_node == (level == 0);
}

// Share of a rank where all ranks of the level send at once.
double crowd_bytes_per_second(const std::vector<RankFigures>& ranks, int level, double latency_seconds) {
  std::vector<double> rates;
  for (const RankFigures& rank : ranks) {
    for (const CrowdSample& sample : rank.links.crowd) {
      if (sample.level != level) continue;
      rates.push_back(static_cast<double>(sample.bytes) / std::max(sample.seconds - latency_seconds, 1e-12));
    }
  }
  return median_of(std::move(rates));
}

// What sums over the level's ranks take, beside latency and bandwidth; the largest group's share of the bandwidth.
double fit_efficiency(ProbeReport& report, const std::string& level, const AlphaBeta& link, CollectiveAlgorithm algorithm) {
  LinkProfile profile;
  profile.ranks_per_node = 1 << 20;
  profile.in_node.latency_seconds = link.latency_seconds;
  profile.in_node.bytes_per_second = link.bytes_per_second;
  double efficiency = 1;
  int largest = 0;
  for (CollectiveSample& sample : report.collectives) {
    if (sample.level != level) continue;
    sample.predicted_seconds = expected_seconds(algorithm, CollectiveKind::all_reduce, sample.bytes, sample.ranks, profile);
    if (sample.ranks < largest) continue;
    largest = sample.ranks;
    efficiency = std::clamp(sample.predicted_seconds / sample.seconds, 0.01, 1.0);
  }
  return efficiency;
}

// Of each size the pair in the middle: a pair that was disturbed, or has a bad cable, does not describe its level.
std::vector<LinkSample> of_median_pairs(std::vector<LinkSample> samples) {
  std::ranges::sort(samples, [](const LinkSample& a, const LinkSample& b) {
    return std::tie(a.bytes, a.fitted_seconds) < std::tie(b.bytes, b.fitted_seconds);
  });
  std::vector<LinkSample> medians;
  for (auto begin = samples.begin(); begin != samples.end();) {
    const auto end = std::find_if(begin, samples.end(), [&](const LinkSample& sample) { return sample.bytes != begin->bytes; });
    medians.push_back(begin[(end - begin - 1) / 2]);
    begin = end;
  }
  return medians;
}

void fit_level(const std::vector<RankFigures>& ranks, int index, const ProbeOptions& options, ProbeReport& report) {
  std::vector<LinkSample> samples;
  std::ranges::copy_if(report.links, std::back_inserter(samples),
                       [&](const LinkSample& sample) { return in_level(ranks, sample, index); });
  if (samples.empty()) return;
  NetworkLevel level;
  level.name = index == 0 ? "node" : "network";
  const double copied = median_over(ranks, [](const RankFigures& rank) { return rank.machine.fastest_copy_bytes_per_second; });
  for (const LinkSample& sample : samples) {
    require_possible(static_cast<double>(sample.bytes) / sample.fitted_seconds, copied,
                     fmt::format("a message of {} bytes between ranks {} and {}", sample.bytes, sample.rank, sample.peer));
  }
  AlphaBeta link = fit_link(of_median_pairs(samples));
  const double crowd = crowd_bytes_per_second(ranks, index, link.latency_seconds);
  if (crowd > 0 && crowd < 0.95 * link.bytes_per_second) {
    report.notes.push_back(
        fmt::format("{}: {:.3g} GB/s of a pair alone, {:.3g} of each rank where all send at once, which counts", level.name,
                    link.bytes_per_second * 1e-9, crowd * 1e-9));
    link.bytes_per_second = crowd;
  }
  level.latency_seconds = link.latency_seconds;
  level.bytes_per_second = link.bytes_per_second;
  level.efficiency = fit_efficiency(report, level.name, link, options.world.algorithm);
  report.cluster.levels.push_back(std::move(level));
}

// A description in which a farther link is the faster one, or any is faster than memory, would not be read; messages that fit a
// cache are.
void limit_levels(ClusterSpec& cluster, std::vector<std::string>& notes) {
  double most = cluster.device.memory_bytes_per_second;
  for (NetworkLevel& level : cluster.levels) {
    if (level.bytes_per_second > most) {
      notes.push_back(fmt::format("{}: {:.3g} GB/s measured, stated as {:.3g}: no more than what is nearer", level.name,
                                  level.bytes_per_second * 1e-9, most * 1e-9));
      level.bytes_per_second = most;
    }
    most = level.bytes_per_second;
  }
}

void fit_levels(const std::vector<RankFigures>& ranks, const ProbeOptions& options, ProbeReport& report) {
  ClusterSpec& cluster = report.cluster;
  for (const RankFigures& rank : ranks) {
    cluster.devices_per_node = std::max(cluster.devices_per_node, rank.place.local + 1);
    report.links.insert(report.links.end(), rank.links.links.begin(), rank.links.links.end());
    report.collectives.insert(report.collectives.end(), rank.links.collectives.begin(), rank.links.collectives.end());
  }
  for (const int index : {0, 1}) fit_level(ranks, index, options, report);
  if (cluster.levels.empty()) {
    NetworkLevel memory;
    memory.name = "memory";
    memory.bytes_per_second = cluster.device.memory_bytes_per_second / 2;
    cluster.levels.push_back(memory);
    report.notes.emplace_back("one rank: no links were measured; half the bandwidth of memory stands for them");
  } else if (cluster.levels.size() == 1 && cluster.devices_per_node > 1) {
    report.notes.emplace_back("one node: links between nodes were not measured; those inside stand for all");
  }
  limit_levels(cluster, report.notes);
  if (cluster.levels.size() > 1) cluster.levels.front().devices = cluster.devices_per_node;
  if (!options.world.link && options.world.transport == "threads") {
    report.notes.emplace_back("ranks are threads: their sums go through shared memory, not by messages");
  }
}

void add_storage(const std::vector<RankFigures>& ranks, const ProbeOptions& options, ProbeReport& report) {
  StorageSpec& storage = report.cluster.storage;
  std::vector<double> read, write;
  for (const RankFigures& rank : ranks) {
    for (const StorageSample& sample : rank.storage) {
      const double copied = rank.machine.fastest_copy_bytes_per_second;
      require_possible(sample.read_bytes_per_second, copied, "reading from " + options.storage_folder);
      require_possible(sample.write_bytes_per_second, copied, "writing to " + options.storage_folder);
      read.push_back(sample.read_bytes_per_second);
      write.push_back(sample.write_bytes_per_second);
      storage.write_bytes_per_second += sample.write_bytes_per_second;
      if (!sample.direct) {
        report.notes.push_back(fmt::format("storage of {}: no direct reads there; some may have come from memory", sample.host));
      }
      report.storage.push_back(sample);
    }
  }
  storage.read_bytes_per_second_per_node = median_of(read);
  storage.write_bytes_per_second_per_node = median_of(write);
  const double snapshot = median_over(ranks, [](const RankFigures& rank) { return rank.machine.snapshot_bytes_per_second; });
  storage.snapshot_bytes_per_second = snapshot > 0 ? snapshot : report.copy_bytes_per_second / 2;
  if (read.empty()) report.notes.emplace_back("storage was not measured: --storage FOLDER does");
}

void add_inventory(const std::vector<RankFigures>& ranks, ProbeReport& report) {
  std::set<std::string> hosts;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankFigures& rank = ranks[i];
    if (hosts.insert(rank.node.host).second) report.nodes.push_back(rank.node);
    double peak = 0;
    for (const MatrixSample& sample : rank.machine.matrices) {
      if (sample.dtype == "fp32") peak = std::max(peak, sample.flops_per_second);
    }
    // What the rank gets of its core is what its peers wait for.
    const double share = rank.machine.core_share;
    report.slowest_first.push_back({static_cast<int>(i), rank.node.host, share * peak, share * rank.machine.add_bytes_per_second,
                                    rank.links.message_seconds, 1});
    if (share < 0.9) {
      report.notes.push_back(
          fmt::format("rank {} on {} had {:.0f} % of its core: something else runs there", i, rank.node.host, 100 * share));
    }
  }
  rank_speeds(report.slowest_first);
  const NodeInventory& node = report.nodes.front();
  ClusterSpec& cluster = report.cluster;
  cluster.name = node.host;
  const MachineFigures& machine = ranks.front().machine;
  if (!machine.gpu.empty()) {
    cluster.device.name = machine.gpu;
    cluster.device.memory_bytes = machine.gpu_memory_bytes;
    report.notes.emplace_back("links carried buffers of the hosts' memory: GPUs that reach each other directly have faster ones");
    return;
  }
  cluster.device.name = fmt::format("{}, one thread", node.cpu.empty() ? "CPU" : node.cpu);
  cluster.device.memory_bytes = node.memory_bytes / cluster.devices_per_node;
  if (!node.gpus.empty()) report.notes.emplace_back("GPUs are listed, not measured: --backend cuda does");
  const auto on_host = std::ranges::count(ranks, node.host, [](const RankFigures& rank) { return rank.node.host; });
  if (on_host > node.cores) {
    report.notes.push_back(
        fmt::format("{} ranks on {} cores took turns: products and memory are those of one core each", on_host, node.cores));
  }
}

// A dilated link is slow on the wall; on its own clock everything is faster by the dilation, computing too.
void undilate(const ProbeOptions& options, ProbeReport& report) {
  if (!options.world.link || options.world.link->dilation == 1) return;
  const double dilation = report.dilation = options.world.link->dilation;
  ClusterSpec& cluster = report.cluster;
  for (auto& [dtype, flops] : cluster.device.peak_flops) flops *= dilation;
  cluster.device.memory_bytes_per_second *= dilation;
  cluster.device.constants["kernel_seconds"] /= dilation;
  for (NetworkLevel& level : cluster.levels) {
    level.latency_seconds /= dilation;
    level.bytes_per_second *= dilation;
  }
  for (double StorageSpec::*rate : {&StorageSpec::read_bytes_per_second_per_node, &StorageSpec::write_bytes_per_second_per_node,
                                    &StorageSpec::write_bytes_per_second, &StorageSpec::snapshot_bytes_per_second}) {
    cluster.storage.*rate *= dilation;
  }
  report.notes.push_back(
      fmt::format("the link is dilated {:g} x: the cluster is described on the link's clock, on which this machine "
                  "computes {:g} x as fast; samples are on the wall's",
                  dilation, dilation));
}

}  // namespace

ProbeReport assemble(const std::vector<RankFigures>& ranks, const ProbeOptions& options) {
  ProbeReport report;
  fit_compute(ranks, report);
  fit_levels(ranks, options, report);
  add_storage(ranks, options, report);
  add_inventory(ranks, report);
  undilate(options, report);
  report.cluster.description = fmt::format("measured by tandem probe: {} ranks, {}, {} node{}", ranks.size(),
                                           options.world.describe(), report.nodes.size(), report.nodes.size() == 1 ? "" : "s");
  report.cluster.sources = {"tandem probe on " + report.cluster.name};
  return report;
}

}  // namespace tandem::probing
