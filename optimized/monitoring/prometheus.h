// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "optimized/monitoring/hardware.h"
#include "optimized/monitoring/step_metrics.h"

namespace tandem {

/// Answers `GET /metrics` in Prometheus' text format while it lives: tandem_train_* of the last step and tandem_hardware_* of the
/// last sample, listed in docs/monitoring.md. Threads of its own answer; record() and incident() may be called from any thread.
class PrometheusExposer {
 public:
  PrometheusExposer() = default;
  PrometheusExposer(const PrometheusExposer&) = delete;
  PrometheusExposer& operator=(const PrometheusExposer&) = delete;
  virtual ~PrometheusExposer() = default;

  virtual void record(const StepMetrics& metrics, const HardwareSample* hardware) = 0;
  /// Counts one. record() raises the counter to metrics.incidents where it is behind, so that it does not matter which comes
  /// first.
  virtual void incident() = 0;
  [[nodiscard]] virtual int port() const = 0;
  /// "http://127.0.0.1:9464/metrics"
  [[nodiscard]] virtual std::string url() const = 0;
};

/// Listens at `address`: "PORT" (of this machine alone, 127.0.0.1) or "HOST:PORT", HOST being an IP address of the machine
/// ("0.0.0.0": all;
/// "[::1]" where the library's server was built for IPv6, which Debian's is not) or "localhost"; port 0 takes any that is free.
/// There is no password and no encryption. Throws InputError where the address is none, where the system does not let it listen
/// (port taken), or in a build without prometheus-cpp.
[[nodiscard]] std::unique_ptr<PrometheusExposer> expose_prometheus(const std::string& address);

}  // namespace tandem
