// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/io/safetensors.h"
#include "core/io/trace_file.h"

namespace tandem {

/// One trace, from one folder or from several that ranks wrote: entries one after the other in the order of the folders, rows of
/// their batches put together by row_ids.
///
/// The constructor checks everything but the values: the index, that each tensor is there with floating values as many as its
/// entry says, that folders agree about model, precision, step and dropout, and that batches are whole and do not contradict each
/// other. What is wrong is an InputError that names file, entry and numbers. Values are mapped, and read when asked for.
class TraceReader final : public TraceSource {
 public:
  explicit TraceReader(const std::vector<std::filesystem::path>& folders);

  [[nodiscard]] const TraceHeader& header() const override { return header_; }
  [[nodiscard]] const std::vector<TraceEntry>& entries() const override { return entries_; }
  [[nodiscard]] std::vector<double> values(std::size_t index) const override;

  /// The global batch, rows in the order of their row_ids 0, 1, ...; empty where no folder carries one.
  [[nodiscard]] const std::optional<Batch>& batch() const noexcept { return batch_; }
  [[nodiscard]] const std::string& where() const noexcept { return where_; }

 private:
  void read_folder(const std::filesystem::path& folder);
  void add_batch(const std::filesystem::path& path);

  std::string where_;
  TraceHeader header_;
  std::vector<TraceEntry> entries_;
  std::vector<const SafetensorsFile*> files_;  ///< [entries]
  std::map<std::filesystem::path, SafetensorsFile> open_;
  std::map<std::int64_t, Batch> rows_;  ///< by row_id, until the batch is whole
  std::optional<Batch> batch_;
};

/// The trace `path`; or, where `path` holds no trace.json but its subfolders do, the trace that these make up, by name.
[[nodiscard]] TraceReader open_trace(const std::filesystem::path& path);

}  // namespace tandem
