// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/flight_recorder.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

Call sum_of(const std::string& name, std::int64_t elements) {
  Call call{.kind = CallKind::all_reduce, .dtype = DType::f32, .elements = elements};
  call.options.name = name;
  return call;
}

Call gather_of(std::vector<std::int64_t> counts) {
  Call call{.kind = CallKind::all_gather, .dtype = DType::i32};
  call.counts = std::move(counts);
  return call;
}

void carry_out(FlightLog& log, const Call& call) {
  log.collective_arrived(call, false);
  log.collective_finished(FlightState::done);
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(FlightLog, KeepsTheLastOperationsByNumber) {
  FlightRecorder recorder;
  const auto log = recorder.open(2, 7, {0, 1, 2});
  for (int i = 1; i <= 100; ++i) carry_out(*log, sum_of("bucket", i));
  log->collective_arrived(gather_of({1, 2, 3}), false);

  const auto all = recorder.flights();

  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0].rank, 2);
  EXPECT_EQ(all[0].groups[0].collectives_arrived, 101U);
  EXPECT_EQ(all[0].groups[0].flights.size(), FlightLog::kKept);
  EXPECT_EQ(find_flight(all, 2, 7, false, 60), nullptr) << "pushed out";
  const Flight* const done = find_flight(all, 2, 7, false, 100);
  ASSERT_NE(done, nullptr);
  EXPECT_EQ(done->state, FlightState::done);
  EXPECT_EQ(done->call.elements, 100);
  const Flight* const now = find_flight(all, 2, 7, false, 101);
  ASSERT_NE(now, nullptr);
  EXPECT_EQ(now->state, FlightState::arrived);
  EXPECT_EQ(now->call.counts, (std::vector<std::int64_t>{1, 2, 3}));
}

TEST(FlightLog, OperationsPostedFarAheadDoNotPushOutTheOneUnderWay) {
  FlightRecorder recorder;
  const auto log = recorder.open(0, 1, {0, 1});
  for (std::uint64_t number = 1; number <= 200; ++number) {
    log->collective_posted(number, sum_of("bucket", static_cast<std::int64_t>(number)));
  }
  log->collective_arrived(sum_of("bucket", 1), false);

  auto all = recorder.flights();
  EXPECT_EQ(all[0].groups[0].collectives_posted, 200U);
  ASSERT_NE(find_flight(all, 0, 1, false, 1), nullptr);
  EXPECT_EQ(find_flight(all, 0, 1, false, 1)->state, FlightState::arrived);

  // One that was not written down when it was posted is when the rank comes to it.
  log->collective_finished(FlightState::done);
  for (std::int64_t number = 2; number <= 150; ++number) carry_out(*log, sum_of("bucket", number));
  all = recorder.flights();
  ASSERT_NE(find_flight(all, 0, 1, false, 150), nullptr);
  EXPECT_EQ(find_flight(all, 0, 1, false, 150)->call.elements, 150);
}

TEST(FlightLog, FindsTheOtherEndOfAMessage) {
  FlightRecorder recorder;
  const auto zero = recorder.open(4, 1, {4, 6});
  const auto one = recorder.open(6, 1, {4, 6});
  MessageCall send{.direction = MessageCall::Direction::send, .rank = 0, .peer = 1, .elements = 5};
  MessageCall receive{.direction = MessageCall::Direction::recv, .rank = 1, .peer = 0, .elements = 5};
  zero->message_posted(send);
  send.elements = 6;
  const std::uint64_t second = zero->message_posted(send);
  one->message_posted(receive);

  EXPECT_EQ(find_other_end(recorder.flights(), 1, send, 6), nullptr) << "the second receive is not posted";
  one->message_posted(receive);
  zero->message_changed(second, FlightState::arrived);

  const auto all = recorder.flights();
  ASSERT_NE(find_other_end(all, 1, receive, 4), nullptr);
  EXPECT_EQ(find_other_end(all, 1, receive, 4)->message.elements, 6);
  EXPECT_EQ(find_other_end(all, 1, receive, 4)->state, FlightState::arrived);
}

