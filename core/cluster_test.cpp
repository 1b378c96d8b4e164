// SPDX-License-Identifier: Apache-2.0
#include "core/cluster.h"

#include <string>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

std::string with(std::string from, const std::string& to) {
  std::string text = R"({"name": "two", "description": "", "sources": ["a"], "devices_per_node": 8, "nodes": 2,
    "device": {"name": "D", "peak_flops": {"bf16": 1e14}, "memory_bytes": 8e10, "memory_bytes_per_second": 1e12,
               "constants": {"memory_efficiency": 0.8, "matmul_efficiency.bf16": 0.7}},
    "levels": [{"name": "near", "devices": 8, "bytes_per_second": 3e11, "latency_seconds": 2e-6, "efficiency": 0.8},
               {"name": "far", "bytes_per_second": 2e10}],
    "storage": {"write_bytes_per_second": 1e9}, "reliability": {"node_failure_hours": 100}})";
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string refusal(const std::string& from, const std::string& to) {
  try {
    static_cast<void>(cluster_from_json(with(from, to), "two.json"));
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Cluster, IsReadAsWritten) {
  const ClusterSpec cluster = cluster_from_json(with("two", "two"), "two.json");

  EXPECT_EQ(cluster.nodes, 2);
  EXPECT_EQ(cluster.device.peak_flops.at("bf16"), 1e14);
  EXPECT_EQ(cluster.device.constants.at("matmul_efficiency.bf16"), 0.7);
  ASSERT_EQ(cluster.levels.size(), 2U);
  EXPECT_EQ(cluster.levels[0].latency_seconds, 2e-6);
  EXPECT_EQ(cluster.levels[1].devices, 0);
  EXPECT_EQ(cluster.levels[1].efficiency, 1);
  EXPECT_EQ(cluster.reliability.node_failure_hours, 100);
}

TEST(Cluster, EveryShippedOneSurvivesARoundTrip) {
  const std::vector<std::string> names = shipped_clusters();

  EXPECT_GE(names.size(), 10U);
  for (const std::string& name : names) {
    const ClusterSpec cluster = read_cluster(name);
    EXPECT_EQ(cluster.name, name);
    EXPECT_FALSE(cluster.sources.empty()) << name;
    EXPECT_EQ(to_json(cluster_from_json(to_json(cluster), name)), to_json(cluster)) << name;
  }
}

TEST(Cluster, RefusesWhatIsUnknownAndNamesTheNearest) {
  EXPECT_EQ(refusal("\"nodes\"", "\"node\""), "two.json: has 'node', which is unknown; did you mean 'nodes'?");
  EXPECT_NE(refusal("memory_efficiency", "memory_eficiency").find("did you mean 'memory_efficiency'"), std::string::npos);
  EXPECT_NE(refusal("\"bf16\"", "\"bf15\"").find("did you mean 'bf16'"), std::string::npos);
  EXPECT_THROW(static_cast<void>(read_cluster("dgx-a10")), InputError);
  try {
    static_cast<void>(read_cluster("dgx-a10"));
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean dgx-a100?"), std::string::npos) << error.what();
  }
}

TEST(Cluster, RefusesANumberThatNoDoubleHolds) {
  EXPECT_THROW((void)cluster_from_json(R"({"name": 1e999999})", "huge.json"), InputError);
}

TEST(Cluster, RefusesFiguresThatCannotBe) {
  EXPECT_NE(refusal("\"efficiency\": 0.8", "\"efficiency\": 1.2").find("levels[0].efficiency"), std::string::npos);
  EXPECT_NE(refusal("\"memory_efficiency\": 0.8", "\"memory_efficiency\": 0").find("is 0"), std::string::npos);
  EXPECT_NE(refusal("\"latency_seconds\": 2e-6", "\"latency_seconds\": 1e300").find("a minute"), std::string::npos);
  EXPECT_NE(refusal("\"memory_efficiency\": 0.8", "\"memory_efficiency\": 1.2").find("nothing is more efficient than 1"),
            std::string::npos);
  EXPECT_NE(refusal("2e10", "4e11").find("farther than 'near' but faster"), std::string::npos);
  EXPECT_NE(refusal("3e11", "3e12").find("more than the device's memory"), std::string::npos);
  EXPECT_NE(refusal("\"devices\": 8", "\"devices\": 0").find("levels[0]"), std::string::npos);
  EXPECT_NE(refusal("\"devices\": 8", "\"devices\": 3").find("do not go with nodes of 8"), std::string::npos);
  EXPECT_NE(refusal("\"name\": \"far\"", "\"name\": \"far\", \"devices\": 16").find("last level"), std::string::npos);
  EXPECT_NE(refusal("{\"bf16\": 1e14}", "{}").find("peak_flops"), std::string::npos);
  EXPECT_NE(refusal("8e10", "0").find("must be above 0"), std::string::npos);
  EXPECT_NE(refusal("2e-6", "-2e-6").find("latency_seconds"), std::string::npos);
  EXPECT_NE(
      refusal("{\"name\": \"far\", \"bytes_per_second\": 2e10}",
              "{\"name\": \"mid\", \"devices\": 8, \"bytes_per_second\": 2e10}, {\"name\": \"far\", \"bytes_per_second\": 1e10}")
          .find("levels must grow"),
      std::string::npos);
}

}  // namespace
}  // namespace tandem
