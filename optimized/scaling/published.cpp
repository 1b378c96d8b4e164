// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/published.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "core/error.h"
#include "core/quantile.h"

namespace tandem {
namespace {

// Of ordered pairs, tau-b: (concordant - discordant) / sqrt((pairs - ties in x) (pairs - ties in y)).
double kendall_tau_b(const std::vector<double>& x, const std::vector<double>& y) {
  double balance = 0, in_x = 0, in_y = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const int sign_x = (x[i] > x[j]) - (x[i] < x[j]);
      const int sign_y = (y[i] > y[j]) - (y[i] < y[j]);
      balance += sign_x * sign_y;
      in_x += sign_x != 0;
      in_y += sign_y != 0;
    }
  }
  return in_x > 0 && in_y > 0 ? balance / std::sqrt(in_x * in_y) : 0;
}

struct Table {
  std::vector<double> published, predicted;                        // seconds
  std::vector<double> published_throughput, predicted_throughput;  // model FLOP/s of a device
};

// By linear interpolation between the sorted values.
double flops_of_a_device(const PublishedRow& row) {
  const Workload& workload = row.workload;
  return 3 * static_cast<double>(workload.plan.batch.rows) *
         forward_flops_per_row(workload.model, workload.tokens_per_row(), AttentionFlops::full) / row.devices;
}

void add_order(const std::map<std::string, Table>& tables, ErrorSummary& summary) {
  constexpr std::size_t kLeastRows = 4;
  double pairs = 0;
  for (const auto& [name, table] : tables) {
    const std::size_t rows = table.published.size();
    if (rows < kLeastRows) continue;
    const double weight = 0.5 * static_cast<double>(rows) * static_cast<double>(rows - 1);
    summary.kendall_tau += weight * kendall_tau_b(table.published, table.predicted);
    summary.kendall_tau_throughput += weight * kendall_tau_b(table.published_throughput, table.predicted_throughput);
    pairs += weight;
    ++summary.tables;
  }
  if (pairs > 0) {
    summary.kendall_tau /= pairs;
    summary.kendall_tau_throughput /= pairs;
  }
}

ErrorSummary summarize_as(const std::string& name, const std::vector<const PublishedError*>& errors) {
  ErrorSummary summary;
  summary.name = name;
  std::vector<double> absolute;
  std::map<std::string, Table> tables;
  for (const PublishedError* error : errors) {
    if (!error->refused.empty()) {
      ++summary.refused;
      continue;
    }
    absolute.push_back(std::abs(error->relative()));
    summary.mean_signed += error->relative();
    Table& table = tables[error->row->set + ": " + error->row->table];
    const double work = flops_of_a_device(*error->row);
    table.published.push_back(error->row->step_seconds);
    table.predicted.push_back(error->predicted_seconds);
    table.published_throughput.push_back(work / error->row->step_seconds);
    table.predicted_throughput.push_back(work / error->predicted_seconds);
  }
  std::sort(absolute.begin(), absolute.end());
  summary.rows = static_cast<int>(absolute.size());
  if (absolute.empty()) return summary;
  summary.median_absolute = quantile(absolute, 0.5);
  summary.p90_absolute = quantile(absolute, 0.9);
  summary.worst_absolute = absolute.back();
  summary.mean_signed /= static_cast<double>(absolute.size());
  add_order(tables, summary);
  return summary;
}

// Of the clusters that have the row's devices the first one with as many in a node, else the first one.
ClusterSpec with_devices_of(const PublishedRow& row) {
  std::optional<ClusterSpec> best;
  for (const std::string& name : shipped_clusters()) {
    ClusterSpec cluster = read_cluster(name);
    if (cluster.device.name != row.hardware) continue;
    if (cluster.devices_per_node == row.devices_per_node) return cluster;
    if (!best) best = std::move(cluster);
  }
  if (!best) throw InputError(fmt::format("{}: no cluster that travels with the program has devices '{}'", row.id, row.hardware));
  return std::move(*best);
}

}  // namespace

bool is_gated(const PublishedRow& row) { return row.complete && !row.suspect && !row.from_memory && !row.approximate; }

ClusterSpec cluster_of(const PublishedRow& row) {
  ClusterSpec cluster = row.cluster.empty() ? with_devices_of(row) : read_cluster(row.cluster);
  if (cluster.devices_per_node != row.devices_per_node) {
    for (NetworkLevel& level : cluster.levels) {
      if (level.devices == cluster.devices_per_node) level.devices = row.devices_per_node;
    }
    cluster.devices_per_node = row.devices_per_node;
  }
  if (row.network_bytes_per_second > 0 && cluster.levels.size() > 1) {
    cluster.levels.back().bytes_per_second = row.network_bytes_per_second;
  }
  cluster.nodes = 0;
  return cluster;
}

std::vector<PublishedError> predict(const std::vector<PublishedRow>& rows) {
  std::map<std::tuple<std::string, std::string, int, double>, ClusterSpec> clusters;
  std::vector<PublishedError> errors;
  errors.reserve(rows.size());
  for (const PublishedRow& row : rows) {
    PublishedError error;
    error.row = &row;
    try {
      require_possible(row.workload);
      const auto key = std::tuple(row.cluster, row.hardware, row.devices_per_node, row.network_bytes_per_second);
      auto cluster = clusters.find(key);
      if (cluster == clusters.end()) cluster = clusters.emplace(key, cluster_of(row)).first;
      error.predicted_seconds = simulate(row.workload, cluster->second).step_seconds;
    } catch (const InputError& refusal) {
      error.refused = refusal.what();
    }
    errors.push_back(std::move(error));
  }
  return errors;
}

std::vector<ErrorSummary> summarize(const std::vector<PublishedError>& errors) {
  std::map<std::string, std::vector<const PublishedError*>> sets;
  std::vector<const PublishedError*> all;
  for (const PublishedError& error : errors) {
    sets[error.row->set].push_back(&error);
    all.push_back(&error);
  }
  std::vector<ErrorSummary> summaries;
  summaries.reserve(sets.size() + 1);
  for (const auto& [name, members] : sets) summaries.push_back(summarize_as(name, members));
  summaries.push_back(summarize_as("all", all));
  return summaries;
}

}  // namespace tandem
