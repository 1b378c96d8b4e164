// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/heartbeat_channel.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "optimized/recovery/heartbeat_datagram.h"

namespace tandem {
namespace {

constexpr double kHour = 3600;

ProgressBoard board_of(int ranks) { return ProgressBoard(ranks); }

void be_here(ProgressBoard& board, int rank) { board.slot(rank).is_here = true; }

/// What comes until there are `count` beats; gives up after a time in which a machine under any load has sent them.
std::vector<Heartbeat> receive(HeartbeatReceiver& receiver, std::size_t count) {
  std::vector<Heartbeat> all;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (all.size() < count && std::chrono::steady_clock::now() < deadline) {
    const std::vector<Heartbeat> beats = receiver.receive();
    std::copy(beats.begin(), beats.end(), std::back_inserter(all));
    std::this_thread::yield();
  }
  return all;
}

void send_bytes(std::uint16_t port, std::span<const std::byte> bytes) {
  const int socket = ::socket(AF_INET, SOCK_DGRAM, 0);
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_port = htons(port);
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::sendto(socket, bytes.data(), bytes.size(), 0, reinterpret_cast<const sockaddr*>(&there), sizeof(there));
  ::close(socket);
}

TEST(HeartbeatChannel, CarriesWhatTheBoardSaysOfTheRanksThatAreHere) {
  HeartbeatReceiver receiver;
  ProgressBoard board = board_of(3);
  for (const int rank : {0, 2}) be_here(board, rank);
  ProgressSlot& slot = board.slot(2);
  slot.step = (std::int64_t{1} << 40) + 3;
  slot.progress = ~std::uint64_t{0} - 1;
  slot.busy_ns = 123'456'789'012;
  slot.waiting = true;
  slot.phase = RunPhase::checkpoint;

  const HeartbeatSender sender({.host = "localhost", .port = receiver.port()}, 7, kHour, board);

  const std::vector<Heartbeat> beats = receive(receiver, 2);
  ASSERT_EQ(beats.size(), 2U);
  EXPECT_EQ(beats[0].rank, 0);
  EXPECT_EQ(beats[0].phase, RunPhase::start);
  EXPECT_FALSE(beats[0].waiting);
  EXPECT_EQ(beats[1].rank, 2);
  EXPECT_EQ(beats[1].attempt, 7U);
  EXPECT_EQ(beats[1].sequence, beats[0].sequence);
  EXPECT_EQ(beats[1].step, (std::int64_t{1} << 40) + 3);
  EXPECT_EQ(beats[1].progress, ~std::uint64_t{0} - 1);
  EXPECT_EQ(beats[1].busy_ns, 123'456'789'012);
  EXPECT_TRUE(beats[1].waiting);
  EXPECT_EQ(beats[1].phase, RunPhase::checkpoint);
}

TEST(HeartbeatChannel, EndsAtOnceAfterALastBeat) {
  HeartbeatReceiver receiver;
  ProgressBoard board = board_of(1);
  be_here(board, 0);
  {
    const HeartbeatSender sender({.host = "127.0.0.1", .port = receiver.port()}, 0, kHour, board);
    ASSERT_EQ(receive(receiver, 1).size(), 1U);
    board.slot(0).enter(RunPhase::finished);
  }
  const std::vector<Heartbeat> last = receiver.receive();
  ASSERT_EQ(last.size(), 1U);
  EXPECT_EQ(last[0].phase, RunPhase::finished);
}

TEST(HeartbeatChannel, BeatsGoOnWithGrowingNumbersAndThoseToBeLostAreNotSent) {
  HeartbeatReceiver receiver;
  ProgressBoard board = board_of(1);
  be_here(board, 0);
  HeartbeatSender sender({.host = "127.0.0.1", .port = receiver.port()}, 0, 0.001, board);

  const std::vector<Heartbeat> before = receive(receiver, 5);
  sender.lose(20);
  const std::vector<Heartbeat> after = receive(receiver, 100);

  std::vector<Heartbeat> all = before;
  std::copy(after.begin(), after.end(), std::back_inserter(all));
  ASSERT_GE(all.size(), 105U);
  std::uint64_t lost = 0;
  for (std::size_t i = 1; i < all.size(); ++i) {
    EXPECT_GT(all[i].sequence, all[i - 1].sequence);
    lost += all[i].sequence - all[i - 1].sequence - 1;
  }
  EXPECT_EQ(lost, 20U);
}

TEST(HeartbeatChannel, SendsMoreRanksThanADatagramHolds) {
  constexpr int kRanks = 130;
  HeartbeatReceiver receiver;
  ProgressBoard board = board_of(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) be_here(board, rank);
  const HeartbeatSender sender({.host = "127.0.0.1", .port = receiver.port()}, 0, kHour, board);

  std::set<int> ranks;
  for (const Heartbeat& beat : receive(receiver, kRanks)) ranks.insert(beat.rank);
  EXPECT_EQ(ranks.size(), std::size_t{kRanks});
}

TEST(HeartbeatChannel, WhereNobodyListensTheSenderGoesOn) {
  std::uint16_t port = 0;
  {
    const HeartbeatReceiver gone;
    port = gone.port();
  }
  ProgressBoard board = board_of(1);
  be_here(board, 0);
  const HeartbeatSender sender({.host = "127.0.0.1", .port = port}, 0, 0.001, board);
  HeartbeatReceiver receiver("127.0.0.1", port);
  EXPECT_GE(receive(receiver, 3).size(), 3U);
}

TEST(HeartbeatChannel, IgnoresDatagramsThatAreNotItsOwn) {
  HeartbeatReceiver receiver;
  Datagram datagram;
  const std::vector<Heartbeat> beats = {{.attempt = 1, .rank = 1, .sequence = 2}, {.attempt = 1, .rank = 3, .sequence = 2}};
  const std::span<const std::byte> good = encode_beats(beats, datagram);
  std::vector<std::vector<std::byte>> bad;
  for (std::size_t size = 0; size < good.size(); ++size)
    bad.emplace_back(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
  bad.emplace_back(good.begin(), good.end());
  bad.back().push_back({});
  bad.emplace_back(5000, std::byte{'T'});
  bad.emplace_back(good.begin(), good.begin() + kDatagramHeadBytes);  // a head with no beats
  bad.back()[6] = bad.back()[7] = std::byte{0};
  // Magic, version, number of beats; rank, phase and waiting of the second beat.
  constexpr std::size_t kSecond = kDatagramHeadBytes + kDatagramBeatBytes;
  for (const std::size_t at : {std::size_t{0}, std::size_t{5}, std::size_t{7}, kSecond, kSecond + 4, kSecond + 5}) {
    bad.emplace_back(good.begin(), good.end());
    bad.back()[at] ^= std::byte{0x80};
  }

  for (const std::vector<std::byte>& bytes : bad) send_bytes(receiver.port(), bytes);
  send_bytes(receiver.port(), good);

  const std::vector<Heartbeat> received = receive(receiver, 2);
  ASSERT_EQ(received.size(), 2U);
  EXPECT_EQ(received[0].rank, 1);
  EXPECT_EQ(received[1].rank, 3);
  EXPECT_TRUE(receiver.receive().empty());
}

TEST(HeartbeatChannel, ReadsEndpointsAndSaysWhatIsNone) {
  EXPECT_EQ(parse_endpoint("node-3:40000").host, "node-3");
  EXPECT_EQ(parse_endpoint("127.0.0.1:65535").port, 65535);
  for (const char* const text : {"", ":1", "host", "host:", "host:0", "host:65536", "host:-1", "host:1x", "host: 1"}) {
    EXPECT_NE(message_of<InputError>([&] { static_cast<void>(parse_endpoint(text)); }).find("HOST:PORT"), std::string::npos)
        << text;
  }
  HeartbeatReceiver taken;
  EXPECT_THROW(HeartbeatReceiver("127.0.0.1", taken.port()), IoError);
  EXPECT_THROW(HeartbeatReceiver("no such host"), InputError);
}

TEST(BoardHeartbeats, AreABeatOfEachRankThatIsThere) {
  ProgressBoard board = board_of(3);
  for (const int rank : {0, 2}) be_here(board, rank);
  board.slot(2).step = 5;
  BoardHeartbeats beats(0);
  EXPECT_TRUE(beats.receive().empty());

  beats.watch(&board, 4);
  std::vector<Heartbeat> now = beats.receive();
  ASSERT_EQ(now.size(), 2U);
  EXPECT_EQ(now[1].rank, 2);
  EXPECT_EQ(now[1].step, 5);
  EXPECT_EQ(now[1].attempt, 4U);
  const std::uint64_t sequence = now[1].sequence;

  beats.lose(2);
  EXPECT_TRUE(beats.receive().empty());
  EXPECT_TRUE(beats.receive().empty());
  now = beats.receive();
  ASSERT_EQ(now.size(), 2U);
  EXPECT_EQ(now[1].sequence, sequence + 3);

  beats.watch(nullptr, 5);
  EXPECT_TRUE(beats.receive().empty());
}

TEST(BoardHeartbeats, BeatNoMoreOftenThanTheirTime) {
  ProgressBoard board = board_of(1);
  be_here(board, 0);
  BoardHeartbeats beats(kHour);
  beats.watch(&board, 0);
  EXPECT_EQ(beats.receive().size(), 1U);
  EXPECT_EQ(beats.receive().size(), 0U);
}

}  // namespace
}  // namespace tandem
