// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// One accelerator (or one CPU socket), by what it could do and by what share of that programs reach. Shares are constants of the
/// hardware, measured (`tandem probe`) or calibrated over many published runs (docs/techniques/scaling.md says which, and how);
/// none belongs to a single run.
struct DeviceSpec {
  std::string name;                          ///< "A100-80GB"
  std::map<std::string, double> peak_flops;  ///< dense FLOP/s by operand type: fp32, tf32, bf16, fp8, nvfp4, ...
  double memory_bytes = 0;
  double memory_bytes_per_second = 0;
  /// Constants of the cost model by name, each with its meaning there (optimized/scaling/cost_model.h); an absent one has the
  /// model's default.
  std::map<std::string, double> constants;
};

/// Names of DeviceSpec::constants; those "by type" are followed by a point and an operand type: "matmul_efficiency.bf16".
[[nodiscard]] const std::vector<std::string>& device_constant_names();
[[nodiscard]] const std::vector<std::string>& device_constant_names_by_type();

/// Devices that reach each other over one kind of link: the devices of one level are dealt in runs of `devices` (in-node first,
/// then a switch domain, then the whole machine).
struct NetworkLevel {
  std::string name;             ///< "nvlink", "infiniband"
  int devices = 0;              ///< of one island at this level; 0: all
  double bytes_per_second = 0;  ///< one way, of one device's share of the link when all devices of an island use it at once
  double latency_seconds = 0;   ///< of one message
  double efficiency = 1;        ///< share of bytes_per_second that large collectives reach
  double oversubscription = 1;  ///< of this level's switches: how many times less than every device at full speed they carry
  /// Part of a step by which ranks wait for the slowest one, for each doubling of the islands below this level.
  double jitter = 0;
};

/// Where training data is read from and checkpoints are written to. 0: not known, takes no time.
struct StorageSpec {
  double read_bytes_per_second_per_node = 0;
  double write_bytes_per_second_per_node = 0;
  double write_bytes_per_second = 0;     ///< of all nodes together
  double snapshot_bytes_per_second = 0;  ///< of one device into host memory
};

struct ReliabilitySpec {
  double node_failure_hours = 0;  ///< mean time between failures of one node; 0: not known, nothing fails
  double restart_seconds = 0;     ///< from a failure to the first new step, without lost work
};

/// A described machine: results/clusters/*.json, or what `tandem probe` measured.
struct ClusterSpec {
  std::string name, description;
  std::vector<std::string> sources;  ///< of the figures
  DeviceSpec device;
  int devices_per_node = 1;
  int nodes = 0;                     ///< 0: as many as asked for
  std::vector<NetworkLevel> levels;  ///< nearest first; the last one has devices = 0
  StorageSpec storage;
  ReliabilitySpec reliability;
};

/// Format: docs/formats.md. Throws InputError naming file and field: unknown key (with the nearest known one), wrong type, a
/// figure that is not possible (no level, levels not growing, efficiency beyond 1, bandwidth above what the description states).
[[nodiscard]] ClusterSpec cluster_from_json(std::string_view text, std::string_view source_name);
/// A file, or the name of one of results/clusters/*.json, which travel inside the program.
[[nodiscard]] ClusterSpec read_cluster(const std::string& path_or_name);
[[nodiscard]] std::vector<std::string> shipped_clusters();
[[nodiscard]] std::string to_json(const ClusterSpec& cluster);

}  // namespace tandem
