// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

/// A step to be played, as `tandem scale --export-programs` writes it (docs/formats.md).
struct StepLine {
  enum class Kind : std::uint8_t { compute, send, receive, collective, background, wait };
  Kind kind = Kind::compute;
  double seconds = 0;      ///< compute
  double bytes = 0;        ///< send, receive, collective, background
  int number = 0;          ///< send, receive: pipeline stage; wait: which of this program's background operations
  std::string collective;  ///< all_reduce, ...
  std::string axis;
};

struct StepLevel {
  int devices = 0;  ///< of one island; 0: all
  double bytes_per_second = 0, latency_seconds = 0;
};

struct StepSchedule {
  double predicted_seconds = 0;
  int ranks = 0;
  std::vector<StepLevel> levels;                                     ///< nearest first
  std::map<std::string, std::vector<std::vector<int>>> groups;       ///< by axis
  std::map<std::string, std::vector<std::pair<int, int>>> place_of;  ///< by axis, [ranks]: group, and place in it
  std::vector<std::vector<StepLine>> programs;                       ///< [stages]

  /// Of the nearest links that two ranks share.
  [[nodiscard]] int level_between(int rank, int other) const;
  [[nodiscard]] int stage_of(int rank) const { return place_of.at("pipeline")[static_cast<std::size_t>(rank)].second; }
  [[nodiscard]] const std::vector<int>& group_of(const std::string& axis, int rank) const {
    return groups.at(axis)[static_cast<std::size_t>(place_of.at(axis)[static_cast<std::size_t>(rank)].first)];
  }
};

/// Throws std::runtime_error naming the line.
[[nodiscard]] StepSchedule read_schedule(const std::string& file);
