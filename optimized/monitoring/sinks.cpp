// SPDX-License-Identifier: Apache-2.0
#include "optimized/monitoring/sinks.h"

#include <utility>

#include "core/error.h"

namespace tandem {
namespace {

double unix_now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

MetricsSinks::MetricsSinks(MetricsSinkOptions options) : on_problem_(std::move(options.on_problem)) {
  // What can be refused for a word in the command line comes first, so that a refusal leaves no files behind.
  if (!options.prometheus.empty()) prometheus_ = expose_prometheus(options.prometheus);
  if (!options.jsonl.empty()) jsonl_ = std::make_unique<MetricsJsonl>(std::move(options.jsonl));
  if (!options.tensorboard.empty()) tensorboard_ = std::make_unique<TensorBoardWriter>(options.tensorboard, unix_now());
  if (prometheus_ || jsonl_ || tensorboard_ || options.hardware_without_sinks) {
    hardware_ = std::make_unique<HardwareMonitor>(HardwareMonitor::Options{
        .interval = options.hardware_interval, .root = std::move(options.hardware_root), .nvml = Nvml::open()});
  }
}

template <class Sink, class Action>
void MetricsSinks::use(std::unique_ptr<Sink>& sink, const Action& action) {
  if (sink == nullptr) return;
  try {
    action(*sink);
  } catch (const IoError& error) {
    sink.reset();
    if (on_problem_) on_problem_(std::string(error.what()) + "; nothing more is recorded there");
  }
}

void MetricsSinks::record(const StepMetrics& metrics) {
  const std::shared_ptr<const HardwareSample> sample = hardware();
  const std::lock_guard lock(mutex_);
  const HardwareSample* fresh = sample == recorded_ ? nullptr : sample.get();
  recorded_ = sample;
  use(jsonl_, [&](MetricsJsonl& sink) { sink.record(metrics, fresh); });
  use(tensorboard_, [&](TensorBoardWriter& sink) { sink.record(metrics, fresh); });
  if (prometheus_) prometheus_->record(metrics, fresh);
}

void MetricsSinks::incident(std::string_view text) {
  const std::lock_guard lock(mutex_);
  use(jsonl_, [&](MetricsJsonl& sink) { sink.incident(unix_now(), text); });
  if (prometheus_) prometheus_->incident();
}

std::shared_ptr<const HardwareSample> MetricsSinks::hardware() const { return hardware_ ? hardware_->latest() : nullptr; }

std::string MetricsSinks::prometheus_url() const { return prometheus_ ? prometheus_->url() : std::string(); }

}  // namespace tandem
