// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/rng.h"
#include "harness/case.h"

namespace tandem::testing {

inline constexpr double kFp32Roundoff = 0x1p-24;
inline constexpr double kFp64Roundoff = 0x1p-53;

/// EXPECT_TRUE(has(text, "part")) prints the text when the part is not in it.
inline ::testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << part << "' is not in: " << text;
}

/// Evidence that a healthy pair would give: three parameter tensors, one of them with a true gradient of zero, four steps. Both
/// fp32 sides deviate from the truth by about `noise` of each value, in different ways.
class MadeUpCase {
 public:
  explicit MadeUpCase(int ranks = 1, double noise = 0x1p-25) : noise_(noise) {
    evidence.truth = side("reference fp64", kFp64Roundoff, 1, 0);
    evidence.yardstick = side("reference fp32", kFp32Roundoff, 1, 1);
    evidence.candidate = side("engine fp32", kFp32Roundoff, ranks, 2);
  }

  /// The tensor of a side; `side` is one of evidence.truth, .yardstick, .candidate.
  static std::vector<double>& values(std::optional<Evidence>& side, const std::string& stage, const std::string& tensor) {
    for (StageEvidence& candidate : side->stages) {
      for (EvidenceTensor& named : candidate.tensors) {
        if (candidate.stage == stage && named.name == tensor) return named.values;
      }
    }
    throw ContractError("no such tensor: " + stage + "/" + tensor);
  }

  CaseEvidence evidence;

 private:
  // Value `index` of a tensor as side number `which` computes it; side 0 is exact.
  [[nodiscard]] double value(const std::string& key, std::size_t index, double scale, int which) const {
    const double exact = scale * parameter_normal(7, key, index);
    return which == 0 ? exact : exact * (1 + noise_ * parameter_normal(static_cast<std::uint64_t>(which), key + " noise", index));
  }

  EvidenceTensor tensor(const std::string& stage, const std::string& name, std::size_t size, double scale, int which) const {
    EvidenceTensor made{name, std::vector<double>(size), 64, name == "key.bias"};
    for (std::size_t i = 0; i < size; ++i) made.values[i] = value(stage + name, i, scale, which);
    return made;
  }

  StageEvidence parameters(const std::string& stage, int step, int which) const {
    StageEvidence made{stage, step, {}};
    made.tensors.push_back(tensor(stage, "weight", 40, 0.1, which));
    made.tensors.push_back(tensor(stage, "bias", 10, 0.02, which));
    made.tensors.push_back(tensor(stage, "key.bias", 10, 0.02, which));
    return made;
  }

  Evidence side(std::string identity, double unit_roundoff, int ranks, int which) const {
    Evidence made;
    made.side = std::move(identity);
    made.unit_roundoff = unit_roundoff;
    made.ranks = ranks;
    made.stages.push_back(parameters("initial_parameters", 0, 0));
    made.stages.push_back(parameters("gradients", 0, which));
    // What rounding leaves where the true value is zero.
    for (double& left : made.stages.back().tensors[2].values) left *= which * 1e-9;
    made.stages.push_back(parameters("sgd_parameters", 0, which));
    made.stages.push_back(parameters("adamw_parameters", 3, which));
    // Adam makes full-size updates of that noise.
    for (double& noisy : made.stages.back().tensors[2].values) noisy += which;
    made.stages.push_back({"losses", 3, {tensor("losses", "loss", 4, 5, which)}});
    made.stages.push_back({"gradient_norms", 3, {tensor("gradient_norms", "gradient_norm", 4, 1, which)}});
    made.losses = made.stages[4].tensors[0].values;
    for (int rank = 0; rank < ranks; ++rank) {
      made.input_hashes.push_back(100 + static_cast<std::uint64_t>(rank));
      made.replica_hashes.push_back(42);
    }
    return made;
  }

  double noise_;
};

/// The same run on both sides, for Criterion::bitwise.
inline CaseEvidence made_up_twins(int ranks = 1) {
  MadeUpCase made(ranks);
  CaseEvidence twins;
  twins.truth = made.evidence.candidate;
  twins.truth->side = "the twin";
  twins.candidate = made.evidence.candidate;
  return twins;
}

}  // namespace tandem::testing
