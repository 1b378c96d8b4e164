// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/tensorboard.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cmath>

#include <fmt/format.h>

namespace tandem {
namespace {

// Numbers of the fields in TensorFlow's event.proto and summary.proto.
constexpr int kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5, kEventSessionLog = 7;
constexpr int kSummaryValue = 1, kValueTag = 1, kValueSimple = 2, kSessionStatus = 1;
constexpr std::uint64_t kSessionStart = 1;

template <class Number>
void put_little_endian(std::string& out, Number value) {
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

// The three ways in which protobuf writes a field that are needed here.
class Message {
 public:
  void put_integer(int field, std::uint64_t value) {
    put_key(field, 0);
    put_varint(value);
  }
  void put_double(int field, double value) {
    put_key(field, 1);
    put_little_endian(bytes_, std::bit_cast<std::uint64_t>(value));
  }
  void put_float(int field, float value) {
    put_key(field, 5);
    put_little_endian(bytes_, std::bit_cast<std::uint32_t>(value));
  }
  void put_bytes(int field, std::string_view value) {
    put_key(field, 2);
    put_varint(value.size());
    bytes_ += value;
  }
  [[nodiscard]] const std::string& bytes() const noexcept { return bytes_; }

 private:
  void put_key(int field, int wire_type) { put_varint(static_cast<std::uint64_t>(field << 3 | wire_type)); }
  void put_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0x82F63B78U : crc >> 1;
    table[byte] = crc;
  }
  return table;
}

std::string tf_record(std::string_view payload) {
  std::string record;
  put_little_endian(record, std::uint64_t{payload.size()});
  put_little_endian(record, masked_crc32c(record));
  record += payload;
  put_little_endian(record, masked_crc32c(payload));
  return record;
}

std::string session_start(std::int64_t step, double unix_seconds) {
  Message log;
  log.put_integer(kSessionStatus, kSessionStart);
  Message event;
  event.put_double(kEventWallTime, unix_seconds);
  event.put_integer(kEventStep, static_cast<std::uint64_t>(step));
  event.put_bytes(kEventSessionLog, log.bytes());
  return tf_record(event.bytes());
}

std::string summary_event(std::int64_t step, double unix_seconds, const TensorBoardWriter::Scalars& scalars) {
  Message summary;
  for (const auto& [tag, number] : scalars) {
    Message value;
    value.put_bytes(kValueTag, tag);
    value.put_float(kValueSimple, static_cast<float>(number));
    summary.put_bytes(kSummaryValue, value.bytes());
  }
  Message event;
  event.put_double(kEventWallTime, unix_seconds);
  event.put_integer(kEventStep, static_cast<std::uint64_t>(step));
  event.put_bytes(kEventSummary, summary.bytes());
  return tf_record(event.bytes());
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  return name.data();
}

std::filesystem::path event_file(const std::filesystem::path& folder, double unix_seconds, const std::string& host) {
  // Two writers of one process in one second are told apart as well.
  for (int number = 0;; ++number) {
    std::filesystem::path path =
        folder / fmt::format("events.out.tfevents.{:010d}.{}.{}.{}.tandem", static_cast<std::int64_t>(unix_seconds),
                             host.empty() ? host_name() : host, ::getpid(), number);
    if (!std::filesystem::exists(path)) return path;
  }
}

void add_hardware(const HardwareSample& sample, TensorBoardWriter::Scalars& scalars) {
  const auto add = [&](std::string tag, const auto& value) {
    if (value) scalars.emplace_back(std::move(tag), static_cast<double>(*value));
  };
  for (const GpuSample& gpu : sample.gpus) {
    const std::string prefix = fmt::format("hardware/gpu{}_", gpu.index);
    add(prefix + "temperature_celsius", gpu.temperature_celsius);
    add(prefix + "power_watts", gpu.power_watts);
    add(prefix + "utilization_share", gpu.utilization_share);
    add(prefix + "memory_used_bytes", gpu.memory_used_bytes);
    add(prefix + "uncorrected_ecc_errors", gpu.uncorrected_ecc_errors);
    scalars.emplace_back(prefix + "throttled", gpu.throttled_by.empty() ? 0 : 1);
  }
  add("hardware/cpu_pressure_some_share", sample.cpu_pressure.some_share);
  add("hardware/memory_pressure_some_share", sample.memory_pressure.some_share);
  add("hardware/io_pressure_some_share", sample.io_pressure.some_share);
  add("hardware/available_memory_bytes", sample.available_memory_bytes);
  add("hardware/resident_bytes", sample.resident_bytes);
}

}  // namespace

std::uint32_t masked_crc32c(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = make_crc_table();
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char byte : bytes) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xFF];
  return std::rotr(crc ^ 0xFFFFFFFFU, 15) + 0xA282EAD8U;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, double unix_seconds, std::string host)
    : file_(event_file(folder, unix_seconds, host), AppendFile::Existing::refused) {
  Message event;
  event.put_double(kEventWallTime, unix_seconds);
  event.put_bytes(kEventFileVersion, "brain.Event:2");
  file_.append(tf_record(event.bytes()));
}

void TensorBoardWriter::record(const StepMetrics& metrics, const HardwareSample* hardware) {
  Scalars scalars = {{"train/loss", metrics.loss},
                     {"train/gradient_norm", metrics.gradient_norm},
                     {"train/learning_rate", metrics.learning_rate},
                     {"train/loss_scale", metrics.loss_scale},
                     {"performance/tokens_per_second", metrics.tokens_per_second},
                     {"performance/step_seconds", metrics.step_seconds},
                     {"performance/data_wait_share", metrics.data_wait_share},
                     {"communication/busy_share", metrics.communication_share},
                     {"communication/exposed_share", metrics.exposed_share},
                     {"memory/bytes", static_cast<double>(metrics.memory_bytes)},
                     {"memory/peak_bytes", static_cast<double>(metrics.peak_memory_bytes)},
                     {"incidents/count", static_cast<double>(metrics.incidents)},
                     {"incidents/skipped_steps", static_cast<double>(metrics.skipped_steps)},
                     {"incidents/attempt", static_cast<double>(metrics.attempt)}};
  if (metrics.validation_loss) scalars.emplace_back("validation/loss", *metrics.validation_loss);
  if (hardware != nullptr) add_hardware(*hardware, scalars);
  write(metrics.step, metrics.unix_seconds, scalars);
}

void TensorBoardWriter::write(std::int64_t step, double unix_seconds, const Scalars& scalars) {
  std::string records;
  if (!last_step_ || step <= *last_step_) records = session_start(step, unix_seconds);
  file_.append(records + summary_event(step, unix_seconds, scalars));
  last_step_ = step;
}

}  // namespace tandem
