// SPDX-License-Identifier: Apache-2.0
// Has tandem's suites judge code that tandem has never seen: an all-reduce, or an optimizer.
//
//   own_technique [all-reduce | adamw] [--with-bug BUG] [CASE...]
//
// Exit status 0: the cases pass; 1: one does not; 2: the command line is wrong.
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "harness/registry.h"
#include "harness/runner.h"
#include "harness/table.h"
#include "own_adamw.h"
#include "ring_all_reduce.h"
#include "suites/own_parts.h"
#include "suites/suites.h"

namespace {

using Calls = std::shared_ptr<std::atomic<std::int64_t>>;

struct CommandLine {
  std::string part = "all-reduce", bug = "none";
  std::vector<std::string> cases;
};

CommandLine read(const std::vector<std::string>& words) {
  CommandLine line;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--with-bug" && i + 1 < words.size()) {
      line.bug = words[++i];
    } else if (i == 0 && (words[i] == "all-reduce" || words[i] == "adamw")) {
      line.part = words[i];
    } else {
      line.cases.push_back(words[i]);
    }
  }
  return line;
}

template <class Bug>
Bug find_bug(const std::map<std::string, Bug>& bugs, const std::string& name) {
  const auto found = bugs.find(name);
  if (found != bugs.end()) return found->second;
  std::string known;
  for (const auto& [bug, value] : bugs) known += " " + bug;
  throw std::invalid_argument("--with-bug " + name + ": there are" + known);
}

tandem::OwnParts all_reduce_parts(const std::string& bug_name, const Calls& calls) {
  using own::RingBug;
  const auto bug = find_bug<RingBug>({{"none", RingBug::none},
                                      {"off_by_one", RingBug::off_by_one},
                                      {"missing_hop", RingBug::missing_hop},
                                      {"wasteful", RingBug::wasteful}},
                                     bug_name);
  tandem::OwnParts parts;
  parts.name = "ring all-reduce";
  parts.communicator = [bug, calls](tandem::Communicator& inner) {
    return std::make_unique<own::RingAllReduce>(inner, bug, calls);
  };
  return parts;
}

tandem::OwnParts adamw_parts(const std::string& bug_name, const Calls& calls) {
  using own::AdamWBug;
  const auto bug = find_bug<AdamWBug>(
      {{"none", AdamWBug::none}, {"bias_correction", AdamWBug::bias_correction}, {"gradient_scale", AdamWBug::gradient_scale}},
      bug_name);
  tandem::OwnParts parts;
  parts.name = "AdamW";
  parts.kernels = [bug, calls](std::unique_ptr<tandem::Kernels> inner) {
    return std::make_unique<own::OwnAdamW>(std::move(inner), bug, calls);
  };
  return parts;
}

int judge(const CommandLine& line) {
  const auto calls = std::make_shared<std::atomic<std::int64_t>>(0);
  const bool is_all_reduce = line.part == "all-reduce";
  tandem::OwnParts parts = is_all_reduce ? all_reduce_parts(line.bug, calls) : adamw_parts(line.bug, calls);
  parts.calls = [calls] { return calls->load(); };

  // The same list as `tandem list` shows.
  std::vector<std::string> chosen = line.cases;
  if (chosen.empty() && is_all_reduce) {
    chosen = {"data_parallel/ranks2/accum1/fp32",         "data_parallel/ranks3/accum2/packed/fp32",
              "data_parallel/ranks4/accum3/buckets/fp32", "data_parallel/ranks7/rows5/fp32",
              "data_parallel/adversary/buckets",          "tensor_parallel/ranks3/fp32"};
  }
  if (chosen.empty())
    chosen = {"data_parallel/ranks1/accum1/fp32", "data_parallel/ranks2/accum1/fp32", "pipeline_parallel/ranks2/1f1b/fp32"};
  const tandem::CaseList all = tandem::all_cases({.results_folder = TANDEM_DATA_FOLDER, .more_golden_folder = {}});
  const tandem::CaseList cases = tandem::with_own_parts(tandem::select_cases(all, chosen, tandem::Tier::quick),
                                                        std::make_shared<const tandem::OwnParts>(parts));
  const tandem::RunOutcome outcome = tandem::run_cases(cases, tandem::RunnerOptions());
  std::printf("%s by the suites; its code was called %lld times\n%s", parts.name.c_str(), static_cast<long long>(calls->load()),
              tandem::render_table(outcome.results, tandem::TableStyle::terminal).c_str());
  return tandem::count(outcome.results).good() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return judge(read({argv + 1, argv + argc}));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "own_technique: %s\n", error.what());
    return 2;
  }
}
