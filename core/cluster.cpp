// SPDX-License-Identifier: Apache-2.0
#include "core/cluster.h"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/json_field.h"
#include "core/nearest_name.h"
#include "core/shipped_files.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

void only(const JsonField& field, const std::vector<std::string>& known) {
  for (const auto& [key, value] : field.value().items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const auto nearest = nearest_name(key, known);
    field.refuse(fmt::format("has '{}', which is unknown{}", key, nearest ? fmt::format("; did you mean '{}'?", *nearest) : ""));
  }
}

double amount_or(const JsonField& field, const char* key, double otherwise) {
  return field.has(key) ? field[key].amount() : otherwise;
}

double positive(const JsonField& field, const char* key) {
  const JsonField member = field[key];
  const double value = member.amount();
  member.require(value > 0, "must be above 0");
  return value;
}

double at_most_one(const JsonField& field, const char* key, double otherwise) {
  const double value = amount_or(field, key, otherwise);
  if (value > 1) field[key].refuse(fmt::format("is {:g}: nothing is more efficient than 1", value));
  return value;
}

int count_of(const JsonField& field, const char* key, int otherwise) {
  if (!field.has(key)) return otherwise;
  const std::int64_t value = field[key].count();
  field[key].require(value <= std::numeric_limits<int>::max(), "is too large");
  return static_cast<int>(value);
}

const std::vector<std::string>& operand_types() {
  static const std::vector<std::string> kTypes = {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "mxfp8", "nvfp4"};
  return kTypes;
}

/// Names of constants that are shares of something that cannot be passed.
bool is_share(std::string_view constant) { return constant.find("efficiency") != std::string_view::npos; }

DeviceSpec device_from(const JsonField& field) {
  only(field, {"name", "peak_flops", "memory_bytes", "memory_bytes_per_second", "constants"});
  DeviceSpec device;
  device.name = field["name"].text();
  const JsonField peaks = field["peak_flops"];
  peaks.require(peaks.value().is_object() && !peaks.value().empty(), "must be an object that names at least one operand type");
  only(peaks, operand_types());
  for (const auto& [type, value] : peaks.value().items()) device.peak_flops[type] = positive(peaks, type.c_str());
  device.memory_bytes = positive(field, "memory_bytes");
  device.memory_bytes_per_second = positive(field, "memory_bytes_per_second");
  if (!field.has("constants")) return device;
  const JsonField constants = field["constants"];
  std::vector<std::string> known = device_constant_names();
  for (const std::string& type : operand_types()) {
    for (const std::string& name : device_constant_names_by_type()) known.push_back(name + "." + type);
  }
  only(constants, known);
  for (const auto& [name, value] : constants.value().items()) {
    device.constants[name] = is_share(name) ? at_most_one(constants, name.c_str(), 1) : constants[name.c_str()].amount();
    const bool divides = is_share(name) || name == "multiprocessors" || name == "tile_scale";
    constants[name.c_str()].require(!divides || device.constants[name] > 0, "is 0: nothing would ever be done");
  }
  return device;
}

NetworkLevel level_from(const JsonField& field) {
  only(field, {"name", "devices", "bytes_per_second", "latency_seconds", "efficiency", "oversubscription", "jitter"});
  NetworkLevel level;
  level.name = field["name"].text();
  level.devices = count_of(field, "devices", 0);
  level.bytes_per_second = positive(field, "bytes_per_second");
  level.latency_seconds = amount_or(field, "latency_seconds", 0);
  field.require(level.latency_seconds <= 60, "has a latency beyond a minute: it is in seconds");
  level.efficiency = at_most_one(field, "efficiency", 1);
  level.oversubscription = amount_or(field, "oversubscription", 1);
  field.require(level.efficiency > 0, "has efficiency 0: nothing would ever arrive");
  field.require(level.oversubscription >= 1, "has an oversubscription below 1");
  level.jitter = at_most_one(field, "jitter", 0);
  return level;
}

std::vector<NetworkLevel> levels_from(const JsonField& field, int devices_per_node, const DeviceSpec& device) {
  field.require(field.size() > 0, "must name at least one level of links");
  std::vector<NetworkLevel> levels;
  for (const JsonField& element : field.elements()) {
    const NetworkLevel level = level_from(element);
    const bool last = levels.size() + 1 == field.size();
    if (last) {
      element.require(level.devices == 0, "is the last level, which joins all devices: its 'devices' must be 0 or left out");
    } else {
      element.require(level.devices > 0, "is not the last level: 'devices' must say how many it joins");
      element.require(level.devices % devices_per_node == 0 || devices_per_node % level.devices == 0,
                      fmt::format("joins {} devices, which do not go with nodes of {}", level.devices, devices_per_node));
    }
    if (level.bytes_per_second > device.memory_bytes_per_second) {
      element.refuse(fmt::format("moves {:g} B/s, more than the device's memory ({:g} B/s)", level.bytes_per_second,
                                 device.memory_bytes_per_second));
    }
    if (!levels.empty()) {
      const NetworkLevel& nearer = levels.back();
      element.require(last || (level.devices > nearer.devices && level.devices % nearer.devices == 0),
                      fmt::format("joins {} devices: levels must grow, each a multiple of the one before", level.devices));
      element.require(level.bytes_per_second <= nearer.bytes_per_second,
                      fmt::format("is farther than '{}' but faster; bytes_per_second is one device's share", nearer.name));
    }
    levels.push_back(level);
  }
  return levels;
}

