// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/queue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "kernels/cuda/launch.cuh"
#include "kernels/simt/sanitizers.h"
#include "kernels/simt/test_support.h"

namespace tandem::simt_gpu {
namespace {

constexpr std::size_t kCount = 100;

__global__ void add_number(float* x, float number) { x[threadIdx.x] += number; }
__global__ void write_number(float* x, float number) { *x = number; }
__global__ void copy_elements(const float* from, float* to) { to[threadIdx.x] = from[threadIdx.x]; }

bool all_are_nan(const float* values) {
  return std::all_of(values, values + kCount, [](float value) { return std::isnan(value); });
}

class Queues : public testing::Test {
 protected:
  Stream first_{make_stream()}, second_{make_stream()};
  StreamHandle first() { return first_.get(); }
  StreamHandle second() { return second_.get(); }
};

TEST_F(Queues, AHostThatReadsTooEarlyFindsPoison) {
  const DeviceArray<float> x(first(), std::vector<float>(kCount, 1));
  const Pinned result(allocate_pinned(x.size_bytes()));
  const auto* const values = static_cast<const float*>(result.get());
  launch(add_number, 1, kCount, 0, first(), x.data(), 2.0F);
  copy(result.get(), x.data(), x.size_bytes(), Direction::to_host, first());

  EXPECT_TRUE(all_are_nan(values));
  synchronize(first());
  EXPECT_EQ(std::vector<float>(values, values + kCount), std::vector<float>(kCount, 3));
}

TEST_F(Queues, AMissingWaitBetweenQueuesShowsAndAWaitIsEnough) {
  const DeviceArray<float> x(first(), kCount), early(second(), kCount), right(second(), kCount);
  synchronize(first());
  const DeviceArray<float> source(first(), std::vector<float>(kCount, 4));
  launch(copy_elements, 1, kCount, 0, first(), source.data(), x.data());
  const Event written(make_event(Timing::off));
  record(written.get(), first());

  launch(copy_elements, 1, kCount, 0, second(), x.data(), early.data());
  EXPECT_TRUE(all_are_nan(early.read().data()));
  wait_for(second(), written.get());
  launch(copy_elements, 1, kCount, 0, second(), x.data(), right.data());
  EXPECT_EQ(right.read(), std::vector<float>(kCount, 4));
}

TEST_F(Queues, AnEventIsNotReachedAtTheFirstQuestionButAQuestionerGetsThere) {
  const DeviceArray<float> x(first(), kCount);
  const Event begin(make_event(Timing::on)), end(make_event(Timing::on));
  EXPECT_TRUE(is_reached(begin.get())) << "an event that was never recorded";
  record(begin.get(), first());
  launch(add_number, 1, kCount, 0, first(), x.data(), 2.0F);
  record(end.get(), first());

  EXPECT_FALSE(is_reached(end.get()));
  EXPECT_THROW(static_cast<void>(seconds_between(begin.get(), end.get())), GpuError);
  EXPECT_TRUE(is_reached(end.get()));
  EXPECT_TRUE(is_reached(begin.get()));
  EXPECT_GT(seconds_between(begin.get(), end.get()), 0);
}

TEST_F(Queues, HostCodeThatTouchesDeviceMemoryCrashesAndIsTold) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const DeviceArray<float> x(first(), std::vector<float>(kCount, 1));
  synchronize(first());
  volatile float* const element = x.data() + 3;
  EXPECT_DEATH(static_cast<void>(*element), "host code touched memory of the emulated GPU at 0x[0-9a-f]+, which");
  EXPECT_DEATH(*element = 1, "host code touched memory");
}

TEST_F(Queues, CopiesAreRefusedWhereAnEndIsNotWhatItShouldBe) {
  const DeviceArray<float> x(first(), kCount);
  const Pinned pinned(allocate_pinned(x.size_bytes()));
  std::vector<float> pageable(kCount);
  EXPECT_THROW(copy(x.data(), pageable.data(), x.size_bytes(), Direction::to_device, first()), GpuError);
  EXPECT_THROW(copy(x.data(), pinned.get(), x.size_bytes(), Direction::on_device, first()), GpuError);
  EXPECT_THROW(copy(pinned.get(), x.data(), x.size_bytes(), Direction::to_device, first()), GpuError);
  EXPECT_THROW(copy(pinned.get(), x.data() + 64, x.size_bytes(), Direction::to_host, first()), GpuError);
  EXPECT_THROW(set_bytes(pinned.get(), 0, 4, first()), GpuError);
  EXPECT_TRUE(is_device_address(x.data()));
  EXPECT_FALSE(is_device_address(pinned.get()));

  Pinned gone(allocate_pinned(x.size_bytes()));
  copy(x.data(), gone.get(), x.size_bytes(), Direction::to_device, first());
  gone.reset();
  EXPECT_NE(error_of(first()).find("not pinned"), std::string::npos) << "pinned memory was freed under a copy";
}

TEST_F(Queues, MemoryIsReusedInTheOrderOfAStreamAndPoisonedAgain) {
  void* const address = allocate(400, first());
  set_bytes(address, 0, 400, first());
  release(address, first());
  void* const of_other = allocate(400, second());
  EXPECT_NE(of_other, address) << "the first stream has not come to the release yet";
  void* const again = allocate(400, first());
  EXPECT_EQ(again, address);
  const Pinned result(allocate_pinned(400));
  std::memset(result.get(), 0, 400);
  copy(result.get(), again, 400, Direction::to_host, first());
  synchronize(first());
  EXPECT_TRUE(all_are_nan(static_cast<const float*>(result.get())));
  release(again, first());
  release(of_other, second());
}

TEST_F(Queues, AWriteBeyondABlockAndADoubleReleaseAreErrors) {
  if (!under_address_sanitizer()) {  // which reports the write itself
    auto* const x = static_cast<float*>(allocate(400, first()));
    launch(write_number, 1, 1, 0, first(), x + kCount, 1.0F);
    release(x, first());
    EXPECT_NE(error_of(first()).find("byte 400 of the block of 400 bytes"), std::string::npos) << error_of(first());
  }
  void* const twice = allocate(400, second());
  release(twice, second());
  release(twice, second());
  EXPECT_NE(error_of(second()).find("nothing is allocated"), std::string::npos) << error_of(second());
}

TEST_F(Queues, AGraphRepeatsWhatWasRecorded) {
  const DeviceArray<float> x(first(), std::vector<float>(kCount, 0));
  float number = 1;
  begin_capture(first());
  launch(add_number, 1, kCount, 0, first(), x.data(), number);
  auto* const scratch = static_cast<float*>(allocate(x.size_bytes(), first()));
  copy(scratch, x.data(), x.size_bytes(), Direction::on_device, first());
  launch(add_number, 1, kCount, 0, first(), scratch, 10.0F);
  copy(x.data(), scratch, x.size_bytes(), Direction::on_device, first());
  release(scratch, first());
  EXPECT_THROW(synchronize(first()), GpuError);
  EXPECT_THROW(begin_capture(first()), GpuError);
  Graph graph(end_capture(first(), nullptr));
  number = 500;

  EXPECT_EQ(x.read(), std::vector<float>(kCount, 0)) << "recording runs nothing";
  launch(graph.get(), first());
  launch(graph.get(), first());
  EXPECT_EQ(x.read(), std::vector<float>(kCount, 22));

  begin_capture(first());
  launch(add_number, 1, kCount, 0, first(), x.data(), number);
  launch(graph.get(), second());
  graph = Graph(end_capture(first(), graph.give_up()));
  launch(graph.get(), first());
  EXPECT_EQ(x.read(), std::vector<float>(kCount, 522));
  synchronize(second());  // what was issued of the old graph still runs
  EXPECT_EQ(x.read(), std::vector<float>(kCount, 533));
}

TEST_F(Queues, ManyThreadsMayRunEachOthersWork) {
  constexpr int kRounds = 50;
  const DeviceArray<float> x(first(), std::vector<float>(kCount, 0)), y(second(), std::vector<float>(kCount, 0));
  const auto work = [](StreamHandle own, StreamHandle other, float* data, const Event& mine, const Event& theirs) {
    for (int round = 0; round < kRounds; ++round) {
      launch(add_number, 1, kCount, 0, own, data, 1.0F);
      record(mine.get(), own);
      wait_for(own, theirs.get());
      if (round % 3 == 0) synchronize(theirs.get());
      if (round % 7 == 0) synchronize(other);
    }
    synchronize(own);
  };
  const Event of_first(make_event(Timing::off)), of_second(make_event(Timing::off));
  std::thread thread([&] { work(second(), first(), y.data(), of_second, of_first); });
  work(first(), second(), x.data(), of_first, of_second);
  thread.join();
  EXPECT_EQ(x.read(), std::vector<float>(kCount, kRounds));
  EXPECT_EQ(y.read(), std::vector<float>(kCount, kRounds));
}

}  // namespace
}  // namespace tandem::simt_gpu
