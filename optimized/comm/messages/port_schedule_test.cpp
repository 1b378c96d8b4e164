// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/port_schedule.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(PortSchedule, MessagesThatComeInTogetherFollowEachOther) {
  PortSchedule port;

  EXPECT_EQ(port.take(100, 40), 140);
  EXPECT_EQ(port.take(100, 40), 180);
  EXPECT_EQ(port.take(100, 40), 220);
  EXPECT_EQ(port.take(500, 40), 540);
}

TEST(PortSchedule, AMessageToldLateIsServedInItsGap) {
  PortSchedule port;

  EXPECT_EQ(port.take(140, 40), 180);
  EXPECT_EQ(port.take(100, 40), 140);
  EXPECT_EQ(port.take(120, 40), 220) << "the port is taken from 100 to 180";
}

TEST(PortSchedule, AGapThatIsALittleTooShortWillDoAndIsPaidForLater) {
  PortSchedule port;

  EXPECT_EQ(port.take(139, 40), 179);
  EXPECT_EQ(port.take(100, 40), 140);
  EXPECT_EQ(port.take(110, 40), 220) << "two messages of 40 since 100";
}

TEST(PortSchedule, AGapOfLessThanHalfAMessageIsNone) {
  PortSchedule port;

  EXPECT_EQ(port.take(110, 40), 150);
  EXPECT_EQ(port.take(100, 40), 190);
}

TEST(PortSchedule, KeepsItsRateHoweverManyMessagesThereAre) {
  PortSchedule port;
  std::int64_t last = 0;
  for (int i = 0; i < 1000; ++i) last = port.take(0, 7);

  EXPECT_EQ(last, 7000);
}

}  // namespace
}  // namespace tandem
