// SPDX-License-Identifier: Apache-2.0
// Layouts that people have run on machines of their own, and what the planner makes of the same model, batch and machine.
#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/scaling/planner.h"
#include "optimized/scaling/published.h"
#include "suites/scaling_cases.h"

namespace tandem {
namespace {

// What the software of these runs had: schedules of Megatron, and rings of keys only where the run has them.
PlanQuery query_of(const PublishedRow& row) {
  PlanQuery query;
  query.model = row.workload.model;
  query.cluster = cluster_of(row);
  query.devices = row.devices;
  query.global_batch_rows = row.workload.plan.batch.rows;
  query.sequence = row.workload.sequence;
  query.precision = row.workload.plan.precision;
  query.software = row.workload.software;
  query.schedules = {"1f1b", "interleaved"};
  query.most = {{"context", row.workload.plan.parallel.context}};
  query.top = 30;
  return query;
}

struct Place {
  double place = 0, over_best = 0, seconds = 0;
  std::string text;
  /// At most 1: among the first five, or within 5 % of the best.
  [[nodiscard]] double over_limit() const { return std::min(place / 5, over_best / 1.05); }
};

Place place_of(const std::string& id) {
  const std::vector<PublishedRow> rows = published_rows("all");
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const PublishedRow& one) { return one.id == id; });
  TANDEM_CHECK(row != rows.end(), fmt::format("there is no published row '{}'", id));
  const PlanReport report = search_plans(query_of(*row));
  const ParallelDegrees& published = row->workload.plan.parallel;
  const auto found = std::find_if(report.best.begin(), report.best.end(),
                                  [&](const PlanCandidate& candidate) { return candidate.workload.plan.parallel == published; });
  const bool listed = found != report.best.end();
  const PlanCandidate& best = report.best.front();
  Place place;
  place.place = listed ? static_cast<double>(found - report.best.begin()) + 1 : 99;
  place.over_best = listed ? found->estimate.step_seconds / best.estimate.step_seconds : 99;
  place.seconds = report.seconds;
  const ParallelDegrees& first = best.workload.plan.parallel;
  place.text = fmt::format(
      "tensor {} pipeline {} data {} is place {:.0f} of {} layouts with {:.3f} of the best's step, which is "
      "tensor {} pipeline {} data {}",
      published.tensor, published.pipeline, published.data, place.place, report.candidates, place.over_best, first.tensor,
      first.pipeline, first.data);
  return place;
}

std::vector<Property> planned(const std::string& id) {
  const Place place = place_of(id);
  return {{"over_limit", place.over_limit(), Relation::at_most, 1.0,
           place.text + ": among the first five, or within 5 % of the best", -1, ""},
          {"seconds", place.seconds, Relation::at_most, 10.0, "of the search", -1, ""}};
}

const std::vector<std::string>& named() {
  static const std::vector<std::string> kNamed = {"sc21-t1-1.7b", "sc21-t1-3.6b", "korthikanti-t5-22b-selsp",
                                                  "korthikanti-t5-175b-selsp", "mlperf-v4.1-gpt3-nvidia-eos-n32-ngc24.09-nemo"};
  return kNamed;
}

// The others of SC 2021 and one of a larger model: all are reported. The rule of that paper, tensor parallelism over the whole
// node, is not always the planner's choice.
std::vector<Property> every_row(const RunContext& /*context*/) {
  std::vector<std::string> ids = named();
  for (const char* id :
       {"sc21-t1-7.5b", "sc21-t1-18.4b", "sc21-t1-39.1b", "sc21-t1-76.1b", "sc21-t1-145.6b", "sc21-t2-ptdp-174.6b-384",
        "sc21-t2-ptdp-174.6b-768", "sc21-t2-ptdp-529.6b-560", "sc21-t2-ptdp-529.6b-1120",
        "mlperf-v3.1-gpt3-nvidia-eos-n64-ngc23.09-nemo", "mlperf-v5.0-llama31-405b-nvidia-eos-dfw-n64-ngc25.01-nemo"}) {
    ids.emplace_back(id);
  }
  std::vector<Property> properties;
  double hits = 0;
  for (const std::string& id : ids) {
    const Place place = place_of(id);
    hits += place.over_limit() <= 1 ? 1 : 0;
    properties.push_back({"over_best of " + id, place.over_best, Relation::at_most, 1.25, place.text, -1, ""});
  }
  properties.push_back({"share_of_rows_in_top_five", hits / static_cast<double>(ids.size()), Relation::at_least, 0.5,
                        fmt::format("{:.0f} of {} are among the first five, or within 5 % of the best", hits, ids.size()), -1,
                        ""});
  return properties;
}

}  // namespace

void add_scaling_plan_cases(CaseList& cases) {
  for (const std::string& id : named()) {
    cases.push_back(scaling_case("plan/" + id,
                                 "the published layout is among the planner's first five, or within 5 % of its best",
                                 [id](const RunContext&) { return planned(id); }));
  }
  Case all = scaling_case("plan/every-row", "published layouts are near the planner's best", every_row);
  all.quick = false;
  cases.push_back(std::move(all));
}

}  // namespace tandem
