// SPDX-License-Identifier: Apache-2.0
#include "core/world_settings.h"

#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(CollectiveAlgorithm, NamesAreFoundAgain) {
  for (const CollectiveAlgorithm algorithm : all_algorithms()) EXPECT_EQ(find_algorithm(name(algorithm)), algorithm);
  EXPECT_EQ(find_algorithm("rign"), std::nullopt);
  EXPECT_EQ(all_algorithms().size(), 6U);
}

TEST(LinkProfile, LevelIsThatOfTheNodesAndDilated) {
  LinkProfile link;
  link.ranks_per_node = 2;
  link.in_node = {.latency_seconds = 1e-6, .bytes_per_second = 8e9};
  link.between_nodes = {.latency_seconds = 5e-6, .bytes_per_second = 1e9, .jitter = 0.5};
  link.dilation = 10;

  EXPECT_DOUBLE_EQ(link.level(2, 3).latency_seconds, 10e-6);
  EXPECT_DOUBLE_EQ(link.level(2, 3).bytes_per_second, 8e8);
  EXPECT_DOUBLE_EQ(link.level(1, 2).latency_seconds, 50e-6);
  EXPECT_DOUBLE_EQ(link.level(1, 2).bytes_per_second, 1e8);
  EXPECT_EQ(link.level(1, 2).jitter, 0.5);
  EXPECT_TRUE(link.is_shaped());
  EXPECT_FALSE(LinkProfile{}.is_shaped());
}

TEST(LinkProfiles, ShippedOnesAreSlowerThanMemoryUnderTheirDilation) {
  const std::vector<std::string> names = shipped_link_profiles();
  ASSERT_GE(names.size(), 5U);
  for (const std::string& name : names) {
    const LinkProfile link = read_link_profile(name);
    EXPECT_EQ(link.name, name);
    EXPECT_GT(link.description.size(), 20U) << name;
    if (name == "unshaped") {
      EXPECT_FALSE(link.is_shaped());
      continue;
    }
    EXPECT_TRUE(link.is_shaped()) << name;
    for (const int other : {1, 4096}) EXPECT_LE(link.level(0, other).bytes_per_second, 1e9) << name;
  }
}

TEST(LinkProfiles, AFileIsReadWithItsDefaults) {
  const TestFolder folder;
  const auto path = folder.path() / "own.json";
  std::ofstream(path) << R"({"name": "own", "description": "d", "in_node": {"latency_seconds": 1e-6, "bytes_per_second": 1e9},
                          "between_nodes": {"latency_seconds": 2e-6, "bytes_per_second": 5e8, "jitter": 0.25}})";

  const LinkProfile link = read_link_profile(path.string());

  EXPECT_EQ(link.name, "own");
  EXPECT_EQ(link.ranks_per_node, 1);
  EXPECT_EQ(link.dilation, 1);
  EXPECT_EQ(link.between_nodes.jitter, 0.25);
}

TEST(LinkProfiles, WhatIsWrongIsSaidWithFileAndField) {
  const TestFolder folder;
  const auto path = folder.path() / "own.json";
  const auto told = [&](const std::string& json) {
    std::ofstream(path) << json;
    const std::string text = refusal([&] { (void)read_link_profile(path.string()); });
    EXPECT_TRUE(contains(text, path.string())) << text;
    return text;
  };
  const std::string level = R"({"latency_seconds": 1e-6, "bytes_per_second": 1e9})";
  const std::string begin = R"({"name": "n", "description": "d", "in_node": )" + level;

  EXPECT_TRUE(contains(told("{"), "not JSON"));
  EXPECT_TRUE(contains(told("[]"), "object"));
  EXPECT_TRUE(contains(told(begin + "}"), "between_nodes is missing"));
  EXPECT_TRUE(contains(told(begin + R"(, "between_nodes": {"latency_seconds": -1, "bytes_per_second": 1}})"),
                       "between_nodes.latency_seconds must be"));
  EXPECT_TRUE(contains(told(begin + R"(, "between_nodes": {"latency": 1}})"), "between_nodes.latency is unknown"));
  EXPECT_TRUE(contains(told(begin + R"(, "between_nodes": )" + level + R"(, "dilation": 0})"), "dilation must be above 0"));
  EXPECT_TRUE(contains(told(begin + R"(, "between_nodes": )" + level + R"(, "ranks_per_node": 1.5})"), "ranks_per_node must be"));
}

TEST(ParseLink, TakesOverridesAfterTheName) {
  EXPECT_EQ(parse_link("none"), std::nullopt);
  const auto link = parse_link("pcie-100gbe,dilation=7,jitter=0.5,ranks_per_node=2");

  ASSERT_TRUE(link.has_value());
  LinkProfile expected = read_link_profile("pcie-100gbe");
  expected.dilation = 7;
  expected.in_node.jitter = expected.between_nodes.jitter = 0.5;
  expected.ranks_per_node = 2;
  EXPECT_EQ(*link, expected);
}

TEST(ParseLink, RefusesWhatItDoesNotKnow) {
  EXPECT_TRUE(contains(refusal([] { (void)parse_link("pcie-10gbe"); }), "pcie-100gbe"));
  EXPECT_TRUE(contains(refusal([] { (void)parse_link("wan,speed=3"); }), "speed is unknown"));
  EXPECT_TRUE(contains(refusal([] { (void)parse_link("wan,dilation=-3"); }), "dilation=-3"));
  EXPECT_TRUE(contains(refusal([] { (void)parse_link("wan,jitter=much"); }), "jitter=much"));
  EXPECT_TRUE(contains(refusal([] { (void)parse_link("wan,"); }), "is unknown"));
}

TEST(WorldSettings, AreDescribedForResults) {
  WorldSettings settings;
  EXPECT_EQ(settings.describe(), "threads");
  settings.link = parse_link("pcie-100gbe,dilation=20");
  settings.adversary = AdversaryScript{.seed = 3};
  EXPECT_EQ(settings.describe(), "threads, link pcie-100gbe dilated 20 x, adversary 3");
  settings = {.transport = "mpi", .algorithm = CollectiveAlgorithm::ring};
  EXPECT_EQ(settings.describe(), "mpi, algorithm ring");
}

}  // namespace
}  // namespace tandem
