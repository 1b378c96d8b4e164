// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/prometheus.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

// The reply of this machine's `port` to GET /metrics, all of it.
std::string scrape(int port) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string reply;
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
    if (::send(descriptor, request.data(), request.size(), 0) == static_cast<ssize_t>(request.size())) {
      std::array<char, 4096> block{};
      for (ssize_t got = 0; (got = ::recv(descriptor, block.data(), block.size(), 0)) > 0;)
        reply.append(block.data(), static_cast<std::size_t>(got));
    }
  }
  ::close(descriptor);
  return reply;
}

void expect_line(const std::string& reply, const std::string& line) {
  EXPECT_NE(reply.find("\n" + line + "\n"), std::string::npos) << line << "\nis not in\n" << reply;
}

TEST(Prometheus, ShowsTheLastStepAndCountsOverSteps) {
  StepMetrics m;
  m.step = 7;
  m.total_steps = 100;
  m.unix_seconds = 1790000000;
  m.loss = 2.25;
  m.tokens = 1024;
  m.peak_memory_bytes = 4096;
  m.exposed_share = 0.125;
  m.skipped_steps = 1;
  const std::unique_ptr<PrometheusExposer> exposer = expose_prometheus("0");
  exposer->record(m, nullptr);
  m.step = 8;
  m.skipped_steps = 3;
  m.loss = std::numeric_limits<double>::quiet_NaN();
  exposer->record(m, nullptr);

  const std::string reply = scrape(exposer->port());

  EXPECT_TRUE(reply.starts_with("HTTP/1.1 200 OK")) << reply;
  expect_line(reply, "# HELP tandem_train_loss_nats Mean loss of a token in the last step\n# TYPE tandem_train_loss_nats gauge");
  expect_line(reply, "tandem_train_loss_nats Nan");
  expect_line(reply, "tandem_train_step 8");
  expect_line(reply, "tandem_train_planned_steps 100");
  expect_line(reply, "tandem_train_last_step_timestamp_seconds 1790000000");
  expect_line(reply, "tandem_train_peak_memory_bytes 4096");
  expect_line(reply, "tandem_train_exposed_communication_ratio 0.125");
  expect_line(reply, "# TYPE tandem_train_tokens_total counter\ntandem_train_tokens_total 2048");
  expect_line(reply, "tandem_train_skipped_steps_total 3");
  EXPECT_EQ(reply.find("validation"), std::string::npos);
}

TEST(Prometheus, CountsAnIncidentOnceWhoeverTellsFirst) {
  const std::unique_ptr<PrometheusExposer> exposer = expose_prometheus("127.0.0.1:0");
  StepMetrics m;
  exposer->incident();
  m.incidents = 1;
  m.validation_loss = 3.5;
  exposer->record(m, nullptr);
  expect_line(scrape(exposer->port()), "tandem_train_incidents_total 1");
  m.incidents = 2;
  exposer->record(m, nullptr);

  const std::string reply = scrape(exposer->port());

  expect_line(reply, "tandem_train_incidents_total 2");
  expect_line(reply, "tandem_train_validation_loss_nats 3.5");
}

TEST(Prometheus, LabelsHardware) {
  HardwareSample sample;
  sample.gpus.push_back({.index = 1, .temperature_celsius = 71, .uncorrected_ecc_errors = 2, .throttled_by = {"thermal"}});
  sample.memory_pressure.full_share = 0.25;
  sample.resident_bytes = 8192;
  const std::unique_ptr<PrometheusExposer> exposer = expose_prometheus("localhost:0");
  exposer->record({}, &sample);
  sample.memory_pressure.full_share = 0.5;
  exposer->record({}, &sample);

  const std::string reply = scrape(exposer->port());

  expect_line(reply, "tandem_hardware_gpu_temperature_celsius{gpu=\"1\"} 71");
  expect_line(reply, "tandem_hardware_gpu_ecc_errors{gpu=\"1\",kind=\"uncorrected\"} 2");
  expect_line(reply, "tandem_hardware_gpu_throttled{gpu=\"1\"} 1");
  expect_line(reply, "tandem_hardware_pressure_ratio{kind=\"full\",resource=\"memory\"} 0.5");
  expect_line(reply, "tandem_hardware_resident_bytes 8192");
  EXPECT_EQ(reply.find("power_watts"), std::string::npos);
}

TEST(Prometheus, AnswersOnThisMachineAloneUnlessTold) {
  EXPECT_TRUE(expose_prometheus("0")->url().starts_with("http://127.0.0.1:"));
  EXPECT_TRUE(expose_prometheus("0.0.0.0:0")->url().starts_with("http://0.0.0.0:"));
}

TEST(Prometheus, PortThatIsTakenIsOneLine) {
  const std::unique_ptr<PrometheusExposer> first = expose_prometheus("0");
  const std::string address = fmt::format("127.0.0.1:{}", first->port());

  const std::string message = message_of<InputError>([&] { (void)expose_prometheus(address); });

  EXPECT_TRUE(message.starts_with("--prometheus: cannot listen at " + address + "; the port may be taken")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

TEST(Prometheus, RefusesWhatIsNoAddress) {
  for (const char* text : {"", "port", "-1", "65536", "80s", ":9464", "127.0.0.1:", "127.0.0.1:80,90", "1.2.3.4,5.6.7.8:90",
                           "::1:9464", "9464 ", "http://localhost:9464"}) {
    const std::string message = message_of<InputError>([&] { (void)expose_prometheus(text); });
    EXPECT_TRUE(message.starts_with(fmt::format("--prometheus: '{}' ", text))) << text << ": " << message;
  }
}

}  // namespace
}  // namespace tandem
