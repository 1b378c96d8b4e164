// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/command.h"
#include "cli/job.h"
#include "cli/output.h"
#include "cli/run_options.h"
#include "cli/terminal.h"
#include "optimized/machine.h"
#include "optimized/probe/probe.h"

namespace tandem {
namespace {

struct ProbeArguments {
  std::string backend = "cpu";
  WorldArguments world;
  int ranks = 0;
  double seconds = 20;
  std::string storage, out, json;
};

// Of a link both of its levels, of a job all of its processes.
int rank_count(const ProbeArguments& arguments, const WorldSettings& settings, const Job& job) {
  if (arguments.ranks > 0) return arguments.ranks;
  if (settings.transport != "threads") return job.processes();
  constexpr int kMost = 9;
  return settings.link ? std::clamp(settings.link->ranks_per_node + 1, 2, kMost) : 2;
}

std::string rate(double bytes_per_second) { return fmt::format("{:.3g} GB/s", bytes_per_second * 1e-9); }

std::string nodes_table(const ProbeReport& report) {
  TextTable table({"node", "cpu", "cores", "memory", "gpus", "network", "driver", "kernel"});
  for (const NodeInventory& node : report.nodes) {
    table.add({node.host, node.cpu, fmt::to_string(node.cores), human_bytes(static_cast<std::int64_t>(node.memory_bytes)),
               node.gpus.empty() ? "none" : fmt::format("{} x {}", node.gpus.size(), node.gpus.front()),
               node.nics.empty() ? "none" : fmt::format("{}", fmt::join(node.nics, ", ")),
               node.driver.empty() ? "none" : node.driver, node.kernel});
  }
  return table.render(output_style());
}

std::string matrices_table(const ProbeReport& report) {
  TextTable table({"product", "m", "n", "k", "measured", "GFLOP/s", "predicted", "off", "used to fit"});
  for (const MatrixSample& sample : report.matrices) {
    table.add({sample.dtype, fmt::to_string(sample.m), fmt::to_string(sample.n), fmt::to_string(sample.k),
               human_seconds(sample.seconds), fmt::format("{:.0f}", sample.flops_per_second * 1e-9),
               human_seconds(sample.predicted_seconds),
               fmt::format("{:+.1f} %", 100 * (sample.predicted_seconds / sample.seconds - 1)), sample.fitted ? "yes" : "no"});
  }
  return table.render(output_style());
}

std::string levels_table(const ProbeReport& report) {
  TextTable table({"link", "devices", "latency", "bandwidth", "of it in sums"});
  for (const NetworkLevel& level : report.cluster.levels) {
    table.add({level.name, level.devices == 0 ? "all" : fmt::to_string(level.devices),
               fmt::format("{:.3g} us", level.latency_seconds * 1e6), rate(level.bytes_per_second),
               human_share(level.efficiency)});
  }
  return table.render(output_style());
}

std::string sums_table(const ProbeReport& report) {
  if (report.collectives.empty()) return {};
  TextTable table({"sum", "ranks", "bytes", "measured", "by latency and bandwidth"});
  for (const CollectiveSample& sample : report.collectives) {
    table.add({sample.level, fmt::to_string(sample.ranks), human_bytes(sample.bytes), human_seconds(sample.seconds),
               human_seconds(sample.predicted_seconds)});
  }
  return table.render(output_style());
}

std::string ranks_table(const ProbeReport& report) {
  constexpr std::size_t kMost = 8;
  TextTable table({"slowest first: rank", "node", "GFLOP/s", "memory", "message", "times the median"});
  for (const RankSpeed& rank : report.slowest_first) {
    table.add({fmt::to_string(rank.rank), rank.host, fmt::format("{:.0f}", rank.matrix_flops_per_second * 1e-9),
               rate(rank.memory_bytes_per_second), rank.message_seconds > 0 ? human_seconds(rank.message_seconds) : "-",
               fmt::format("{:.2f}", rank.slowness)});
    if (&rank - report.slowest_first.data() + 1 == static_cast<std::ptrdiff_t>(kMost)) break;
  }
  return table.render(output_style());
}

// How far off the products are that no constant was fitted to.
std::string check_line(const ProbeReport& report) {
  std::map<std::string, double> worst;
  for (const MatrixSample& sample : report.matrices) {
    if (!sample.fitted) {
      worst[sample.dtype] = std::max(worst[sample.dtype], std::abs(sample.predicted_seconds / sample.seconds - 1));
    }
  }
  std::vector<std::string> words;
  words.reserve(worst.size());
  for (const auto& [dtype, off] : worst) words.push_back(fmt::format("{} within {}", dtype, human_share(off)));
  return fmt::format("check: products that were not used to fit are predicted {}\n", fmt::join(words, ", "));
}

void print_report(const ProbeReport& report) {
  const ClusterSpec& cluster = report.cluster;
  fmt::print("{}\n{}{}\n", nodes_table(report), matrices_table(report), check_line(report));
  fmt::print("one device (a rank): {} of memory, {}", human_bytes(static_cast<std::int64_t>(cluster.device.memory_bytes)),
             rate(cluster.device.memory_bytes_per_second));
  for (const auto& [dtype, flops] : cluster.device.peak_flops) fmt::print(", {} {:.0f} GFLOP/s", dtype, flops * 1e-9);
  fmt::print("\n\n{}\n{}{}{}", levels_table(report), sums_table(report), report.collectives.empty() ? "" : "\n",
             ranks_table(report));
  for (const StorageSample& sample : report.storage) {
    fmt::print("storage of {}: read {}, write {} (made durable)\n", sample.host, rate(sample.read_bytes_per_second),
               rate(sample.write_bytes_per_second));
  }
  for (const std::string& note : report.notes) fmt::print("note: {}\n", note);
}

int probe_action(const ProbeArguments& arguments) {
  ProbeOptions options;
  options.world = to_world_settings(arguments.world, arguments.backend);
  require_backend(arguments.backend);
  if (arguments.backend == "simt") throw InputError("--backend simt: an emulated GPU has no speed to measure");
  options.backend = arguments.backend;
  const Job job(options.world);
  job.on_leader([&] {
    require_writable(arguments.out, "--out");
    require_writable(arguments.json, "--json");
    require_folder(arguments.storage, "--storage", "make it on the storage to measure, on every node, or leave --storage out");
  });
  options.ranks = rank_count(arguments, options.world, job);
  options.seconds = arguments.seconds;
  options.storage_folder = arguments.storage;
  if (job.leads()) fmt::print(stderr, "probing {} ranks, about {:.0f} s\n", options.ranks, options.seconds);
  const ProbeReport report = probe(options);
  job.on_leader([&] {
    const std::string text = to_json(report);
    if (arguments.out != "-" && arguments.json != "-") print_report(report);
    if (!arguments.out.empty()) write_output(arguments.out, text);
    if (!arguments.json.empty()) write_output(arguments.json, text);
  });
  return kGood;
}

}  // namespace

void add_probe_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("probe", "Measure this machine, or the job, into a cluster file for plan and scale");
  const auto arguments = std::make_shared<ProbeArguments>();
  command->add_option("--out", arguments->out, "write the cluster file; - is standard output")->required();
  command->add_option("--ranks", arguments->ranks, "ranks to measure with; default: the job's processes, or 2 threads")
      ->check(at_least_one);
  command->add_option("--backend", arguments->backend, "cpu; cuda: products and memory of the GPUs")->capture_default_str();
  add_world_options(*command, arguments->world);
  command->add_option("--seconds", arguments->seconds, "time for all measurements")
      ->capture_default_str()
      ->check(positive_number);
  command->add_option("--storage", arguments->storage, "measure reading and writing in this folder, on every node")
      ->check(not_empty);
  command->add_option("--json", arguments->json, "the same file once more; - is standard output");
  command->footer(
      "Example:\n  tandem probe --out build/machine.json --seconds 5\n"
      "A job:\n  mpirun -n 4 tandem probe --transport mpi --out build/job.json --seconds 5");
  command->callback([&line, arguments] { line.action = [arguments] { return probe_action(*arguments); }; });
}

}  // namespace tandem
