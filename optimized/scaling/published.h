// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "optimized/scaling/simulator.h"

namespace tandem {

/// A published measurement (results/published/*.json, which travel inside the program): configuration, outcome and source.
struct PublishedRow {
  std::string id;        ///< "sc21-t1-1t"
  std::string set;       ///< "sc21": file of the row
  std::string table;     ///< rows whose order is compared: "Table 1 (weak scaling)"
  std::string source;    ///< title, place, reference
  std::string hardware;  ///< device name
  std::string cluster;   ///< that the set names; empty: the one with devices of this name
  std::string note;
  int devices_per_node = 8;
  double network_bytes_per_second =
      0;  ///< between nodes, one way, of one device, where the source says; 0: as in the cluster file
  Workload workload;
  int devices = 0;
  double step_seconds = 0;  ///< published or derived from what is published (`derived_by` says how)
  std::string derived_by;
  std::optional<double> published_mfu;
  std::optional<double> activation_bytes, model_state_bytes;
  double model_state_rounding = 0;         ///< half a unit of the last digit printed of model_state_bytes
  std::optional<double> activation_share;  ///< of what tensor parallelism alone keeps, without recomputation
  std::optional<double> device_bytes;      ///< all that the device held
  bool out_of_memory = false;              ///< it did not run
  bool complete = true;                    ///< every field of the configuration is stated; others are reported, never gated
  bool suspect = false, from_memory = false;
  bool approximate = false;  ///< read off a chart
  bool analytic = false;     ///< a formula of the source, not a measurement
};
/// Rows that may be gated: complete, neither suspect nor with an outcome from memory nor read off a chart.
[[nodiscard]] bool is_gated(const PublishedRow& row);
[[nodiscard]] std::vector<std::string> published_sets();
[[nodiscard]] std::vector<PublishedRow> published_rows(const std::string& set);  ///< "all": every one with a step time
[[nodiscard]] std::vector<PublishedRow> published_memory_rows(
    const std::string& set);  ///< "all": every one with a memory outcome
/// Rows of another file of the same format. Throws InputError.
[[nodiscard]] std::vector<PublishedRow> published_rows_from(const std::string& text, const std::string& source_name);
/// The shipped cluster that describes the row's hardware, with the row's devices per node and network bandwidth where it states
/// them.
[[nodiscard]] ClusterSpec cluster_of(const PublishedRow& row);

struct PublishedError {
  const PublishedRow* row = nullptr;
  double predicted_seconds = 0;
  [[nodiscard]] double relative() const noexcept { return predicted_seconds / row->step_seconds - 1; }
  std::string refused;  ///< why it could not be simulated
};
struct ErrorSummary {
  std::string name;  ///< of a set, or "all"
  int rows = 0;      ///< predicted
  double median_absolute = 0, p90_absolute = 0, worst_absolute = 0, mean_signed = 0;
  double kendall_tau = 0;  ///< of step seconds, over the tables of the set with at least 4 rows, weighted by their pairs
  double kendall_tau_throughput = 0;  ///< of model FLOP/s of a device instead, which larger models and batches do not order
  int tables = 0;                     ///< with at least 4 rows
  int refused = 0;                    ///< rows that could not be simulated, which count nowhere else
};
[[nodiscard]] std::vector<PublishedError> predict(const std::vector<PublishedRow>& rows);
/// One summary of each set, by name, and "all".
[[nodiscard]] std::vector<ErrorSummary> summarize(const std::vector<PublishedError>& errors);

}  // namespace tandem
