// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/insert_behind.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

Operation numbered(int number, std::vector<OperationId> after = {}) {
  Operation op;
  op.layer = number;
  op.after = std::move(after);
  return op;
}

TEST(InsertBehind, KeepsReferencesToOperationsRight) {
  const StepProgram program = {numbered(0), numbered(1, {0}), numbered(2, {0, 1})};
  const Inserted result = insert_behind(program, {{1, numbered(11, {1})}, {0, numbered(10, {0})}, {1, numbered(12, {0})}});
  std::vector<int> order;
  for (const Operation& op : result.program) order.push_back(op.layer);
  EXPECT_EQ(order, (std::vector<int>{0, 10, 1, 11, 12, 2}));
  EXPECT_EQ(result.moved_to, (std::vector<OperationId>{0, 2, 5}));
  EXPECT_EQ(result.inserted, (std::vector<OperationId>{3, 1, 4}));
  EXPECT_EQ(result.program[5].after, (std::vector<OperationId>{0, 2}));
  EXPECT_EQ(result.program[3].after, (std::vector<OperationId>{2}));
  EXPECT_EQ(result.program[4].after, (std::vector<OperationId>{0}));
}

TEST(InsertBehind, PutsOperationsBeforeTheFirst) {
  const Inserted result = insert_behind({numbered(0)}, {{-1, numbered(5)}});
  EXPECT_EQ(result.program[0].layer, 5);
  EXPECT_EQ(result.program[1].layer, 0);
}

TEST(InsertBehind, RefusesWhatDoesNotExistOrComesLater) {
  EXPECT_THROW((void)insert_behind({numbered(0)}, {{1, numbered(5)}}), ContractError);
  EXPECT_THROW((void)insert_behind({numbered(0), numbered(1)}, {{0, numbered(5, {1})}}), ContractError);
}

}  // namespace
}  // namespace tandem
