// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "harness/report/report.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr std::array kActivities = {Activity::compute, Activity::optimizer,  Activity::transfer, Activity::wait,
                                    Activity::data,    Activity::checkpoint, Activity::step};

// "CASE rank 3" -> {"CASE", 3}
std::pair<std::string, std::size_t> run_and_rank(const std::string& process) {
  const std::size_t at = process.rfind("rank ");
  std::size_t rank = 0;
  if (at == std::string::npos) return {process, 0};
  std::from_chars(process.data() + at + 5, process.data() + process.size(), rank);
  return {process.substr(0, at == 0 ? 0 : at - 1), rank};
}

// Events are taken one by one as they are parsed: a trace of many runs would be large as a tree.
class Reader {
 public:
  void take(const Json& event) {
    if (!event.is_object() || !event.contains("ph")) return;
    const Json& phase = event["ph"];
    if (phase == "M" && event.value("name", "") == "process_name") processes_[event.at("pid")] = event.at("args").at("name");
    if (phase == "X") take_span(event);
  }

  std::vector<TraceGroup> finish() && {
    std::vector<TraceGroup> groups;
    std::map<std::string, std::size_t> index;
    for (auto& [process, spans] : spans_) {
      const auto named = processes_.find(process);
      const auto [run, rank] = run_and_rank(named == processes_.end() ? fmt::format("rank {}", process) : named->second);
      if (rank >= kMostRanks) throw InputError(fmt::format("rank {} is beyond what is read", rank));
      const auto [found, is_new] = index.emplace(run, groups.size());
      if (is_new) groups.push_back({run, {}});
      auto& by_rank = groups[found->second].spans_by_rank;
      by_rank.resize(std::max(by_rank.size(), rank + 1));
      by_rank[rank] = std::move(spans);
    }
    return groups;
  }

 private:
  static constexpr std::size_t kMostRanks = 100000;

  static std::int64_t nanoseconds(const Json& microseconds) {
    const double value = 1000 * microseconds.get<double>();
    if (!(std::abs(value) < 1e18)) throw InputError("a time is out of range");
    return std::llround(value);
  }

  void take_span(const Json& event) {
    const std::string category = event.value("cat", "");
    const auto* activity = std::find_if(kActivities.begin(), kActivities.end(), [&](Activity a) { return name(a) == category; });
    if (activity == kActivities.end()) return;
    Span span;
    span.name = event.value("name", "");
    span.activity = *activity;
    span.lane = event.value("tid", 0) == 1 ? Lane::communication : Lane::compute;
    span.begin_ns = nanoseconds(event.at("ts"));
    span.end_ns = span.begin_ns + nanoseconds(event.at("dur"));
    if (event.contains("args")) span.step = event["args"].value("step", -1);
    spans_[event.at("pid")].push_back(std::move(span));
  }

  std::map<int, std::string> processes_;
  std::map<int, std::vector<Span>> spans_;
};

}  // namespace

std::vector<TraceGroup> read_chrome_trace(const std::string& text, const std::string& source_name) {
  Reader reader;
  constexpr int kDepthOfEvents = 2;
  bool has_events = false;
  const auto keep = [&](int depth, Json::parse_event_t what, Json& value) {
    if (what == Json::parse_event_t::key && value == "traceEvents") has_events = true;
    if (depth != kDepthOfEvents || what != Json::parse_event_t::object_end) return true;
    reader.take(value);
    return false;
  };
  try {
    const Json rest = Json::parse(text, keep);
    if (!has_events || !rest.is_object()) throw InputError("there is no list 'traceEvents'");
    return std::move(reader).finish();
  } catch (const Json::exception&) {
    throw InputError(fmt::format("{}: no Chrome trace as tandem run --trace writes it: truncated or damaged", source_name));
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", source_name, error.what()));
  }
}

}  // namespace tandem
