// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/adversary/courier.h"

#include <vector>

#include <gtest/gtest.h>

namespace tandem::adversary {
namespace {

constexpr std::chrono::hours kNever{1};
constexpr Clock::duration kAtOnce{0};

class Noted final : public Parcel {
 public:
  Noted(std::vector<int>& order, int number) : order_(order), number_(number) {}
  void deliver() noexcept override { order_.push_back(number_); }

 private:
  std::vector<int>& order_;  // used under the courier's lock, and after the wait
  int number_;
};

TEST(Courier, KeepsTheOrderOfARoute) {
  std::vector<int> order;
  Courier courier({.seed = 1}, 0);
  Route route;
  std::vector<std::shared_ptr<Noted>> parcels;
  std::vector<int> expected;
  for (int i = 0; i < 100; ++i) {
    parcels.push_back(std::make_shared<Noted>(order, i));
    courier.send(&route, route, parcels.back(), std::chrono::microseconds(100 - i));
    expected.push_back(i);
  }
  courier.wait_until_delivered(*parcels.back());
  EXPECT_EQ(order, expected);
}

TEST(Courier, LetsRoutesOvertakeEachOtherButNothingOvertakeInOne) {
  std::vector<int> order;
  Courier courier({.seed = 1}, 0);
  Route slow, fast;
  const auto first = std::make_shared<Noted>(order, 1);
  const auto behind = std::make_shared<Noted>(order, 2);
  const auto overtaking = std::make_shared<Noted>(order, 3);
  courier.send(&slow, slow, first, kNever);
  courier.send(&slow, slow, behind, kAtOnce);
  courier.send(&fast, fast, overtaking, kAtOnce);
  courier.wait_until_delivered(*overtaking);
  EXPECT_FALSE(first->delivered());
  EXPECT_FALSE(behind->delivered());
  courier.deliver_now(&slow);
  EXPECT_TRUE(behind->delivered());
  EXPECT_EQ(order, (std::vector<int>{3, 1, 2}));
}

TEST(Courier, DeliversAtOnceOnlyWhatBelongsToTheOwner) {
  std::vector<int> order;
  Courier courier({.seed = 1}, 0);
  Route mine, others;
  const auto own = std::make_shared<Noted>(order, 1);
  const auto foreign = std::make_shared<Noted>(order, 2);
  courier.send(&others, others, foreign, kNever);
  courier.send(&mine, mine, own, kNever);
  courier.deliver_now(&mine);
  EXPECT_EQ(order, (std::vector<int>{1}));
  EXPECT_FALSE(foreign->delivered());
}

TEST(Courier, LetsGoOfWhatItHasDelivered) {
  std::vector<int> order;
  Courier courier({.seed = 1}, 0);
  Route route;
  const auto parcel = std::make_shared<Noted>(order, 1);
  courier.send(&route, route, parcel, kAtOnce);
  courier.wait_until_delivered(*parcel);
  courier.deliver_now(&route);
  EXPECT_EQ(parcel.use_count(), 1);
}

TEST(Courier, DelaysAreAFunctionOfSeedRankAndCount) {
  const AdversaryScript script{.seed = 7, .longest_delay_seconds = 1.0};
  Courier courier(script, 2), same(script, 2), other_rank(script, 3), other_seed({.seed = 8, .longest_delay_seconds = 1.0}, 2);
  int equal_rank = 0;
  int equal_seed = 0;
  for (int i = 0; i < 100; ++i) {
    const Courier::Delays delays = courier.next_delays();
    EXPECT_GE(delays.before.count(), 0);
    EXPECT_LT(delays.before, std::chrono::seconds(1));
    EXPECT_GE(delays.after.count(), 0);
    EXPECT_LT(delays.after, std::chrono::seconds(1));
    const Courier::Delays again = same.next_delays();
    EXPECT_EQ(delays.before, again.before);
    EXPECT_EQ(delays.after, again.after);
    equal_rank += delays.before == other_rank.next_delays().before ? 1 : 0;
    equal_seed += delays.before == other_seed.next_delays().before ? 1 : 0;
  }
  EXPECT_EQ(equal_rank, 0);
  EXPECT_EQ(equal_seed, 0);
}

}  // namespace
}  // namespace tandem::adversary
