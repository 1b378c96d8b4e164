// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/prometheus.h"

#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string_view>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <httplib.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include "core/error.h"

namespace tandem {
namespace {

struct Address {
  std::string host;
  int port = 0;
};

Address parse_address(const std::string& text) {
  const auto refuse = [&](const char* what) {
    throw InputError(fmt::format("--prometheus: '{}' {}; give PORT or HOST:PORT, for instance 9464 or 0.0.0.0:9464", text, what));
  };
  Address address{.host = "127.0.0.1"};
  std::string_view port = text;
  if (const std::size_t colon = text.rfind(':'); colon != std::string::npos) {
    address.host = text.substr(0, colon);
    port.remove_prefix(colon + 1);
    if (address.host.empty()) refuse("has no host before the colon");
    // What listens takes several addresses, and letters that mean encryption or redirection.
    if (address.host.find_first_of(",+ /") != std::string::npos) refuse("is no single address");
    if (address.host == "localhost") address.host = "127.0.0.1";
    if (address.host.front() != '[' && address.host.find(':') != std::string::npos) refuse("needs [] around an IPv6 address");
  }
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (port.empty() || error != std::errc() || end != port.data() + port.size() || address.port < 0 || address.port > 65535)
    refuse("does not end in a port (0 to 65535)");
  return address;
}

// The library's own server gives its threads stacks so small that with some C libraries' hooks its printf does not fit.
class MetricsServer {
 public:
  MetricsServer(const std::string& address, std::shared_ptr<prometheus::Registry> registry) : registry_(std::move(registry)) {
    const Address parsed = parse_address(address);
    server_.set_socket_options([](int descriptor) {
      // Not that of the library, which lets two programs share a port.
      const int yes = 1;
      ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    server_.set_keep_alive_max_count(1);
    server_.new_task_queue = [] { return new httplib::ThreadPool(1); };
    server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(prometheus::TextSerializer().Serialize(registry_->Collect()), "text/plain; version=0.0.4");
    });
    const std::string host = parsed.host.front() == '[' ? parsed.host.substr(1, parsed.host.size() - 2) : parsed.host;
    const bool bound = parsed.port != 0 ? server_.bind_to_port(host, parsed.port) : (port_ = server_.bind_to_any_port(host)) > 0;
    if (!bound) {
      throw InputError(fmt::format(
          "--prometheus: cannot listen at {}:{}; the port may be taken, or the address not one of this machine; give another, "
          "or port 0 for any that is free",
          parsed.host, parsed.port));
    }
    if (parsed.port != 0) port_ = parsed.port;
    thread_ = std::jthread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // or stop() would come too early
  }
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;
  ~MetricsServer() { server_.stop(); }

  [[nodiscard]] int port() const noexcept { return port_; }

 private:
  std::shared_ptr<prometheus::Registry> registry_;
  httplib::Server server_;
  int port_ = 0;
  std::jthread thread_;
};

class Exposer final : public PrometheusExposer {
 public:
  explicit Exposer(const std::string& address)
      : host_(parse_address(address).host),
        registry_(std::make_shared<prometheus::Registry>()),
        server_(std::make_unique<MetricsServer>(address, registry_)) {}

  void record(const StepMetrics& m, const HardwareSample* hardware) override {
    step_.Set(static_cast<double>(m.step));
    planned_steps_.Set(static_cast<double>(m.total_steps));
    attempt_.Set(static_cast<double>(m.attempt));
    last_step_time_.Set(m.unix_seconds);
    loss_.Set(m.loss);
    if (m.validation_loss)
      gauge("tandem_train_validation_loss_nats", "Loss on held-out data, last taken").Set(*m.validation_loss);
    gradient_norm_.Set(m.gradient_norm);
    learning_rate_.Set(m.learning_rate);
    loss_scale_.Set(m.loss_scale);
    tokens_.Increment(static_cast<double>(m.tokens));
    step_seconds_.Set(m.step_seconds);
    tokens_per_second_.Set(m.tokens_per_second);
    communication_.Set(m.communication_share);
    exposed_.Set(m.exposed_share);
    data_wait_.Set(m.data_wait_share);
    memory_.Set(static_cast<double>(m.memory_bytes));
    peak_memory_.Set(static_cast<double>(m.peak_memory_bytes));
    raise(skipped_steps_, static_cast<double>(m.skipped_steps));
    raise(incidents_, static_cast<double>(m.incidents));
    if (hardware != nullptr) record(*hardware);
  }

  void incident() override { incidents_.Increment(); }
  [[nodiscard]] int port() const override { return server_->port(); }
  [[nodiscard]] std::string url() const override { return fmt::format("http://{}:{}/metrics", host_, port()); }

 private:
  // The same gauge for the same name and labels.
  prometheus::Gauge& gauge(const char* name, const char* help, const prometheus::Labels& labels = {}) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add(labels);
  }
  prometheus::Counter& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add({});
  }
  static void raise(prometheus::Counter& counter, double value) { counter.Increment(std::max(0.0, value - counter.Value())); }

  template <class Value>
  void set(const char* name, const char* help, const std::optional<Value>& value, const prometheus::Labels& labels = {}) {
    if (value) gauge(name, help, labels).Set(static_cast<double>(*value));
  }

