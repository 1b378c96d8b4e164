// SPDX-License-Identifier: Apache-2.0
#include "optimized/context_parallel/zigzag.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"

namespace tandem {
namespace {

/// Pairs of query and key under the causal mask whose query the rank holds.
std::int64_t causal_pairs(std::int64_t sequence, int ranks, int rank) {
  std::int64_t pairs = 0;
  for (const Interval& chunk : context_chunks(sequence, ranks, rank)) {
    for (std::int64_t query = chunk.begin; query < chunk.end; ++query) pairs += query + 1;
  }
  return pairs;
}

TEST(Zigzag, ChunksOfTenOverTwoRanksByHand) {
  // Four chunks of 3, 3, 2, 2.
  EXPECT_EQ(context_chunks(10, 2, 0), (std::vector<Interval>{{0, 3}, {8, 10}}));
  EXPECT_EQ(context_chunks(10, 2, 1), (std::vector<Interval>{{3, 6}, {6, 8}}));
  EXPECT_EQ(context_chunks(10, 1, 0), (std::vector<Interval>{{0, 10}}));
}

TEST(Zigzag, EveryPositionBelongsToOneRankInAscendingOrder) {
  for (const std::int64_t sequence : {0, 1, 3, 7, 8, 64, 101}) {
    for (const int ranks : {1, 2, 3, 4}) {
      std::vector<int> owners(static_cast<std::size_t>(sequence));
      for (int rank = 0; rank < ranks; ++rank) {
        std::int64_t last = -1, tokens = 0;
        for (const Interval& chunk : context_chunks(sequence, ranks, rank)) {
          for (std::int64_t t = chunk.begin; t < chunk.end; ++t, ++tokens) {
            EXPECT_GT(t, last);
            last = t;
            ++owners[static_cast<std::size_t>(t)];
          }
        }
        EXPECT_EQ(tokens, context_tokens(sequence, ranks, rank));
      }
      EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), sequence);
    }
  }
}

TEST(Zigzag, CausalWorkIsEqualWhereTheSequenceDivides) {
  for (const int ranks : {2, 4, 8}) {
    for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(causal_pairs(64, ranks, rank), causal_pairs(64, ranks, 0));
  }
}

TEST(Zigzag, SliceKeepsGlobalPositionsDocumentsAndRows) {
  Batch batch = make_batch(2, 5);
  batch.row_ids = {7, 3};
  for (std::size_t i = 0; i < 10; ++i) {
    batch.ids[i] = static_cast<std::int32_t>(100 + i);
    batch.targets[i] = static_cast<std::int32_t>(200 + i);
  }
  batch.document_starts = {0, 0, 2, 2, 2, 0, 1, 1, 1, 4};

  const Batch first = context_slice(batch, 2, 0), second = context_slice(batch, 2, 1);  // chunks of 2, 1, 1, 1

  EXPECT_EQ(first.rows, 2);
  EXPECT_EQ(first.sequence, 3);
  EXPECT_EQ(first.ids, (std::vector<std::int32_t>{100, 101, 104, 105, 106, 109}));
  EXPECT_EQ(first.targets, (std::vector<std::int32_t>{200, 201, 204, 205, 206, 209}));
  EXPECT_EQ(first.positions, (std::vector<std::int32_t>{0, 1, 4, 0, 1, 4}));
  EXPECT_EQ(first.document_starts, (std::vector<std::int32_t>{0, 0, 2, 0, 1, 4}));
  EXPECT_EQ(first.row_ids, batch.row_ids);
  EXPECT_EQ(second.sequence, 2);
  EXPECT_EQ(second.positions, (std::vector<std::int32_t>{2, 3, 2, 3}));
  EXPECT_EQ(first.valid_tokens() + second.valid_tokens(), batch.valid_tokens());
}

TEST(Zigzag, OneRankHoldsTheBatchAsItIs) {
  Batch batch = make_batch(3, 4);
  batch.ids[5] = 9;
  const Batch slice = context_slice(batch, 1, 0);
  EXPECT_EQ(slice.sequence, 4);
  EXPECT_EQ(slice.ids, batch.ids);
  EXPECT_EQ(slice.positions, batch.positions);
}

TEST(Zigzag, NoRowsAndShortSequencesAreLegal) {
  EXPECT_EQ(context_slice(make_batch(0, 8), 2, 1).sequence, 4);
  EXPECT_EQ(context_slice(make_batch(2, 1), 2, 1).sequence, 0);
  EXPECT_THROW((void)context_chunks(8, 2, 2), ContractError);
}

}  // namespace
}  // namespace tandem
