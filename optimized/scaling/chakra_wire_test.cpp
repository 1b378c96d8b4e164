// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/chakra_wire.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(WireMessage, WritesWhatTheEncodingGuideOfProtocolBuffersShows) {
  WireMessage message;
  message.varint(1, 150);
  message.text(2, "testing");
  const std::uint64_t values[] = {3, 270, 86942};
  message.packed(4, values);

  EXPECT_EQ(message.delimited(), "\x14\x08\x96\x01\x12\x07testing\x22\x06\x03\x8e\x02\x9e\xa7\x05");
}

TEST(WireMessage, WritesTheLargestNumberInTenBytes) {
  WireMessage message;
  message.varint(31, ~std::uint64_t{0});

  EXPECT_EQ(message.delimited(), "\x0c\xf8\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
}

}  // namespace
}  // namespace tandem