  void record(const GpuSample& gpu) {
    const std::string index = std::to_string(gpu.index);
    const prometheus::Labels which = {{"gpu", index}};
    set("tandem_hardware_gpu_temperature_celsius", "Temperature of the GPU", gpu.temperature_celsius, which);
    set("tandem_hardware_gpu_power_watts", "Power that the GPU draws", gpu.power_watts, which);
    set("tandem_hardware_gpu_power_limit_watts", "Power that it may draw", gpu.power_limit_watts, which);
    set("tandem_hardware_gpu_utilization_ratio", "Share of time with a kernel running", gpu.utilization_share, which);
    set("tandem_hardware_gpu_memory_used_bytes", "Memory of the GPU in use, by all programs", gpu.memory_used_bytes, which);
    set("tandem_hardware_gpu_memory_total_bytes", "Memory of the GPU", gpu.memory_total_bytes, which);
    set("tandem_hardware_gpu_sm_clock_hertz", "Clock of the multiprocessors", gpu.sm_clock_hertz, which);
    constexpr const char* kErrors = "tandem_hardware_gpu_ecc_errors";
    constexpr const char* kErrorsHelp = "Errors of the GPU's memory since its driver was loaded";
    set(kErrors, kErrorsHelp, gpu.corrected_ecc_errors, {{"gpu", index}, {"kind", "corrected"}});
    set(kErrors, kErrorsHelp, gpu.uncorrected_ecc_errors, {{"gpu", index}, {"kind", "uncorrected"}});
    gauge("tandem_hardware_gpu_throttled", "1 while power, heat or the hardware hold the clocks down", which)
        .Set(gpu.throttled_by.empty() ? 0 : 1);
  }

  void record(const char* resource, const PressureSample& pressure) {
    constexpr const char* kName = "tandem_hardware_pressure_ratio";
    constexpr const char* kHelp = "Share of the last 10 s in which some task, or all (full), waited for the resource";
    set(kName, kHelp, pressure.some_share, {{"resource", resource}, {"kind", "some"}});
    set(kName, kHelp, pressure.full_share, {{"resource", resource}, {"kind", "full"}});
  }

  void record(const HardwareSample& sample) {
    for (const GpuSample& gpu : sample.gpus) record(gpu);
    record("cpu", sample.cpu_pressure);
    record("memory", sample.memory_pressure);
    record("io", sample.io_pressure);
    set("tandem_hardware_load_1_minute", "Tasks that run or wait to, mean over a minute", sample.load_1_minute);
    set("tandem_hardware_available_memory_bytes", "Memory of the machine that programs can have", sample.available_memory_bytes);
    set("tandem_hardware_resident_bytes", "Memory of this process", sample.resident_bytes);
    constexpr const char* kErrors = "tandem_hardware_memory_errors";
    constexpr const char* kErrorsHelp = "Errors of the machine's memory since it started";
    set(kErrors, kErrorsHelp, sample.corrected_memory_errors, {{"kind", "corrected"}});
    set(kErrors, kErrorsHelp, sample.uncorrected_memory_errors, {{"kind", "uncorrected"}});
    for (const TemperatureSample& one : sample.temperatures)
      gauge("tandem_hardware_temperature_celsius", "Temperature of a zone of the machine", {{"zone", one.zone}}).Set(one.celsius);
  }

  std::string host_;
  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Gauge& step_ = gauge("tandem_train_step", "Steps done");
  prometheus::Gauge& planned_steps_ = gauge("tandem_train_planned_steps", "Steps that the run is to have");
  prometheus::Gauge& attempt_ = gauge("tandem_train_attempt", "How often the run was started again");
  prometheus::Gauge& last_step_time_ =
      gauge("tandem_train_last_step_timestamp_seconds", "Unix time at which the last step ended");
  prometheus::Gauge& loss_ = gauge("tandem_train_loss_nats", "Mean loss of a token in the last step");
  prometheus::Gauge& gradient_norm_ = gauge("tandem_train_gradient_norm", "Norm of the whole gradient before clipping");
  prometheus::Gauge& learning_rate_ = gauge("tandem_train_learning_rate", "Learning rate of the last step");
  prometheus::Gauge& loss_scale_ = gauge("tandem_train_loss_scale", "Factor of the loss against underflow of gradients");
  prometheus::Counter& tokens_ =
      counter("tandem_train_tokens_total", "Tokens trained by this process, those done again included");
  prometheus::Gauge& step_seconds_ = gauge("tandem_train_step_seconds", "Duration of the last step");
  prometheus::Gauge& tokens_per_second_ = gauge("tandem_train_tokens_per_second", "Tokens of the last step by its duration");
  prometheus::Gauge& communication_ = gauge("tandem_train_communication_ratio", "Share of the step in which something was sent");
  prometheus::Gauge& exposed_ = gauge("tandem_train_exposed_communication_ratio", "The part of it in which nothing was computed");
  prometheus::Gauge& data_wait_ = gauge("tandem_train_data_wait_ratio", "Share of the step spent waiting for its batch");
  prometheus::Gauge& memory_ = gauge("tandem_train_memory_bytes", "Memory of rank 0 by its ledger, now");
  prometheus::Gauge& peak_memory_ = gauge("tandem_train_peak_memory_bytes", "Memory of rank 0 by its ledger, most so far");
  prometheus::Counter& skipped_steps_ = counter("tandem_train_skipped_steps_total", "Steps without an update");
  prometheus::Counter& incidents_ = counter("tandem_train_incidents_total", "Incidents: anomalies, rollbacks, restarts");
  std::unique_ptr<MetricsServer> server_;  // last: ends before what it reads
};

}  // namespace

std::unique_ptr<PrometheusExposer> expose_prometheus(const std::string& address) { return std::make_unique<Exposer>(address); }

}  // namespace tandem
