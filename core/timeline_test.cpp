// SPDX-License-Identifier: Apache-2.0
#include "core/timeline.h"

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Timeline, ScopeRecordsWhatItWasTold) {
  Timeline timeline;
  const std::int64_t before = Timeline::now_ns();
  {
    const SpanScope scope(&timeline, "all_reduce bucket 2", Activity::transfer, 5, Lane::communication);
    EXPECT_TRUE(timeline.spans().empty());
  }
  const std::int64_t after = Timeline::now_ns();

  ASSERT_EQ(timeline.spans().size(), 1U);
  const Span span = timeline.spans().front();
  EXPECT_EQ(span.name, "all_reduce bucket 2");
  EXPECT_EQ(span.activity, Activity::transfer);
  EXPECT_EQ(span.lane, Lane::communication);
  EXPECT_EQ(span.step, 5);
  EXPECT_LE(before, span.begin_ns);
  EXPECT_LE(span.begin_ns, span.end_ns);
  EXPECT_LE(span.end_ns, after);
}

TEST(Timeline, SpansStandInTheOrderOfTheirEnd) {
  Timeline timeline;
  {
    const SpanScope outer(&timeline, "outer", Activity::step);
    const SpanScope inner(&timeline, "inner", Activity::compute);
  }
  ASSERT_EQ(timeline.spans().size(), 2U);
  EXPECT_EQ(timeline.spans()[0].name, "inner");
  EXPECT_EQ(timeline.spans()[1].name, "outer");
  EXPECT_LE(timeline.spans()[1].begin_ns, timeline.spans()[0].begin_ns);
}

TEST(Timeline, RecordsNothingWhenDisabledOrAbsent) {
  Timeline timeline;
  timeline.set_enabled(false);
  { const SpanScope scope(&timeline, "unseen", Activity::compute); }
  { const SpanScope scope(nullptr, "nowhere", Activity::compute); }
  timeline.record({});
  EXPECT_TRUE(timeline.spans().empty());

  timeline.set_enabled(true);
  timeline.record({});
  EXPECT_EQ(timeline.spans().size(), 1U);
  timeline.clear();
  EXPECT_TRUE(timeline.spans().empty());
}

/// Writes down what it is told, per thread.
class FakeObserver final : public SpanObserver {
 public:
  void begin(const std::string& name, Activity activity) noexcept override {
    const std::scoped_lock lock(mutex_);
    told_[std::this_thread::get_id()] += "<" + name + ":" + std::string(tandem::name(activity));
  }
  void end() noexcept override {
    const std::scoped_lock lock(mutex_);
    told_[std::this_thread::get_id()] += ">";
  }
  [[nodiscard]] std::string told(std::thread::id thread) const { return told_.at(thread); }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, std::string> told_;
};

TEST(Timeline, TellsTheObserverOfRangesThatNestPerThread) {
  Timeline timeline;
  FakeObserver observer;
  { const SpanScope scope(&timeline, "before", Activity::compute); }
  timeline.set_observer(&observer);
  std::thread::id communication;
  {
    const SpanScope step(&timeline, "step 1", Activity::step, 1);
    std::jthread thread([&] {
      communication = std::this_thread::get_id();
      const ObservedRange range(&timeline, "all_reduce", Activity::transfer);
      const SpanScope inner(&timeline, "arrival", Activity::wait, 1, Lane::communication);
    });
    thread.join();
    const SpanScope forward(&timeline, "forward", Activity::compute, 1);
  }
  timeline.set_enabled(false);
  { const SpanScope scope(&timeline, "unrecorded", Activity::data); }
  timeline.set_observer(nullptr);
  { const SpanScope scope(&timeline, "after", Activity::compute); }

  EXPECT_EQ(observer.told(std::this_thread::get_id()), "<step 1:step<forward:compute>><unrecorded:data>");
  EXPECT_EQ(observer.told(communication), "<all_reduce:transfer<arrival:wait>>");
  EXPECT_EQ(timeline.spans().size(), 4U);
}

TEST(Timeline, TakesSpansFromTwoThreads) {
  Timeline timeline;
  const auto record_many = [&](Lane lane) {
    for (int i = 0; i < 1000; ++i) const SpanScope scope(&timeline, "span", Activity::compute, i, lane);
  };
  {
    const std::jthread communication(record_many, Lane::communication);
    record_many(Lane::compute);
  }

  std::size_t on_compute = 0;
  for (const Span& span : timeline.spans()) on_compute += span.lane == Lane::compute ? 1 : 0;
  EXPECT_EQ(timeline.spans().size(), 2000U);
  EXPECT_EQ(on_compute, 1000U);
}

TEST(Timeline, KeepsTheLastAndCountsAll) {
  Timeline timeline;
  timeline.keep_last(10);
  for (int i = 0; i < 1000; ++i) {
    Span span;
    span.step = i;
    timeline.record(std::move(span));
    ASSERT_LE(timeline.spans().size(), 10U);
    ASSERT_GE(timeline.spans().size(), std::min<std::size_t>(5, static_cast<std::size_t>(i) + 1));
    ASSERT_EQ(timeline.spans().back().step, i);
    ASSERT_EQ(timeline.count(), static_cast<std::size_t>(i) + 1);
  }

  const std::vector<Span> since = timeline.spans_from(997);
  ASSERT_EQ(since.size(), 3U);
  EXPECT_EQ(since.front().step, 997);
  EXPECT_EQ(timeline.spans_from(3).size(), timeline.spans().size()) << "older ones are gone";
  EXPECT_TRUE(timeline.spans_from(2000).empty());
}

TEST(Timeline, ActivitiesAndPurposesHaveDistinctNames) {
  std::set<std::string_view> activities;
  for (int i = 0; i <= static_cast<int>(Activity::step); ++i) activities.insert(name(static_cast<Activity>(i)));
  EXPECT_EQ(activities.size(), 7U);
  EXPECT_EQ(activities.count("?"), 0U);

  std::set<std::string_view> purposes;
  for (std::size_t i = 0; i < kPurposes; ++i) purposes.insert(name(static_cast<Purpose>(i)));
  EXPECT_EQ(purposes, (std::set<std::string_view>{"gradient", "parameter", "activation", "other"}));
}

}  // namespace
}  // namespace tandem
