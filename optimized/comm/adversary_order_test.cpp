// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>

#include "core/rng.h"
#include "optimized/comm/adversary_test_support.h"

namespace tandem::comm_test {
namespace {

class AdversaryOrder : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, AdversaryOrder, testing::Combine(kBothWays, testing::Values(1, 2, 4)), param_name);
class AdversaryErrors : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, AdversaryErrors, testing::Combine(kBothWays, testing::Values(2, 3)), param_name);

// Everything at once: collectives of three communicators in the background and on wait, messages in both directions, waited for
// in another order than they were begun in. A legal program, so it must end.
void run_crowd(Communicator& world, std::uint64_t seed) {
  const auto pairs = world.split(world.rank() / 2, world.rank());
  const auto reversed = world.split(0, -world.rank());
  Communicator* const all[] = {&world, pairs.get(), reversed.get()};
  struct Sum {
    std::vector<float> data;
    float expected = 0;
    Work work;
  };
  std::deque<Sum> sums;
  std::deque<Started> sent(12), received(12);
  CounterRng rng(seed, "crowd");  // the same on every rank
  for (std::size_t i = 0; i < 60; ++i) {
    Communicator& comm = *all[rng.next_below(3)];
    const auto value = static_cast<float>(i + 1);
    Sum& sum = sums.emplace_back();
    sum.data.assign(1 + rng.next_below(3000), value);
    sum.expected = value * static_cast<float>(comm.size());
    const Progress progress = rng.next_below(4) == 0 ? Progress::on_wait : Progress::background;
    sum.work = comm.all_reduce(flat_view(sum.data), {.name = "crowd", .progress = progress});
    if (i % 5 == 0) ring_exchange(world, sent[i / 5], static_cast<std::int64_t>(i), true);
    if (i % 5 == 3) ring_exchange(world, received[i / 5], static_cast<std::int64_t>(i - 3), false);
    if (i % 20 == 19) pairs->barrier();
    if (i == 30) {
      sums.front().work.wait_host();
      EXPECT_EQ(sums.front().data.back(), sums.front().expected);
      sums.pop_front();
    }
  }
  for (Started& s : received) s.work.wait_host();
  // Each rank from its own end.
  while (!sums.empty()) {
    Sum& sum = world.rank() % 2 == 0 ? sums.front() : sums.back();
    sum.work.wait_host();
    ASSERT_EQ(sum.data, std::vector<float>(sum.data.size(), sum.expected));
    if (world.rank() % 2 == 0) {
      sums.pop_front();
    } else {
      sums.pop_back();
    }
  }
  const int previous = (world.rank() + world.size() - 1) % world.size();
  for (std::size_t i = 0; i < received.size(); ++i) {
    EXPECT_EQ(received[i].output, values_of<float>(previous, static_cast<std::int64_t>(5 * i)));
    sent[i].work.wait_host();
  }
}

TEST_P(AdversaryOrder, ManyOperationsOfSeveralCommunicatorsDoNotDeadlock) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    run_adversarial(way(), ranks(), {.seed = seed}, [&](Communicator& comm) { run_crowd(comm, seed); });
  }
}

TEST_P(AdversaryOrder, OperationsProceedWhileTheRankWaitsForAnother) {
  run_adversarial(way(), ranks(), {.seed = 9}, [](Communicator& comm) {
    const int last = comm.size() - 1;
    for (int round = 0; round < 20; ++round) {
      std::vector<float> sum(1000, 5.0F), message(1000, 3.0F), got(1000);
      // Rank 0 waits for the message, which the last rank sends only when the sum is complete.
      Work work = comm.all_reduce(flat_view(sum), {});
      if (comm.rank() == last) {
        if (last != 0) work.wait_host();
        Work sent = comm.send(flat_view(message), 0, {}, {});
        if (last == 0) comm.recv(flat_view(got), last, {}, {}).wait_host();
        sent.wait_host();
      } else if (comm.rank() == 0) {
        comm.recv(flat_view(got), last, {}, {.progress = Progress::on_wait}).wait_host();
        EXPECT_EQ(got, message);
      }
      work.wait_host();
      EXPECT_EQ(sum[999], 5.0F * static_cast<float>(comm.size()));
    }
  });
}

TEST_P(AdversaryOrder, CountsAndNamesLikeTheInnerOne) {
  run_ranks(ranks(), [](Communicator& comm) {
    const auto adversarial = make_adversarial(comm, {});
    EXPECT_EQ(adversarial->rank(), comm.rank());
    EXPECT_EQ(adversarial->size(), comm.size());
    EXPECT_EQ(adversarial->generation(), comm.generation());
    std::vector<float> data(100, 1.0F);
    all_reduce(*adversarial, flat_view(data), {.purpose = Purpose::gradient});
    EXPECT_EQ(adversarial->bytes_sent(Purpose::gradient), comm.bytes_sent(Purpose::gradient));
    EXPECT_EQ(all_reduce_sum(*adversarial, 2.0), 2.0 * comm.size());
    EXPECT_EQ(all_gather_u64(*adversarial, static_cast<std::uint64_t>(comm.rank())).back(),
              static_cast<std::uint64_t>(comm.size() - 1));
  });
}

