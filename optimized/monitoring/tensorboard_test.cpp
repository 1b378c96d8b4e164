// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/tensorboard.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <regex>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

// A reader of its own, from the formats: bit by bit, where the writer has a table.
std::uint32_t crc32c_bit_by_bit(std::string_view bytes) {
  std::uint32_t remainder = ~0U;
  for (const char byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool feedback = ((remainder ^ (static_cast<unsigned char>(byte) >> bit)) & 1) != 0;
      remainder = (remainder >> 1) ^ (feedback ? 0x82F63B78U : 0);
    }
  }
  return ~remainder;
}

std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U; }

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  [[nodiscard]] bool at_end() const { return bytes_.empty(); }
  std::string_view take(std::size_t count) {
    if (count > bytes_.size()) throw InputError("cut off");
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  template <class Number>
  Number fixed() {
    Number value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
  }

 private:
  std::string_view bytes_;
};

std::vector<std::string_view> payloads(std::string_view file) {
  std::vector<std::string_view> found;
  for (Reader reader(file); !reader.at_end();) {
    const std::string_view length = reader.take(8);
    EXPECT_EQ(reader.fixed<std::uint32_t>(), masked(crc32c_bit_by_bit(length)));
    found.push_back(reader.take(Reader(length).fixed<std::uint64_t>()));
    EXPECT_EQ(reader.fixed<std::uint32_t>(), masked(crc32c_bit_by_bit(found.back())));
  }
  return found;
}

struct Event {
  double wall_time = 0;
  std::uint64_t step = 0;
  std::string file_version;
  std::optional<std::uint64_t> session_status;
  std::map<std::string, float> scalars;
};

void read_value(Reader value, Event& event) {
  std::string tag;
  while (!value.at_end()) {
    switch (value.varint()) {
      case 1 << 3 | 2: tag = value.take(value.varint()); break;
      case 2 << 3 | 5: event.scalars[tag] = value.fixed<float>(); break;
      default: throw InputError("unknown field of a value");
    }
  }
}

Event read_event(std::string_view payload) {
  Event event;
  for (Reader reader(payload); !reader.at_end();) {
    switch (reader.varint()) {
      case 1 << 3 | 1: event.wall_time = reader.fixed<double>(); break;
      case 2 << 3 | 0: event.step = reader.varint(); break;
      case 3 << 3 | 2: event.file_version = reader.take(reader.varint()); break;
      case 5 << 3 | 2:
        for (Reader summary(reader.take(reader.varint())); !summary.at_end();) {
          if (summary.varint() != (1 << 3 | 2)) throw InputError("unknown field of a summary");
          read_value(Reader(summary.take(summary.varint())), event);
        }
        break;
      case 7 << 3 | 2: {
        Reader log(reader.take(reader.varint()));
        if (log.varint() != (1 << 3 | 0)) throw InputError("unknown field of a session log");
        event.session_status = log.varint();
        break;
      }
      default: throw InputError("unknown field of an event");
    }
  }
  return event;
}

std::vector<Event> read_events(const std::filesystem::path& file) {
  const std::string bytes = TestFolder::read(file);
  std::vector<Event> events;
  for (const std::string_view payload : payloads(bytes)) events.push_back(read_event(payload));
  return events;
}

TEST(TensorBoardWriter, MasksTheChecksumThatIsPublishedForNineDigits) {
  EXPECT_EQ(crc32c_bit_by_bit("123456789"), 0xE3069283U);
  EXPECT_EQ(masked_crc32c("123456789"), masked(0xE3069283U));
  EXPECT_EQ(masked_crc32c(""), 0xA282EAD8U);
}

TEST(TensorBoardWriter, FileHasTheNameAndTheFirstEventThatReadersLookFor) {
  const TestFolder folder;
  const TensorBoardWriter writer(folder / "a/b", 1790000000.75, "node3");
  const TensorBoardWriter another(folder / "a/b", 1790000000.75, "node3");

  EXPECT_TRUE(std::regex_match(writer.path().filename().string(),
                               std::regex(R"(events\.out\.tfevents\.1790000000\.node3\.\d+\.0\.tandem)")));
  EXPECT_NE(writer.path(), another.path());
  const std::vector<Event> events = read_events(writer.path());
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_EQ(events[0].wall_time, 1790000000.75);
}

TEST(TensorBoardWriter, EventsCarryStepTimeAndValuesByTag) {
  const TestFolder folder;
  StepMetrics m;
  m.step = 300;  // two bytes as a varint
  m.unix_seconds = 1790000001.5;
  m.loss = 2.25;
  m.gradient_norm = 0.5;
  m.learning_rate = 0.125;
  m.tokens_per_second = 4096;
  m.exposed_share = 0.0625;
  m.peak_memory_bytes = std::int64_t{1} << 33;
  m.validation_loss = 2.5;
  HardwareSample hardware;
  hardware.gpus.push_back({.index = 2, .temperature_celsius = 71, .throttled_by = {"thermal"}});
  TensorBoardWriter writer(folder.path(), 1790000000);

  writer.record(m, &hardware);

  const std::vector<Event> events = read_events(writer.path());
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[1].session_status, 1U);
  EXPECT_EQ(events[1].step, 300U);
  EXPECT_EQ(events[2].step, 300U);
  EXPECT_EQ(events[2].wall_time, 1790000001.5);
  const std::map<std::string, float>& scalars = events[2].scalars;
  EXPECT_EQ(scalars.at("train/loss"), 2.25F);
  EXPECT_EQ(scalars.at("train/gradient_norm"), 0.5F);
  EXPECT_EQ(scalars.at("train/learning_rate"), 0.125F);
  EXPECT_EQ(scalars.at("performance/tokens_per_second"), 4096.0F);
  EXPECT_EQ(scalars.at("communication/exposed_share"), 0.0625F);
  EXPECT_EQ(scalars.at("memory/peak_bytes"), 8589934592.0F);
  EXPECT_EQ(scalars.at("validation/loss"), 2.5F);
  EXPECT_EQ(scalars.at("hardware/gpu2_temperature_celsius"), 71.0F);
  EXPECT_EQ(scalars.at("hardware/gpu2_throttled"), 1.0F);
  EXPECT_EQ(scalars.count("hardware/gpu2_power_watts"), 0U);
}

TEST(TensorBoardWriter, StepThatIsDoneAgainStartsASession) {
  const TestFolder folder;
  TensorBoardWriter writer(folder.path(), 1790000000);
  for (const std::int64_t step : {1, 2, 3, 2, 3})
    writer.write(step, 1790000000.0 + static_cast<double>(step), {{"train/loss", 1}});

  std::vector<std::uint64_t> starts, steps;
  for (const Event& event : read_events(writer.path())) {
    if (event.session_status) starts.push_back(event.step);
    if (!event.scalars.empty()) steps.push_back(event.step);
  }
  EXPECT_EQ(starts, (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(steps, (std::vector<std::uint64_t>{1, 2, 3, 2, 3}));
}

}  // namespace
}  // namespace tandem
