// SPDX-License-Identifier: Apache-2.0
#include "suites/own_parts.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "core/error.h"
#include "harness/registry.h"
#include "harness/runner.h"
#include "kernels/forwarding_kernels.h"
#include "optimized/comm/forwarding_communicator.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "suites/suites.h"

namespace tandem {
namespace {

// Gradients are summed and multiplied by a factor; with another than one, wrong.
class ScaledSums final : public ForwardingCommunicator {
 public:
  ScaledSums(Communicator& inner, float factor, std::atomic<std::int64_t>& calls)
      : ForwardingCommunicator(inner), factor_(factor), calls_(calls) {}
  ScaledSums(std::unique_ptr<Communicator> inner, float factor, std::atomic<std::int64_t>& calls)
      : ForwardingCommunicator(std::move(inner)), factor_(factor), calls_(calls) {}

  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) override {
    ++calls_;
    inner().all_reduce(data, options).wait_host();
    if (options.purpose == Purpose::gradient) {
      for (float& value : data.as<float>()) value *= factor_;
    }
    return {};
  }
  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override {
    return std::make_unique<ScaledSums>(inner().split(colour, key), factor_, calls_);
  }

 private:
  float factor_;
  std::atomic<std::int64_t>& calls_;
};

// An AdamW whose decay is forgotten, or not.
class OwnUpdate final : public ForwardingKernels {
 public:
  OwnUpdate(std::unique_ptr<Kernels> inner, bool decays) : ForwardingKernels(std::move(inner)), decays_(decays) {}
  void adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
             TensorView stored) override {
    AdamWStep now = step;
    if (!decays_) now.weight_decay = 0;
    inner().adamw(now, gradient, parameter, m, v, stored);
  }

 private:
  bool decays_;
};

CaseResult judged(const std::string& name, OwnParts parts) {
  const std::vector<std::string> pattern = {name};
  CaseList cases = select_cases(all_cases({}), pattern, Tier::quick);
  cases.resize(1);
  return run_case(with_own_parts(cases, std::make_shared<const OwnParts>(std::move(parts))).front(), RunnerOptions());
}

class OwnPartsOfASuite : public ::testing::Test {
 protected:
  OwnParts sums(float factor) {
    OwnParts parts{.name = "sums"};
    parts.communicator = [this, factor](Communicator& inner) { return std::make_unique<ScaledSums>(inner, factor, calls_); };
    parts.calls = [this] { return calls_.load(); };
    return parts;
  }
  static OwnParts update(bool decays) {
    OwnParts parts{.name = "update"};
    parts.kernels = [decays](std::unique_ptr<Kernels> inner) { return std::make_unique<OwnUpdate>(std::move(inner), decays); };
    return parts;
  }

  std::atomic<std::int64_t> calls_{0};
};

TEST_F(OwnPartsOfASuite, ARightAllReducePassesAndIsCalled) {
  const CaseResult result = judged("data_parallel/ranks2/accum1/fp32", sums(1.0F));

  EXPECT_EQ(result.verdict.status, Status::pass) << result.verdict.reason;
  EXPECT_GT(calls_, 0);
}

TEST_F(OwnPartsOfASuite, AFactorInAnAllReduceIsSeenInTheFirstGradient) {
  const CaseResult result = judged("data_parallel/ranks2/accum1/fp32", sums(1.001F));

  EXPECT_EQ(result.verdict.status, Status::fail);
  EXPECT_EQ(result.verdict.check, "gradients");
  EXPECT_EQ(result.verdict.first_bad_tensor, "wte.weight");
}

TEST_F(OwnPartsOfASuite, AnUpdateOfOnesOwnIsWhatTheEngineCalls) {
  EXPECT_EQ(judged("data_parallel/ranks1/accum1/fp32", update(true)).verdict.status, Status::pass);
  const CaseResult wrong = judged("data_parallel/ranks1/accum1/fp32", update(false));

  EXPECT_EQ(wrong.verdict.status, Status::fail);
  EXPECT_EQ(wrong.verdict.check, "adamw_parameters");
}

TEST_F(OwnPartsOfASuite, ACaseThatNeverCallsThemDoesNotPass) {
  const CaseResult result = judged("data_pipeline/ledger/epochs", sums(1.0F));

  EXPECT_EQ(result.verdict.status, Status::fail);
  EXPECT_NE(result.verdict.reason.find("calls_of_own_part"), std::string::npos) << result.verdict.reason;
}

TEST_F(OwnPartsOfASuite, PartsThatMakeNothingAreRefusedByName) {
  OwnParts parts{.name = "empty hands"};
  parts.communicator = [](Communicator&) { return nullptr; };
  parts.kernels = [](std::unique_ptr<Kernels>) { return nullptr; };
  const auto own = std::make_shared<const OwnParts>(parts);

  EXPECT_THROW(run_world({.ranks = 2, .settings = {.own_parts = own}}, [](Communicator&) {}), ContractError);
  EXPECT_THROW(static_cast<void>(make_kernels({}, MachineChoice{.own_parts = own})), ContractError);
}

}  // namespace
}  // namespace tandem