TEST(FlightRecorder, TellsWhoIsMissingAndWhatItDidLast) {
  FlightRecorder recorder;
  const auto zero = recorder.open(0, 9, {0, 2});
  const auto two = recorder.open(2, 9, {0, 2});
  const auto other = recorder.open(2, 3, {1, 2});
  carry_out(*zero, sum_of("bucket 1", 5));
  carry_out(*two, sum_of("bucket 1", 5));
  zero->collective_arrived(sum_of("bucket 2", 5), false);
  MessageCall send{.direction = MessageCall::Direction::send, .rank = 1, .peer = 0, .elements = 8, .dtype = DType::f32};
  send.options.name = "x";
  other->message_changed(other->message_posted(send), FlightState::arrived);

  const auto all = recorder.flights();

  EXPECT_EQ(missing_ranks(all, 9, 2), std::vector<int>{2});
  const std::string text = describe_last(all, {2}, 4);
  EXPECT_TRUE(contains(text, "rank 2 finished all_reduce 'bucket 1' of 5 fp32 (no. 1 of ranks 0, 2)")) << text;
  EXPECT_TRUE(contains(text, "and is in send 'x' of 8 fp32 from rank 2 to rank 1")) << text;
  EXPECT_TRUE(contains(describe_last(all, {0}, 2), "and is in all_reduce 'bucket 2' of 5 fp32 (no. 2 of all ranks)"));
  EXPECT_EQ(describe_last(all, {1}, 4), "rank 1 does not tell what it did last");
}

TEST(FlightRecorder, ARankOutsideOfOperationsIsSaidToBe) {
  FlightRecorder recorder;
  const auto log = recorder.open(1, 0, {0, 1});

  EXPECT_EQ(describe_last(recorder.flights(), {1}, 2), "rank 1 has finished no operation and waits in none");
  log->collective_posted(1, sum_of("late", 3));
  EXPECT_TRUE(contains(describe_last(recorder.flights(), {1}, 2), "it posted all_reduce 'late' of 3 fp32 (no. 1 of all ranks)"));
}

TEST(FlightRecorder, RemembersCommunicatorsThatAreGone) {
  FlightRecorder recorder;
  {
    const auto log = recorder.open(1, 0, {0, 1});
    carry_out(*log, sum_of("last", 3));
  }
  EXPECT_TRUE(contains(describe_last(recorder.flights(), {1}, 2), "rank 1 finished all_reduce 'last'"));

  for (int i = 0; i < 2 * FlightRecorder::kClosedKept; ++i) (void)recorder.open(1, 1, {0, 1});
  EXPECT_LE(std::ssize(recorder.flights().front().groups), FlightRecorder::kClosedKept + 1) << "but not for ever";
}

TEST(RankFlights, SurviveTheWayAsText) {
  FlightRecorder recorder;
  const auto log = recorder.open(3, std::uint64_t{5} << 32, {1, 3});
  Call exchange{.kind = CallKind::all_to_all, .dtype = DType::bf16};
  exchange.counts = {1, 2};
  exchange.receive_counts = {3, 4};
  exchange.options.algorithm = CollectiveAlgorithm::ring;
  carry_out(*log, exchange);
  Call cast{.kind = CallKind::broadcast, .dtype = DType::f64, .elements = 12, .root = 1};
  cast.options.name = "weights \"w\"\n";
  log->collective_arrived(cast, false);
  MessageCall message{.direction = MessageCall::Direction::recv, .rank = 1, .peer = 0, .elements = 8, .dtype = DType::i64};
  message.envelope = {.step = 1'000'000'000'000, .micro_batch = 2, .chunk = 3, .direction = 1};
  log->message_posted(message);
  const RankFlights flights = recorder.flights().front();

  const RankFlights read = parse_rank_flights(serialise(flights));

  EXPECT_EQ(serialise(read), serialise(flights));
  EXPECT_EQ(describe_last(read, 4), describe_last(flights, 4));
  EXPECT_EQ(read.groups[0].group, std::uint64_t{5} << 32);
  ASSERT_EQ(read.groups[0].flights.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(describe(read.groups[0].flights[i], read.groups[0], 4),
              describe(flights.groups[0].flights[i], flights.groups[0], 4));
  }
  EXPECT_THROW((void)parse_rank_flights("{}"), ContractError);
  EXPECT_THROW((void)parse_rank_flights("no JSON"), ContractError);
}

}  // namespace
}  // namespace tandem