StorageSpec storage_from(const JsonField& field) {
  only(field, {"read_bytes_per_second_per_node", "write_bytes_per_second_per_node", "write_bytes_per_second",
               "snapshot_bytes_per_second"});
  return {amount_or(field, "read_bytes_per_second_per_node", 0), amount_or(field, "write_bytes_per_second_per_node", 0),
          amount_or(field, "write_bytes_per_second", 0), amount_or(field, "snapshot_bytes_per_second", 0)};
}

Json level_to_json(const NetworkLevel& level) {
  Json json = {{"name", level.name}, {"devices", level.devices}, {"bytes_per_second", level.bytes_per_second}};
  json["latency_seconds"] = level.latency_seconds;
  json["efficiency"] = level.efficiency;
  json["oversubscription"] = level.oversubscription;
  json["jitter"] = level.jitter;
  return json;
}

}  // namespace

const std::vector<std::string>& device_constant_names() {
  static const std::vector<std::string> kNames = {"multiprocessors",
                                                  "tile_scale",
                                                  "memory_efficiency",
                                                  "kernel_seconds",
                                                  "host_kernel_seconds",
                                                  "attention_forward_efficiency",
                                                  "attention_backward_efficiency",
                                                  "ported_attention_efficiency",
                                                  "misaligned_efficiency",
                                                  "overlap_interference",
                                                  "tensor_overlap_efficiency",
                                                  "reserved_bytes"};
  return kNames;
}

const std::vector<std::string>& device_constant_names_by_type() {
  static const std::vector<std::string> kNames = {"matmul_efficiency", "matmul_half_depth"};
  return kNames;
}

ClusterSpec cluster_from_json(std::string_view text, std::string_view source_name) {
  const std::string file(source_name);
  const nlohmann::json json = parse_json_object(std::string(text), file);
  const JsonField root(file, json);
  only(root,
       {"name", "description", "sources", "device", "devices_per_node", "nodes", "levels", "storage", "reliability", "probe"});
  ClusterSpec cluster;
  cluster.name = root["name"].text();
  cluster.description = root.has("description") ? root["description"].text() : "";
  if (root.has("sources")) {
    for (const JsonField& source : root["sources"].elements()) cluster.sources.push_back(source.text());
  }
  cluster.device = device_from(root["device"]);
  cluster.devices_per_node = count_of(root, "devices_per_node", 1);
  if (cluster.devices_per_node < 1) root["devices_per_node"].refuse("must be at least 1");
  cluster.nodes = count_of(root, "nodes", 0);
  cluster.levels = levels_from(root["levels"], cluster.devices_per_node, cluster.device);
  if (root.has("storage")) cluster.storage = storage_from(root["storage"]);
  if (root.has("reliability")) {
    const JsonField field = root["reliability"];
    only(field, {"node_failure_hours", "restart_seconds"});
    cluster.reliability = {amount_or(field, "node_failure_hours", 0), amount_or(field, "restart_seconds", 0)};
  }
  return cluster;
}

ClusterSpec read_cluster(const std::string& path_or_name) {
  const NamedText file = read_file_or_shipped("cluster", "clusters", path_or_name);
  return cluster_from_json(file.text, file.source_name);
}

std::vector<std::string> shipped_clusters() { return shipped_names("clusters"); }

std::string to_json(const ClusterSpec& cluster) {
  Json json = {{"name", cluster.name}, {"description", cluster.description}, {"sources", cluster.sources}};
  json["device"] = {{"name", cluster.device.name},
                    {"peak_flops", cluster.device.peak_flops},
                    {"memory_bytes", cluster.device.memory_bytes},
                    {"memory_bytes_per_second", cluster.device.memory_bytes_per_second},
                    {"constants", cluster.device.constants}};
  json["devices_per_node"] = cluster.devices_per_node;
  json["nodes"] = cluster.nodes;
  json["levels"] = Json::array();
  for (const NetworkLevel& level : cluster.levels) json["levels"].push_back(level_to_json(level));
  json["storage"] = {{"read_bytes_per_second_per_node", cluster.storage.read_bytes_per_second_per_node},
                     {"write_bytes_per_second_per_node", cluster.storage.write_bytes_per_second_per_node},
                     {"write_bytes_per_second", cluster.storage.write_bytes_per_second},
                     {"snapshot_bytes_per_second", cluster.storage.snapshot_bytes_per_second}};
  json["reliability"] = {{"node_failure_hours", cluster.reliability.node_failure_hours},
                         {"restart_seconds", cluster.reliability.restart_seconds}};
  return json.dump(2) + "\n";
}

}  // namespace tandem
