// SPDX-License-Identifier: Apache-2.0
#include "suites/parallel_cases.h"

#include <cmath>

#include <gtest/gtest.h>

#include "reference/data_parallel.h"

namespace tandem {
namespace {

using Gradients = std::map<std::string, std::vector<double>, std::less<>>;

Gradients one_rank(const PairInputs& inputs, const Batch& batch) {
  const auto parameters = reference::initial_parameters<double>(inputs.model, inputs.initialization, inputs.seed);
  return reference::data_parallel_gradients<double>(inputs.model, parameters, batch, {1, 1},
                                                    reference::DropoutStep{inputs.seed, 0})
      .gradients;
}

TEST(LockstepAgrees, HoldsForTheSameGradients) { EXPECT_TRUE(lockstep_agrees(inputs_of({}, {}), one_rank).holds()); }

TEST(LockstepAgrees, FailsForOneWrongTensor) {
  const Property property = lockstep_agrees(inputs_of({}, {}), [](const PairInputs& inputs, const Batch& batch) {
    Gradients gradients = one_rank(inputs, batch);
    gradients.at("h.0.ln_2.bias").front() *= 1.001;
    return gradients;
  });

  EXPECT_FALSE(property.holds());
  EXPECT_EQ(property.tensor, "h.0.ln_2.bias");
}

TEST(LockstepAgrees, FailsForOneNumberThatIsNone) {
  const Property property = lockstep_agrees(inputs_of({}, {}), [](const PairInputs& inputs, const Batch& batch) {
    Gradients gradients = one_rank(inputs, batch);
    gradients.at("h.0.ln_2.bias").front() = std::nan("");
    return gradients;
  });

  EXPECT_FALSE(property.holds());
  EXPECT_EQ(property.tensor, "h.0.ln_2.bias");
}

}  // namespace
}  // namespace tandem
