// SPDX-License-Identifier: Apache-2.0
// What the tests of communicators (optimized/comm/*_test.cpp, which run over messages too) do not ask: algorithms, links, groups
// of groups.
#include "optimized/comm/messages/message_group.h"

#include <mutex>
#include <string>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/comm_test_support.h"

namespace tandem::comm_test {
namespace {

using AlgorithmOnRanks = std::tuple<CollectiveAlgorithm, int>;

class Algorithms : public testing::TestWithParam<AlgorithmOnRanks> {
 protected:
  [[nodiscard]] static CollectiveAlgorithm algorithm() { return std::get<0>(GetParam()); }
  [[nodiscard]] static int ranks() { return std::get<1>(GetParam()); }
  static void run(const std::function<void(Communicator&)>& body) {
    WorldSettings settings;
    settings.algorithm = algorithm();
    settings.link = parse_link("unshaped,ranks_per_node=2");
    run_world({.ranks = ranks(), .deadline = 30000ms, .settings = settings}, body);
  }
};
std::string algorithm_name(const testing::TestParamInfo<AlgorithmOnRanks>& info) {
  return fmt::format("{}{}Ranks", name(std::get<0>(info.param)), std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(World, Algorithms, testing::Combine(testing::ValuesIn(all_algorithms()), testing::Values(2, 3, 4, 7)),
                         algorithm_name);

TEST_P(Algorithms, OfTheWorldCarryOutEveryCollective) {
  run([](Communicator& comm) {
    const auto n = static_cast<std::size_t>(comm.size());
    const std::int64_t count = 1009;
    std::int64_t factor = 0;
    for (int rank = 0; rank < comm.size(); ++rank) factor += rank + 1;

    std::vector<std::int64_t> data(count, comm.rank() + 1);
    all_reduce(comm, flat_view(data), {});
    EXPECT_EQ(data, std::vector<std::int64_t>(count, factor));

    const std::vector<std::int64_t> counts(n, 10);
    std::vector<std::int64_t> input(10 * n, comm.rank() + 1), part(10), whole(10 * n), expected;
    comm.reduce_scatter(flat_view(input), flat_view(part), counts, {}).wait_host();
    EXPECT_EQ(part, std::vector<std::int64_t>(10, factor));
    std::vector<std::int64_t> own(10, comm.rank());
    comm.all_gather(flat_view(own), flat_view(whole), counts, {}).wait_host();
    for (int rank = 0; rank < comm.size(); ++rank) expected.insert(expected.end(), 10, rank);
    EXPECT_EQ(whole, expected);
    comm.broadcast(flat_view(own), comm.size() - 1, {}).wait_host();
    EXPECT_EQ(own, std::vector<std::int64_t>(10, comm.size() - 1));
    comm.all_to_all(flat_view(expected), counts, flat_view(whole), counts, {}).wait_host();
    EXPECT_EQ(whole, std::vector<std::int64_t>(10 * n, comm.rank()));
    comm.barrier();
  });
}

std::int64_t bytes_of_all_reduce(CollectiveAlgorithm algorithm, int elements) {
  std::atomic<std::int64_t> sum{0};
  WorldSettings settings = settings_of(Way::messages);
  settings.algorithm = algorithm;
  run_world({.ranks = 4, .settings = settings}, [&](Communicator& comm) {
    std::vector<float> data(static_cast<std::size_t>(elements), 1.0F);
    all_reduce(comm, flat_view(data), {.purpose = Purpose::gradient});
    sum.fetch_add(comm.bytes_sent(Purpose::gradient));
  });
  return sum.load();
}

TEST(MessageGroup, BytesSentAreThoseOfTheAlgorithmThatRan) {
  const std::int64_t bytes = 4 * 400;
  EXPECT_EQ(bytes_of_all_reduce(CollectiveAlgorithm::ring, 400), 2 * 3 * bytes);
  EXPECT_EQ(bytes_of_all_reduce(CollectiveAlgorithm::direct, 400), 2 * 3 * bytes);
  // Every rank but the root sends the whole up, and gets it once on the way down.
  EXPECT_EQ(bytes_of_all_reduce(CollectiveAlgorithm::tree, 400), 2 * 3 * bytes);
}

TEST(MessageGroup, AnOperationMayNameItsOwnAlgorithmOnAllRanksAlike) {
  std::mutex mutex;
  std::vector<std::string> texts;
  run_ranks(2, Way::messages, [&](Communicator& comm) {
    std::vector<float> data(100, 1.0F);
    all_reduce(comm, flat_view(data), {.algorithm = CollectiveAlgorithm::ring});
    EXPECT_EQ(data.back(), 2.0F);
    try {
      all_reduce(comm, flat_view(data),
                 {.algorithm = comm.rank() == 0 ? CollectiveAlgorithm::ring : CollectiveAlgorithm::recursive});
      comm.barrier();
    } catch (const ContractError& error) {
      const std::scoped_lock lock(mutex);
      texts.emplace_back(error.what());
    }
  });
  ASSERT_EQ(texts.size(), 2U);
  EXPECT_NE(texts[0].find("rank 0 calls ring all_reduce of 100 fp32, rank 1 calls recursive all_reduce"), std::string::npos)
      << texts[0];
}

TEST(MessageGroup, GroupsThatOverlapDoNotHearEachOther) {
  run_ranks(4, Way::messages, [&](Communicator& comm) {
    const auto row = comm.split(comm.rank() / 2, 0);
    const auto column = comm.split(comm.rank() % 2, 0);
    const auto row_again = row->split(0, -row->rank());
    const auto alone = column->split(column->rank(), 0);
    ASSERT_EQ(alone->size(), 1);
    for (int round = 0; round < 20; ++round) {
      // All under way at once, waited for in another order on every other rank.
      std::vector<double> a{1.0 + comm.rank()}, b = a, c = a, d = a;
      Work in_row = row->all_reduce(flat_view(a), {});
      Work in_column = column->all_reduce(flat_view(b), {});
      Work again = row_again->all_reduce(flat_view(c), {});
      Work lonely = alone->all_reduce(flat_view(d), {});
      if (comm.rank() % 2 == 1) again.wait_host();
      in_column.wait_host();
      in_row.wait_host();
      again.wait_host();
      lonely.wait_host();
      const int first = comm.rank() / 2 * 2;
      EXPECT_EQ(a[0], 2 * first + 3);
      EXPECT_EQ(c[0], a[0]);
      EXPECT_EQ(b[0], 2 * (comm.rank() % 2) + 4);
      EXPECT_EQ(d[0], 1.0 + comm.rank());
    }
  });
}

TEST(MessageGroup, WorksOnAShapedLink) {
  WorldSettings settings;
  settings.link = parse_link("pcie-25gbe,ranks_per_node=2,jitter=0.2");
  settings.algorithm = CollectiveAlgorithm::automatic;
  run_world({.ranks = 4, .settings = settings}, [&](Communicator& comm) {
    for (const std::int64_t count : {1, 1000, 50000}) {
      std::vector<float> data(static_cast<std::size_t>(count), static_cast<float>(comm.rank()));
      Work work = comm.all_reduce(flat_view(data), {});
      std::vector<float> out(10, static_cast<float>(comm.rank())), in(10);
      Work sent = comm.send(flat_view(out), comm.rank() ^ 1, {}, {});
      Work received = comm.recv(flat_view(in), comm.rank() ^ 1, {}, {});
      received.wait_host();
      sent.wait_host();
      work.wait_host();
      EXPECT_EQ(data, std::vector<float>(static_cast<std::size_t>(count), 6.0F));
      EXPECT_EQ(in[9], static_cast<float>(comm.rank() ^ 1));
    }
  });
}

TEST(MessageGroup, TimelinesTellWaitingForOthersFromTransfer) {
  run_ranks(2, Way::messages, [](Communicator& comm) {
    Timeline timeline;
    comm.set_timeline(&timeline);
    std::vector<float> data(1000);
    std::vector<float> token(1);
    // Rank 1 comes only after rank 0 has told that it is about to.
    if (comm.rank() == 1) comm.recv(flat_view(token), 0, {}, {}).wait_host();
    Work late;
    if (comm.rank() == 0) late = comm.send(flat_view(token), 1, {}, {});
    timeline.clear();
    all_reduce(comm, flat_view(data), {.name = "sum"});
    late.wait_host();
    std::int64_t ends_ns = 0, begins_ns = 0;
    for (const Span& span : timeline.spans()) {
      if (span.name.find("all_reduce") == std::string::npos) continue;
      if (span.activity == Activity::wait) ends_ns = span.end_ns;
      if (span.activity == Activity::transfer) begins_ns = span.begin_ns;
    }
    EXPECT_GT(ends_ns, 0);
    EXPECT_EQ(ends_ns, begins_ns);
    comm.set_timeline(nullptr);
  });
}

TEST(RunWorld, RefusesTransportsThatItDoesNotHave) {
  WorldSettings settings;
  settings.transport = "carrier pigeon";
  try {
    run_world({.settings = settings}, [](Communicator&) { FAIL() << "the body ran"; });
    FAIL() << "accepted";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("carrier pigeon: unknown; there are threads"), std::string::npos) << error.what();
  }
  EXPECT_THROW((void)job_shape(settings), InputError);
}

TEST(RunWorld, ThreadsAreOneProcess) {
  EXPECT_EQ(job_shape({}).processes, 1);
  EXPECT_EQ(transports().front(), "threads");
}

TEST(RunWorld, OneRankNeedsNoWire) {
  WorldSettings settings;
  settings.link = parse_link("wan");
  run_world({.ranks = 1, .settings = settings}, [](Communicator& comm) {
    std::vector<float> data(10, 3.0F);
    all_reduce(comm, flat_view(data), {});
    EXPECT_EQ(data[9], 3.0F);
    EXPECT_EQ(comm.split(0, 0)->size(), 1);
  });
}

}  // namespace
}  // namespace tandem::comm_test
