// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/timings.h"

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"

namespace tandem {
namespace {

std::filesystem::path file_in(const std::filesystem::path& folder) { return folder / "timings.jsonl"; }

}  // namespace

void append_timings(const std::filesystem::path& folder, const TimedCheckpoint& checkpoint) {
  const CheckpointTimes& times = checkpoint.times;
  const nlohmann::ordered_json line = {{"step", times.step},
                                       {"bytes", times.total_bytes},
                                       {"blocking_seconds", times.blocking_seconds},
                                       {"waiting_seconds", times.waiting_seconds},
                                       {"writing_seconds", times.writing_seconds},
                                       {"uploading_seconds", times.uploading_seconds},
                                       {"step_seconds", checkpoint.step_seconds}};
  std::ofstream file(file_in(folder), std::ios::app);
  file << line.dump() + "\n";
  if (file.flush()) return;
  throw IoError(fmt::format("cannot write {}: {}", file_in(folder).string(), std::generic_category().message(errno)));
}

std::vector<TimedCheckpoint> read_timings(const std::filesystem::path& folder) {
  std::istringstream lines(read_text_file(file_in(folder)));
  std::vector<TimedCheckpoint> checkpoints;
  std::string text;
  for (int number = 1; std::getline(lines, text); ++number) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    if (line.is_discarded()) continue;
    TimedCheckpoint checkpoint;
    CheckpointTimes& times = checkpoint.times;
    try {
      line.at("step").get_to(times.step);
      line.at("bytes").get_to(times.total_bytes);
      line.at("blocking_seconds").get_to(times.blocking_seconds);
      line.at("waiting_seconds").get_to(times.waiting_seconds);
      line.at("writing_seconds").get_to(times.writing_seconds);
      line.at("uploading_seconds").get_to(times.uploading_seconds);
      line.at("step_seconds").get_to(checkpoint.step_seconds);
    } catch (const nlohmann::json::exception& error) {
      throw InputError(fmt::format("{}, line {}: {}", file_in(folder).string(), number, error.what()));
    }
    checkpoints.push_back(checkpoint);
  }
  return checkpoints;
}

}  // namespace tandem
