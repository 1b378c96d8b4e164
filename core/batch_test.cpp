// SPDX-License-Identifier: Apache-2.0
#include "core/batch.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace tandem {
namespace {

// Two rows of three with ids that say where they are.
Batch numbered_batch(std::int64_t rows, std::int64_t sequence) {
  Batch batch = make_batch(rows, sequence);
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    batch.ids[i] = static_cast<std::int32_t>(i);
    batch.targets[i] = static_cast<std::int32_t>(i) + 1;
  }
  return batch;
}

TEST(Batch, StartsWithNothingToLearn) {
  const Batch batch = make_batch(2, 3);

  EXPECT_EQ(batch.valid_tokens(), 0);
  EXPECT_EQ(batch.ids, std::vector<std::int32_t>(6, 0));
  EXPECT_EQ(batch.positions, (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(batch.document_starts, std::vector<std::int32_t>(6, 0));
  EXPECT_EQ(batch.row_ids, (std::vector<std::int64_t>{0, 1}));
}

TEST(Batch, MayHaveNoRows) {
  const Batch batch = make_batch(0, 3);
  EXPECT_TRUE(batch.ids.empty());
  EXPECT_EQ(batch.valid_tokens(), 0);
  EXPECT_EQ(slice_rows(batch, 0, 0).rows, 0);
}

TEST(Batch, CountsTheTargetsThatAreNotIgnored) {
  Batch batch = numbered_batch(2, 3);
  batch.targets[4] = kIgnoredTarget;
  EXPECT_EQ(batch.valid_tokens(), 5);
}

TEST(SliceRows, KeepsEveryColumnAndTheGlobalRowIds) {
  Batch batch = numbered_batch(4, 2);
  batch.document_starts[5] = 1;
  batch.positions[5] = 9;

  const Batch part = slice_rows(batch, 2, 2);

  EXPECT_EQ(part.rows, 2);
  EXPECT_EQ(part.sequence, 2);
  EXPECT_EQ(part.ids, (std::vector<std::int32_t>{4, 5, 6, 7}));
  EXPECT_EQ(part.targets, (std::vector<std::int32_t>{5, 6, 7, 8}));
  EXPECT_EQ(part.positions, (std::vector<std::int32_t>{0, 9, 0, 1}));
  EXPECT_EQ(part.document_starts, (std::vector<std::int32_t>{0, 1, 0, 0}));
  EXPECT_EQ(part.row_ids, (std::vector<std::int64_t>{2, 3}));
  EXPECT_THROW((void)slice_rows(batch, 3, 2), ContractError);
  EXPECT_THROW((void)slice_rows(batch, -1, 2), ContractError);
}

TEST(ValidateTokens, NamesTokenRowPositionAndVocabulary) {
  Batch batch = numbered_batch(2, 3);
  EXPECT_NO_THROW(validate_tokens(batch, 7));

  batch.ids[4] = 7;
  try {
    validate_tokens(batch, 7);
    FAIL() << "no error";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("token id 7 at row 1, position 1 is outside the vocabulary of 7"),
              std::string::npos);
  }
}

TEST(ValidateTokens, IgnoresIgnoredTargetsOnly) {
  Batch batch = numbered_batch(1, 3);
  batch.targets[1] = kIgnoredTarget;
  EXPECT_NO_THROW(validate_tokens(batch, 4));
  batch.targets[1] = -1;
  EXPECT_THROW(validate_tokens(batch, 4), InputError);
  batch.targets[1] = 4;
  EXPECT_THROW(validate_tokens(batch, 4), InputError);
}

TEST(BalancedPart, DealsEveryItemOnceLargerPartsFirst) {
  for (const std::int64_t parts : {1, 2, 3, 4, 7}) {
    for (std::int64_t total = 0; total <= 20; ++total) {
      std::int64_t next = 0;
      std::int64_t previous_size = total;
      for (std::int64_t index = 0; index < parts; ++index) {
        const Interval part = balanced_part(total, parts, index);
        ASSERT_EQ(part.begin, next);
        ASSERT_GE(part.size(), total / parts);
        ASSERT_LE(part.size(), (total + parts - 1) / parts);
        ASSERT_LE(part.size(), previous_size);
        previous_size = part.size();
        next = part.end;
      }
      ASSERT_EQ(next, total);
    }
  }
}

TEST(BalancedPart, RefusesAPartThatDoesNotExist) {
  EXPECT_THROW((void)balanced_part(4, 0, 0), ContractError);
  EXPECT_THROW((void)balanced_part(4, 2, 2), ContractError);
  EXPECT_THROW((void)balanced_part(-1, 2, 0), ContractError);
}

TEST(MicroBatchRows, CoverEveryRowOnceInOrder) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const int micro_batches : {1, 3}) {
      for (std::int64_t rows = 0; rows <= 20; ++rows) {
        std::vector<std::int64_t> seen;
        for (int rank = 0; rank < ranks; ++rank) {
          for (int micro = 0; micro < micro_batches; ++micro) {
            const Interval part = micro_batch_rows(rows, ranks, rank, micro_batches, micro);
            for (std::int64_t row = part.begin; row < part.end; ++row) seen.push_back(row);
          }
        }
        std::vector<std::int64_t> expected(static_cast<std::size_t>(rows));
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<std::int64_t>(i);
        ASSERT_EQ(seen, expected) << ranks << " ranks, " << micro_batches << " micro-batches, " << rows << " rows";
      }
    }
  }
}

TEST(MicroBatchRows, ARankMayGetNone) {
  EXPECT_EQ(micro_batch_rows(3, 4, 3, 1, 0).size(), 0);
  EXPECT_EQ(micro_batch_rows(4, 2, 1, 3, 2), (Interval{4, 4}));
}

}  // namespace
}  // namespace tandem
