// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "core/io/trace_file.h"
#include "core/trace.h"

namespace tandem {

/// A trace in memory, recorded from all ranks of one step. Recording is safe from several threads; read it when they are done.
class TraceRecorder final : public TraceSource {
 public:
  explicit TraceRecorder(TraceHeader header) : header_(std::move(header)) {}

  /// What `rank` reports. The recorder must outlive the sink.
  [[nodiscard]] TraceSink sink(int rank);
  [[nodiscard]] TraceConsumer consumer() {
    return [this](const TraceEntry& entry, TensorView values) { append(entry, values); };
  }
  /// Copies the values. Throws ContractError where they are not as many as the shard says.
  void append(TraceEntry entry, TensorView values);

  [[nodiscard]] TraceHeader& header() noexcept { return header_; }
  [[nodiscard]] const TraceHeader& header() const noexcept override { return header_; }
  [[nodiscard]] const std::vector<TraceEntry>& entries() const noexcept override { return entries_; }
  [[nodiscard]] std::vector<double> values(std::size_t index) const override;

 private:
  TraceHeader header_;
  std::mutex mutex_;
  std::vector<TraceEntry> entries_;
  std::vector<std::vector<std::byte>> bytes_;
};

}  // namespace tandem