TEST_P(AdversaryOrder, WrongArgumentsThrowFromTheCallAndTouchNothing) {
  run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
    std::vector<float> a(10, 1.0F), b(10, 2.0F);
    const Counts wrong(static_cast<std::size_t>(comm.size()), 11);
    const auto refused = [&](const auto& call) { (void)text_of<ContractError>([&] { static_cast<void>(call()); }); };
    refused([&] { return comm.reduce_scatter(flat_view(a), flat_view(b), wrong, {}); });
    refused([&] { return comm.all_gather(flat_view(a), flat_view(b), wrong, {}); });
    refused([&] { return comm.all_to_all(flat_view(a), wrong, flat_view(b), wrong, {}); });
    refused([&] { return comm.broadcast(flat_view(a), comm.size(), {}); });
    refused([&] { return comm.send(flat_view(a), -1, {}, {}); });
    refused([&] { return comm.recv(flat_view(a), comm.size(), {}, {}); });
    EXPECT_EQ(a, std::vector<float>(10, 1.0F));
    EXPECT_EQ(b, std::vector<float>(10, 2.0F));
    comm.barrier();
  });
}

TEST_P(AdversaryErrors, CallsThatDoNotMatchFailAndRestoreTheBuffers) {
  run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
    std::vector<float> data = values_of<float>(comm.rank(), 5000);
    const std::vector<float> at_first = data;
    const std::string text = text_of<ContractError>([&] {
      if (comm.rank() == 0) {
        comm.broadcast(flat_view(data), 0, {.name = "weights"}).wait_host();
      } else {
        all_reduce(comm, flat_view(data), {.name = "gradients"});
      }
    });
    EXPECT_TRUE(contains(text, "calls all_reduce 'gradients' of 5000 fp32")) << text;
    EXPECT_EQ(data, at_first);
  });
}

TEST_P(AdversaryErrors, AFailedRankIsNamedOnTheOthers) {
  std::atomic<int> told{0};
  const auto world = [&] {
    run_adversarial(way(), ranks(), {}, [&](Communicator& comm) {
      std::vector<float> data(100, 1.0F), message(10);
      if (comm.rank() == 0) throw IoError("disk is full");
      Work sum = comm.all_reduce(flat_view(data), {});
      Work received = comm.recv(flat_view(message), 0, {}, {});
      for (Work* work : {&sum, &received}) {
        EXPECT_TRUE(contains(text_of<PeerError>([&] { work->wait_host(); }), "rank 0 failed: disk is full"));
      }
      EXPECT_TRUE(contains(text_of<PeerError>([&] { comm.barrier(); }), "disk is full"));
      told.fetch_add(1);
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "disk is full");
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(AdversaryOrder, AbortEndsTheOthers) {
  std::atomic<int> told{0};
  run_adversarial(way(), ranks(), {}, [&](Communicator& comm) {
    if (comm.rank() == 0) return comm.abort("operator pressed stop");
    EXPECT_TRUE(contains(text_of<PeerError>([&] { comm.barrier(); }), "rank 0 aborted: operator pressed stop"));
    told.fetch_add(1);
  });
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(AdversaryOrder, ADroppedOperationIsReportedByTheNextCall) {
  const auto world = [&] {
    run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
      std::vector<float> data(100, 1.0F);
      { const Work dropped = comm.all_reduce(flat_view(data), {.name = "forgotten"}); }
      const std::string text = text_of<ContractError>([&] { static_cast<void>(comm.all_reduce(flat_view(data), {})); });
      EXPECT_TRUE(contains(text, "dropped all_reduce 'forgotten'")) << text;
      throw ContractError("seen");
    });
  };
  EXPECT_EQ(text_of<ContractError>(world), "seen");
}

TEST_P(AdversaryOrder, ADroppedOperationFailsTheBodyThatEnds) {
  const auto world = [&] {
    run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
      std::vector<float> data(100, 1.0F);
      Work work = comm.all_reduce(flat_view(data), {.name = "forgotten"});
      while (!work.done() && comm.size() == 1) std::this_thread::yield();
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "dropped all_reduce 'forgotten'"));
}

TEST_P(AdversaryOrder, AnOperationThatOutlivesItsCommunicatorIsCancelled) {
  run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
    std::vector<float> data(100, 1.0F);
    std::optional<Work> work;
    {
      const auto part = comm.split(comm.rank(), 0);
      work = part->all_reduce(flat_view(data), {});
    }
    EXPECT_TRUE(contains(text_of<ContractError>([&] { work->wait_host(); }), "is gone"));
  });
}

TEST_P(AdversaryOrder, RecordsWaitsAndTransfers) {
  run_adversarial(way(), ranks(), {.seed = 11}, [](Communicator& comm) {
    Timeline timeline;
    const auto part = comm.split(0, comm.rank());
    part->set_timeline(&timeline);
    std::vector<float> data(1000, 1.0F);
    for (int i = 0; i < 10; ++i) all_reduce(*part, flat_view(data), {.name = "timed", .step = i});
    int transfers = 0;
    int waits = 0;
    for (const Span& span : timeline.spans()) {
      transfers += span.activity == Activity::transfer ? 1 : 0;
      waits += span.activity == Activity::wait && span.name == "all_reduce 'timed' of 1000 fp32" ? 1 : 0;
    }
    if (comm.size() > 1) {
      EXPECT_EQ(transfers, 10);
      EXPECT_GT(waits, 10);
    }
    part->set_timeline(nullptr);
  });
}

}  // namespace
}  // namespace tandem::comm_test
