// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/incident_log.h"

#include <fstream>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

Incident full_incident() {
  return {.when = "2031-02-03T04:05:06.789Z",
          .kind = "hung",
          .what = "rank 1 \"hangs\"\nin train",
          .rank = 1,
          .step = 14,
          .phase = "train",
          .attempt = 2,
          .action = "restart from step 12",
          .detected_after_seconds = 3.6,
          .lost_steps = 2,
          .seconds_to_first_new_step = 0.1};
}

void add(const std::filesystem::path& file, const std::string& text) { std::ofstream(file, std::ios::app) << text; }

TEST(IncidentLog, GivesBackWhatWasAppended) {
  const TestFolder folder;
  IncidentLog log(folder / "a/b");

  log.append(full_incident());
  log.append({.kind = "finished", .what = "all"});

  const std::vector<Incident> read = read_incidents(folder / "a/b");
  ASSERT_EQ(read.size(), 2U);
  const Incident all = full_incident();
  EXPECT_EQ(read[0].when, all.when);
  EXPECT_EQ(read[0].kind, all.kind);
  EXPECT_EQ(read[0].what, all.what);
  EXPECT_EQ(read[0].rank, all.rank);
  EXPECT_EQ(read[0].step, all.step);
  EXPECT_EQ(read[0].phase, all.phase);
  EXPECT_EQ(read[0].attempt, all.attempt);
  EXPECT_EQ(read[0].action, all.action);
  EXPECT_EQ(read[0].detected_after_seconds, all.detected_after_seconds);
  EXPECT_EQ(read[0].lost_steps, all.lost_steps);
  EXPECT_EQ(read[0].seconds_to_first_new_step, all.seconds_to_first_new_step);
  EXPECT_TRUE(std::regex_match(read[1].when, std::regex("\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{3}Z"))) << read[1].when;
  EXPECT_EQ(read[1].rank, -1);
  EXPECT_EQ(read[1].step, -1);
  EXPECT_EQ(read[1].lost_steps, std::nullopt);
}

TEST(IncidentLog, LeavesOutALineThatIsCutAndTheNextOneIsWhole) {
  const TestFolder folder;
  IncidentLog log(folder.path());
  log.append(full_incident());
  const std::string line = TestFolder::read(log.file());
  for (std::size_t size = 1; size + 1 < line.size(); size += 7) {
    SCOPED_TRACE(line.substr(0, size));
    std::ofstream(log.file(), std::ios::trunc) << line << line.substr(0, size);
    EXPECT_EQ(read_incidents(folder.path()).size(), 1U);
    log.append({.kind = "dead", .what = "later"});
    const std::vector<Incident> read = read_incidents(folder.path());
    ASSERT_EQ(read.size(), 2U);
    EXPECT_EQ(read[1].what, "later");
  }
}

TEST(IncidentLog, NamesFileAndLineOfWhatIsNoIncident) {
  for (const char* const line : {"nonsense\n", "{\"when\": 1}\n", "[]\n", "{\"when\": \"\", \"kind\": \"x\", \"what\": 3}\n"}) {
    const TestFolder folder;
    IncidentLog log(folder.path());
    log.append(full_incident());
    add(log.file(), line);
    const std::string text = message_of<InputError>([&] { static_cast<void>(read_incidents(folder.path())); });
    EXPECT_NE(text.find(log.file().string() + ", line 2"), std::string::npos) << line << text;
  }
  const TestFolder none;
  EXPECT_THROW(static_cast<void>(read_incidents(none.path())), InputError);
}

TEST(IncidentLog, KeepsLinesOfSeveralWritersWhole) {
  constexpr int kWriters = 4, kLines = 25;
  const TestFolder folder;
  {
    std::vector<std::jthread> writers;
    for (int writer = 0; writer < kWriters; ++writer) {
      writers.emplace_back([&folder, writer] {
        IncidentLog log(folder.path());
        for (int i = 0; i < kLines; ++i) log.append({.kind = "dead", .what = std::string(3000, 'x'), .rank = writer, .step = i});
      });
    }
  }
  const std::vector<Incident> read = read_incidents(folder.path());
  ASSERT_EQ(read.size(), std::size_t{kWriters * kLines});
  std::vector<int> next(kWriters);
  for (const Incident& incident : read) EXPECT_EQ(incident.step, next[static_cast<std::size_t>(incident.rank)]++);
}

TEST(IncidentLog, SaysThatTheDiskIsFull) {
  const TestFolder folder;
  IncidentLog log(folder.path());
  log.append(full_incident());
  const std::uintmax_t size = std::filesystem::file_size(log.file());
  {
    const FileSizeLimit limit(size + 10);
    const std::string text = message_of<IoError>([&] { log.append(full_incident()); });
    EXPECT_NE(text.find(log.file().string()), std::string::npos) << text;
  }
  log.append({.kind = "dead", .what = "later"});
  EXPECT_EQ(read_incidents(folder.path()).size(), 2U);
}

TEST(IncidentLog, WithoutAFolderKeepsNothing) {
  IncidentLog log("");
  log.append(full_incident());
  EXPECT_TRUE(log.file().empty());
}

}  // namespace
}  // namespace tandem
