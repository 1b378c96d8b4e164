// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/io/trace_file.h"

namespace tandem {

/// Writes a trace folder: trace.json, values.safetensors and, where a batch is given, batch.safetensors.
///
/// Values go to a temporary file at once, so that memory holds one entry at a time. close() puts the files in place, trace.json
/// last: a folder without it is no trace, and an older trace in the folder stays valid until then. Destroyed without close(),
/// nothing of the new trace is left. append() may be called from several threads (ranks).
///
/// Throws IoError where the system refuses, ContractError for an entry whose values are not as many as its shard says, InputError
/// for one that require_possible() refuses.
class TraceWriter {
 public:
  TraceWriter(std::filesystem::path folder, TraceHeader header);
  ~TraceWriter();

  /// For what is known only at the end (loss).
  [[nodiscard]] TraceHeader& header() noexcept { return header_; }
  void append(const TraceEntry& entry, TensorView values);
  /// The global batch of the step.
  void set_batch(Batch batch) { batch_ = std::move(batch); }
  void close();

  [[nodiscard]] TraceConsumer consumer() {
    return [this](const TraceEntry& entry, TensorView values) { append(entry, values); };
  }

 private:
  void write_values();

  std::filesystem::path folder_;
  std::filesystem::path spool_path_;
  TraceHeader header_;
  std::mutex mutex_;
  std::ofstream spool_;
  std::vector<TraceEntry> entries_;
  std::optional<Batch> batch_;
};

/// A batch as a safetensors file: ids, targets, positions, document_starts [rows, sequence] and row_ids [rows], as I32 and I64.
void write_batch_file(const std::filesystem::path& path, const Batch& batch);
/// The inverse. positions, document_starts and row_ids may be missing: then they are as make_batch() has them. Throws InputError
/// where shapes differ, a token is not below `vocabulary` or a position not below `positions`.
[[nodiscard]] Batch read_batch_file(const std::filesystem::path& path, std::int64_t vocabulary, std::int64_t positions);

}  // namespace tandem
