// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

namespace {

StepLine line_of(const std::string& word, std::istringstream& rest) {
  StepLine line;
  if (word == "compute") {
    rest >> line.seconds;
  } else if (word == "send" || word == "recv") {
    line.kind = word == "send" ? StepLine::Kind::send : StepLine::Kind::receive;
    rest >> line.number >> line.bytes;
  } else if (word == "collective" || word == "background") {
    line.kind = word == "collective" ? StepLine::Kind::collective : StepLine::Kind::background;
    rest >> line.collective >> line.axis >> line.bytes;
  } else if (word == "wait") {
    line.kind = StepLine::Kind::wait;
    rest >> line.number;
  } else {
    rest.setstate(std::ios::failbit);
  }
  return line;
}

void place_members(StepSchedule& schedule) {
  for (const auto& [axis, groups] : schedule.groups) {
    auto& places = schedule.place_of[axis];
    places.assign(static_cast<std::size_t>(schedule.ranks), {-1, -1});
    for (std::size_t group = 0; group < groups.size(); ++group) {
      for (std::size_t place = 0; place < groups[group].size(); ++place) {
        places.at(static_cast<std::size_t>(groups[group][place])) = {static_cast<int>(group), static_cast<int>(place)};
      }
    }
  }
}

void read_line(StepSchedule& schedule, const std::string& word, std::istringstream& rest, bool& in_program) {
  if (in_program) {
    in_program = word != "end";
    if (in_program) schedule.programs.back().push_back(line_of(word, rest));
  } else if (word == "program") {
    in_program = true;
    schedule.programs.emplace_back();
  } else if (word == "predicted_seconds") {
    rest >> schedule.predicted_seconds;
  } else if (word == "ranks") {
    rest >> schedule.ranks;
  } else if (word == "level") {
    StepLevel level;
    rest >> level.devices >> level.bytes_per_second >> level.latency_seconds;
    schedule.levels.push_back(level);
  } else if (word == "group") {
    std::string axis;
    rest >> axis;
    auto& members = schedule.groups[axis].emplace_back();
    for (int rank = 0; rest >> rank;) members.push_back(rank);
    rest.clear();
  } else {
    rest.setstate(std::ios::failbit);
  }
}

}  // namespace

int StepSchedule::level_between(int rank, int other) const {
  for (std::size_t i = 0; i < levels.size(); ++i) {
    if (levels[i].devices == 0 || rank / levels[i].devices == other / levels[i].devices) return static_cast<int>(i);
  }
  throw std::runtime_error("no level joins all ranks");
}

StepSchedule read_schedule(const std::string& file) {
  std::ifstream stream(file);
  std::string text;
  if (!std::getline(stream, text) || text != "tandem-programs 1") throw std::runtime_error(file + ": no tandem-programs 1");
  StepSchedule schedule;
  bool in_program = false;
  for (int number = 2; std::getline(stream, text); ++number) {
    std::istringstream rest(text);
    std::string word;
    rest >> word;
    read_line(schedule, word, rest, in_program);
    if (rest.fail()) throw std::runtime_error(file + ":" + std::to_string(number) + ": not understood: " + text);
  }
  if (in_program || schedule.programs.empty()) throw std::runtime_error(file + ": cut off");
  place_members(schedule);
  return schedule;
}
