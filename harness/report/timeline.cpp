// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <map>

#include <fmt/format.h>

#include "harness/report/result_charts.h"
#include "harness/text_table.h"

namespace tandem {
namespace {

constexpr std::size_t kMostRanks = 16, kMostBoxes = 2000, kMostRuns = 3;
constexpr std::array kDrawn = {Activity::compute,   Activity::transfer, Activity::wait,
                               Activity::optimizer, Activity::data,     Activity::checkpoint};

struct Window {
  int step = -1;
  std::int64_t begin_ns = std::numeric_limits<std::int64_t>::max(), end_ns = 0;
  [[nodiscard]] std::int64_t length_ns() const { return std::max<std::int64_t>(0, end_ns - begin_ns); }
};

Window last_step(const TraceGroup& group) {
  Window window;
  for (const auto& spans : group.spans_by_rank) {
    for (const Span& span : spans) {
      if (span.activity == Activity::step) window.step = std::max(window.step, span.step);
    }
  }
  for (const auto& spans : group.spans_by_rank) {
    for (const Span& span : spans) {
      if (span.step != window.step || span.activity != Activity::step) continue;
      window.begin_ns = std::min(window.begin_ns, span.begin_ns);
      window.end_ns = std::max(window.end_ns, span.end_ns);
    }
  }
  return window;
}

struct Stretch {
  std::int64_t begin_ns = 0, end_ns = 0;
};

// Stretches in order of their beginning; those with less than `gap_ns` between them become one.
std::vector<Stretch> joined(std::vector<Stretch> stretches, std::int64_t gap_ns) {
  std::sort(stretches.begin(), stretches.end(), [](const Stretch& a, const Stretch& b) { return a.begin_ns < b.begin_ns; });
  std::vector<Stretch> out;
  for (const Stretch& stretch : stretches) {
    if (!out.empty() && stretch.begin_ns - out.back().end_ns < gap_ns) {
      out.back().end_ns = std::max(out.back().end_ns, stretch.end_ns);
    } else {
      out.push_back(stretch);
    }
  }
  return out;
}

// (activity, row) -> what a lane did in the window. Rows: two for each rank.
using Lanes = std::map<std::pair<std::size_t, std::size_t>, std::vector<Stretch>>;

Lanes lanes_of(const TraceGroup& group, const Window& window) {
  Lanes lanes;
  for (std::size_t rank = 0; rank < std::min(kMostRanks, group.spans_by_rank.size()); ++rank) {
    for (const Span& span : group.spans_by_rank[rank]) {
      const auto activity = std::find(kDrawn.begin(), kDrawn.end(), span.activity);
      const Stretch inside{std::max(span.begin_ns, window.begin_ns), std::min(span.end_ns, window.end_ns)};
      if (activity == kDrawn.end() || inside.begin_ns >= inside.end_ns) continue;
      const auto index = static_cast<std::size_t>(activity - kDrawn.begin());
      lanes[{index, 2 * rank + static_cast<std::size_t>(span.lane)}].push_back(inside);
    }
  }
  return lanes;
}

// The shortest gap with which not too many boxes are left.
std::int64_t join(Lanes& lanes, const Window& window) {
  for (std::int64_t gap_ns = std::max<std::int64_t>(1, window.length_ns() / 4000);; gap_ns *= 2) {
    std::size_t boxes = 0;
    for (auto& [key, stretches] : lanes) {
      stretches = joined(std::move(stretches), gap_ns);
      boxes += stretches.size();
    }
    if (boxes <= kMostBoxes || gap_ns > window.length_ns()) return gap_ns;
  }
}

}  // namespace

Chart timeline_chart(const TraceGroup& group) {
  const Window window = last_step(group);
  Lanes lanes = lanes_of(group, window);
  const std::int64_t gap_ns = join(lanes, window);
  const std::size_t ranks = std::min(kMostRanks, group.spans_by_rank.size());
  Chart chart{
      .id = "timeline",
      .title = fmt::format("{}, step {}", group.name.empty() ? "One step" : group.name, window.step),
      .caption = fmt::format("{} of {} ranks, a lane for computing and one for communicating; gaps below {} are not drawn.",
                             ranks, group.spans_by_rank.size(), human_seconds(static_cast<double>(gap_ns) * 1e-9)),
      .x_label = "ms from the beginning of the step"};
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    chart.rows.push_back(fmt::format("rank {}", rank));
    chart.rows.push_back("link");
  }
  for (std::size_t i = 0; i < kDrawn.size(); ++i) {
    ChartSeries series{.name = std::string(name(kDrawn[i])), .spans = true};
    for (const auto& [key, stretches] : lanes) {
      if (key.first != i) continue;
      for (const Stretch& stretch : stretches) {
        series.y.push_back(static_cast<double>(key.second));
        series.low.push_back(static_cast<double>(stretch.begin_ns - window.begin_ns) * 1e-6);
        series.high.push_back(static_cast<double>(stretch.end_ns - window.begin_ns) * 1e-6);
      }
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

ReportSection timeline_section(const std::vector<TraceGroup>& groups) {
  std::vector<std::pair<std::int64_t, const TraceGroup*>> longest;
  for (const TraceGroup& group : groups) longest.emplace_back(last_step(group).length_ns(), &group);
  std::stable_sort(longest.begin(), longest.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::erase_if(longest, [](const auto& entry) { return entry.first == 0; });
  ReportSection section{.title = "Timeline"};
  if (longest.size() > kMostRuns) {
    section.text = fmt::format("The {} runs with the longest steps of {} in the trace; trace one case to see another.", kMostRuns,
                               longest.size());
  }
  longest.resize(std::min(longest.size(), kMostRuns));
  for (const auto& [length, group] : longest) section.charts.push_back(timeline_chart(*group));
  return section;
}

}  // namespace tandem
