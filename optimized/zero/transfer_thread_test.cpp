// SPDX-License-Identifier: Apache-2.0
#include "optimized/zero/transfer_thread.h"

#include <chrono>
#include <memory>
#include <semaphore>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

TEST(TransferThread, CarriesJobsOutInOrder) {
  TransferThread thread;
  std::vector<int> done;
  TransferThread::Ticket last = 0;
  for (int i = 0; i < 200; ++i) last = thread.submit([&done, i] { done.push_back(i); });
  thread.wait(last);
  ASSERT_EQ(done.size(), 200U);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(done[static_cast<std::size_t>(i)], i);
}

TEST(TransferThread, DropsWhatIsBehindAFailureAndTellsEveryWait) {
  TransferThread thread;
  std::binary_semaphore go(0);
  int ran = 0;
  const auto before = thread.submit([&] {
    go.acquire();
    ++ran;
  });
  const auto bad = thread.submit([] { throw std::runtime_error("no such memory"); });
  const auto behind = thread.submit([&] { ++ran; });
  go.release();

  for (const auto ticket : {bad, behind, before}) EXPECT_THROW(thread.wait(ticket), std::runtime_error);
  const auto later = thread.submit([&] { ++ran; });
  EXPECT_THROW(thread.wait(later), std::runtime_error);
  EXPECT_EQ(ran, 1);

  thread.drain();
  thread.wait(thread.submit([&] { ++ran; }));
  EXPECT_EQ(ran, 2);
}

TEST(TransferThread, DrainWaitsForTheJobThatRunsAndDropsTheRest) {
  TransferThread thread;
  std::binary_semaphore begun(0);
  std::binary_semaphore dropped(0);
  bool saw_the_drop = false;
  int ran = 0;
  thread.submit([&] {
    begun.release();
    saw_the_drop = dropped.try_acquire_for(std::chrono::seconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a drain that does not wait is over by now
    ++ran;
  });
  // What the second job holds tells of its end: the first one goes on until then.
  std::shared_ptr<void> held(nullptr, [&](void*) { dropped.release(); });
  thread.submit([&ran, held = std::move(held)] { ran += 100; });
  begun.acquire();

  thread.drain();

  EXPECT_TRUE(saw_the_drop);
  EXPECT_EQ(ran, 1);
  thread.wait(thread.submit([&] { ++ran; }));
  EXPECT_EQ(ran, 2);
}

TEST(TransferThread, EndsWithJobsStillWaiting) {
  std::binary_semaphore begun(0);
  std::binary_semaphore go(0);
  int ran = 0;
  {
    TransferThread thread;
    thread.submit([&] {
      begun.release();
      go.acquire();
      ++ran;
    });
    for (int i = 0; i < 10; ++i) thread.submit([&] { ran += 100; });
    begun.acquire();
    go.release();
  }
  EXPECT_EQ(ran % 100, 1);
}

TEST(TransferThread, RefusesATicketThatItNeverGave) {
  TransferThread thread;
  EXPECT_THROW(thread.wait(1), ContractError);
}

}  // namespace
}  // namespace tandem
