// SPDX-License-Identifier: Apache-2.0
#include "harness/junit.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "core/io/atomic_file.h"

namespace tandem {
namespace {

// XML 1.0 has no way to write control characters, so they become question marks.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    }
  }
  return out;
}

std::string test_case(const CaseResult& result) {
  const Verdict& verdict = result.verdict;
  const std::string opening = fmt::format(R"(    <testcase classname="{}" name="{}" time="{:.6f}")", escaped(result.suite),
                                          escaped(result.name), result.seconds);
  const std::string where = result.localisation ? "; " + describe(*result.localisation) : std::string();
  const std::string reason = escaped(verdict.reason + where);
  switch (verdict.status) {
    case Status::pass: return opening + "/>\n";
    case Status::skip: return fmt::format("{}>\n      <skipped message=\"{}\"/>\n    </testcase>\n", opening, reason);
    case Status::fail:
    case Status::invalid: break;
  }
  return fmt::format("{0}>\n      <{1} type=\"{2}\" message=\"{3}\">{3}</{1}>\n    </testcase>\n", opening,
                     verdict.status == Status::fail ? "failure" : "error", escaped(verdict.check), reason);
}

std::string test_suite(const std::string& suite, const std::vector<CaseResult>& results) {
  const Counts counts = count(results);
  double seconds = 0;
  for (const CaseResult& result : results) seconds += result.seconds;
  std::string text =
      fmt::format("  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"{}\" time=\"{:.6f}\">\n",
                  escaped(suite), results.size(), counts.failed, counts.invalid, counts.skipped, seconds);
  for (const CaseResult& result : results) text += test_case(result);
  return text + "  </testsuite>\n";
}

}  // namespace

std::string to_junit(const std::vector<CaseResult>& results) {
  std::vector<std::string> suites;
  for (const CaseResult& result : results) {
    if (std::ranges::count(suites, result.suite) == 0) suites.push_back(result.suite);
  }
  const Counts counts = count(results);
  std::string text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
  text += fmt::format("<testsuites name=\"tandem\" tests=\"{}\" failures=\"{}\" errors=\"{}\">\n", results.size(), counts.failed,
                      counts.invalid);
  for (const std::string& suite : suites) {
    std::vector<CaseResult> members;
    std::ranges::copy_if(results, std::back_inserter(members), [&](const CaseResult& result) { return result.suite == suite; });
    text += test_suite(suite, members);
  }
  return text + "</testsuites>\n";
}

void write_junit(const std::filesystem::path& path, const std::vector<CaseResult>& results) {
  write_file_atomically(path, to_junit(results));
}

}  // namespace tandem
