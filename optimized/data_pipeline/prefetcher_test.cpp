// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/prefetcher.h"

#include <atomic>
#include <semaphore>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

/// Batches that say their step; what else a test wants happens before each.
class StepSource final : public BatchSource {
 public:
  std::function<void(std::int64_t step)> before = [](std::int64_t) {};

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t, Interval rows) const override {
    ++made;
    before(step);
    Batch batch = make_batch(rows.size(), 4);
    std::fill(batch.ids.begin(), batch.ids.end(), static_cast<std::int32_t>(step));
    return batch;
  }
  [[nodiscard]] std::optional<Batch> validation_batch(std::int64_t, std::int64_t) const override { return std::nullopt; }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return 1000; }
  [[nodiscard]] std::int64_t sequence() const noexcept override { return 4; }
  [[nodiscard]] std::optional<std::int64_t> training_tokens() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::optional<std::int64_t> epoch_rows() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::string describe() const override { return "steps"; }

  mutable std::atomic<int> made = 0;
};

PrefetchOptions options_of(std::int64_t first, std::int64_t last, std::int64_t batches, int threads, int consumers = 1) {
  return {.rows = 2,
          .first_step = first,
          .last_step = last,
          .batches = batches,
          .threads = threads,
          .consumers = consumers,
          .pitfalls = {}};
}

TEST(Prefetcher, HandsEveryStepToEveryConsumerAndMakesItOnce) {
  for (const std::int64_t batches : {0, 1, 3}) {
    for (const int threads : {1, 4}) {
      StepSource source;
      Prefetcher loader(source, options_of(7, 60, batches, threads, 3));
      std::atomic<int> wrong = 0;
      {
        std::vector<std::jthread> consumers;
        for (int i = 0; i < 3; ++i) {
          consumers.emplace_back([&] {
            for (std::int64_t step = 7; step < 60; ++step) wrong += loader.take(step)->ids.front() == step ? 0 : 1;
          });
        }
      }
      EXPECT_EQ(wrong, 0);
      EXPECT_EQ(source.made, 53) << batches << " ahead by " << threads;
      EXPECT_EQ(loader.statistics().takes, 3 * 53);
      EXPECT_EQ(loader.statistics().made, 53);
    }
  }
}

TEST(Prefetcher, MakesAheadAndNoFurther) {
  StepSource source;
  std::counting_semaphore<> asked(0);
  source.before = [&](std::int64_t) { asked.release(); };
  Prefetcher loader(source, options_of(0, 100, 3, 2));

  for (int i = 0; i < 3; ++i) asked.acquire();  // steps 0, 1, 2, though nobody has asked
  (void)loader.take(0);
  asked.acquire();  // 3
  (void)loader.take(1);
  asked.acquire();  // 4

  EXPECT_EQ(source.made, 5);
}

TEST(Prefetcher, MakesNothingBeforeItIsAskedWithoutDepth) {
  StepSource source;
  Prefetcher loader(source, options_of(0, 10, 0, 4));
  EXPECT_EQ(source.made, 0);

  EXPECT_EQ(loader.take(0)->ids.front(), 0);

  EXPECT_EQ(source.made, 1);
  EXPECT_EQ(loader.statistics().waits, 1);
}

TEST(Prefetcher, ThrowsWhatTheSourceThrewAtThatStepAndGoesOn) {
  for (const std::int64_t batches : {0, 2}) {
    StepSource source;
    source.before = [](std::int64_t step) {
      if (step == 1) throw IoError("the disk is gone");
    };
    Prefetcher loader(source, options_of(0, 4, batches, 1, 2));

    for (int consumer = 0; consumer < 2; ++consumer) EXPECT_EQ(loader.take(0)->ids.front(), 0);
    for (int consumer = 0; consumer < 2; ++consumer) EXPECT_THROW((void)loader.take(1), IoError);
    EXPECT_EQ(loader.take(2)->ids.front(), 2);
  }
}

TEST(Prefetcher, RefusesStepsThatAreNotNext) {
  StepSource source;
  Prefetcher loader(source, options_of(5, 9, 2, 1));

  EXPECT_THROW((void)loader.take(4), ContractError);
  EXPECT_THROW((void)loader.take(9), ContractError);
  EXPECT_THROW((void)loader.take(6), ContractError) << "5 is next";
  (void)loader.take(5);
  EXPECT_THROW((void)loader.take(5), ContractError) << "taken by all";
}

TEST(Prefetcher, GoesBackAndAsksTheSourceAgain) {
  for (const std::int64_t batches : {0, 3}) {
    StepSource source;
    Prefetcher loader(source, options_of(2, 8, batches, 2, 2));
    for (std::int64_t step = 2; step < 8; ++step) {
      for (int consumer = 0; consumer < 2; ++consumer) (void)loader.take(step);
    }

    loader.rewind(1);

    const std::int64_t before = source.made;
    for (std::int64_t step = 1; step < 8; ++step) {
      for (int consumer = 0; consumer < 2; ++consumer) EXPECT_EQ(loader.take(step)->ids.front(), step);
    }
    EXPECT_GE(source.made - before, batches == 0 ? 7 : 4) << "what was made before is not used";
    EXPECT_THROW((void)loader.take(1), ContractError);
  }
}

TEST(Prefetcher, EndsWhileItsThreadsWorkOrWait) {
  StepSource source;
  std::binary_semaphore working(0), go_on(0);
  source.before = [&](std::int64_t step) {
    if (step != 2) return;
    working.release();
    go_on.acquire();
  };
  std::jthread helper;
  {
    Prefetcher loader(source, options_of(0, 1000, 4, 3));
    (void)loader.take(0);
    working.acquire();
    helper = std::jthread([&] { go_on.release(); });
  }
  { Prefetcher nothing(source, options_of(3, 3, 4, 3)); }
  { Prefetcher untouched(source, options_of(5, 1000, 2, 2)); }

  EXPECT_LE(source.made, 5 + 2 + 2);
}

TEST(Prefetcher, KeepsABatchAsLongAsItIsHeld) {
  StepSource source;
  std::shared_ptr<const Batch> batch;
  {
    Prefetcher loader(source, options_of(0, 5, 2, 1));
    batch = loader.take(0);
    (void)loader.take(1);
  }
  EXPECT_EQ(batch->ids, std::vector<std::int32_t>(8, 0));
}

}  // namespace
}  // namespace tandem
