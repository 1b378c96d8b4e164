// SPDX-License-Identifier: Apache-2.0
// Linked into a test program in front of its own files: tells the switches where each of its tests begins and ends.
#include <string>

#include <gtest/gtest.h>

#include "mutation.h"

namespace {

class Hook final : public ::testing::EmptyTestEventListener {
  static std::string name_of(const ::testing::TestInfo& test) { return std::string(test.test_suite_name()) + "." + test.name(); }

  void OnTestStart(const ::testing::TestInfo& test) override { ::tandem_mutation::begin_case(name_of(test).c_str()); }
  void OnTestEnd(const ::testing::TestInfo& test) override {
    const ::testing::TestResult& result = *test.result();
    const char* const status = result.Skipped() ? "skip" : result.Passed() ? "pass" : "fail";
    ::tandem_mutation::end_case(name_of(test).c_str(), status, "unit test", static_cast<double>(result.elapsed_time()) / 1000);
  }
};

// Google Test owns it.
[[maybe_unused]] const bool hooked = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Hook);
  return true;
}();

}  // namespace
