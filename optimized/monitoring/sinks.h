// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "optimized/monitoring/hardware.h"
#include "optimized/monitoring/metrics_jsonl.h"
#include "optimized/monitoring/prometheus.h"
#include "optimized/monitoring/step_metrics.h"
#include "optimized/monitoring/tensorboard.h"

namespace tandem {

struct MetricsSinkOptions {
  std::filesystem::path jsonl = {};        ///< file of JSON lines; empty: none
  std::filesystem::path tensorboard = {};  ///< folder of event files; empty: none
  std::string prometheus = {};             ///< "PORT" or "HOST:PORT"; empty: none
  std::chrono::milliseconds hardware_interval{5000};
  bool hardware_without_sinks = false;                      ///< sample hardware also where no sink is open: for hardware()
  std::filesystem::path hardware_root = "/";                ///< HardwareMonitor::Options::root
  std::function<void(const std::string&)> on_problem = {};  ///< one line, when a sink had to be given up
};

/// Hands what happens to whichever sinks are open. Made by one process of a run, the one whose rank 0 reports.
///
/// Opening throws: InputError or IoError, before the run begins. Later nothing does: a sink that cannot be written to is closed,
/// on_problem says so once, and training goes on. record() and incident() may be called from several threads.
class MetricsSinks {
 public:
  explicit MetricsSinks(MetricsSinkOptions options);

  /// With the newest sample of the hardware, where there is one that no step has had yet.
  void record(const StepMetrics& metrics);
  void incident(std::string_view text);

  /// Null where hardware is not sampled.
  [[nodiscard]] std::shared_ptr<const HardwareSample> hardware() const;
  /// Empty where nothing listens.
  [[nodiscard]] std::string prometheus_url() const;

 private:
  template <class Sink, class Action>
  void use(std::unique_ptr<Sink>& sink, const Action& action);

  std::mutex mutex_;
  std::function<void(const std::string&)> on_problem_;
  std::unique_ptr<MetricsJsonl> jsonl_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  std::unique_ptr<PrometheusExposer> prometheus_;
  std::unique_ptr<HardwareMonitor> hardware_;
  std::shared_ptr<const HardwareSample> recorded_;
};

}  // namespace tandem
