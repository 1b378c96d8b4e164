// SPDX-License-Identifier: Apache-2.0
#include <future>
#include <latch>
#include <mutex>
#include <string>

#include "optimized/comm/comm_test_support.h"

namespace tandem::comm_test {
namespace {

class Failures : public OnRanks {
 protected:
  [[nodiscard]] static int last() { return ranks() - 1; }
};
INSTANTIATE_TEST_SUITE_P(World, Failures, testing::Combine(kBothWays, testing::Values(2, 3, 4, 7)), param_name);

TEST_P(Failures, AThrowingRankIsNamedOnAllOthersWithItsReason) {
  std::atomic<int> told{0};
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      if (comm.rank() == last()) {
        comm.barrier();
        throw IoError("disk is full");
      }
      try {
        comm.barrier();
        comm.barrier();
      } catch (const PeerError& error) {
        EXPECT_EQ(error.rank(), last());
        EXPECT_TRUE(contains(error.what(), "rank " + std::to_string(last()) + " failed: disk is full")) << error.what();
        told.fetch_add(1);
        throw;
      }
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "disk is full");
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(Failures, PendingAsynchronousOperationsFailToo) {
  std::atomic<int> told{0};
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      std::vector<float> data(100000, 1.0F), message(10);
      if (comm.rank() == last()) throw InputError("no such file");
      Work first = comm.all_reduce(flat_view(data), {.name = "first"});
      Work second = comm.all_reduce(flat_view(message), {.name = "second"});
      Work third = comm.recv(flat_view(message), last(), {}, {});
      for (Work* work : {&first, &second, &third}) {
        EXPECT_TRUE(contains(text_of<PeerError>([&] { work->wait_host(); }), "no such file"));
      }
      EXPECT_TRUE(contains(text_of<PeerError>([&] { comm.barrier(); }), "no such file"));
      told.fetch_add(1);
    });
  };
  EXPECT_EQ(text_of<InputError>(world), "no such file");
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(Failures, AbortEndsEveryOtherRank) {
  std::atomic<int> told{0};
  run_ranks(ranks(), [&](Communicator& comm) {
    if (comm.rank() == 0) return comm.abort("operator pressed stop");
    const std::string text = text_of<PeerError>([&] { comm.barrier(); });
    EXPECT_TRUE(contains(text, "rank 0 aborted: operator pressed stop")) << text;
    told.fetch_add(1);
  });
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(Failures, AHungRankIsNamedByTheDeadlineOnAllOthers) {
  std::latch others_know(ranks() - 1);
  run_world({.ranks = ranks(), .deadline = 200ms, .settings = settings()}, [&](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == last()) return others_know.wait();
    std::vector<float> data(10);
    const std::string text = text_of<TimeoutError>([&] { all_reduce(comm, flat_view(data), {.name = "bucket 3"}); });
    EXPECT_TRUE(contains(text, "for rank " + std::to_string(last()))) << text;
    EXPECT_TRUE(contains(text, "all_reduce 'bucket 3'")) << text;
    // Finished for good.
    (void)text_of<TimeoutError>([&] { comm.barrier(); });
    others_know.count_down();
  });
}

TEST_P(Failures, TheDeadlineOfAnAsynchronousOperationIsReportedByItsWait) {
  std::latch others_know(ranks() - 1);
  run_world({.ranks = ranks(), .deadline = 200ms, .settings = settings()}, [&](Communicator& comm) {
    if (comm.rank() == 0) return others_know.wait();
    std::vector<float> data(100000);
    Work work = comm.all_reduce(flat_view(data), {.name = "bucket 0"});
    while (!work.done()) std::this_thread::yield();
    EXPECT_TRUE(contains(text_of<TimeoutError>([&] { work.wait_host(); }), "for rank 0"));
    others_know.count_down();
  });
}

TEST_P(Failures, AMessageThatNobodySendsTimesOut) {
  std::latch receiver_knows(1);
  run_world({.ranks = ranks(), .deadline = 200ms, .settings = settings()}, [&](Communicator& comm) {
    if (comm.rank() != 0) return receiver_knows.wait();
    std::vector<float> data(10);
    const std::string text =
        text_of<TimeoutError>([&] { comm.recv(flat_view(data), last(), {}, {.name = "activations"}).wait_host(); });
    EXPECT_TRUE(contains(text, "for rank " + std::to_string(last()))) << text;
    EXPECT_TRUE(contains(text, "recv 'activations'")) << text;
    receiver_knows.count_down();
  });
}

TEST_P(Failures, ATimeoutTellsWhatTheMissingRankDidLast) {
  std::latch others_know(ranks() - 1);
  run_world({.ranks = ranks(), .deadline = 200ms, .settings = settings()}, [&](Communicator& comm) {
    std::vector<float> data(10);
    all_reduce(comm, flat_view(data), {.name = "bucket 1"});
    const std::unique_ptr<Communicator> part = comm.split(0, 0);
    if (comm.rank() == last()) {
      Work lost = part->recv(flat_view(data), 0, {.step = 8}, {.name = "x"});
      others_know.wait();
      (void)text_of<TimeoutError>([&] { lost.wait_host(); });
      return;
    }
    const std::string text = text_of<TimeoutError>([&] { all_reduce(comm, flat_view(data), {.name = "bucket 2"}); });
    others_know.count_down();
    const std::string end = "rank " + std::to_string(last());
    EXPECT_TRUE(contains(text, "in all_reduce 'bucket 2' of 10 fp32 for " + end + ": " + end + " finished split")) << text;
    EXPECT_TRUE(contains(text, "it posted recv 'x' of 10 fp32 from rank 0 to " + end + " (step 8")) << text;
  });
}

TEST_P(Failures, ARankThatEndedIsNamedAtOnce) {
  run_ranks(ranks(), [&](Communicator& comm) {
    if (comm.rank() == last()) return;
    try {
      comm.barrier();
      ADD_FAILURE() << "no exception";
    } catch (const PeerError& error) {
      EXPECT_EQ(error.rank(), last());
      EXPECT_TRUE(contains(error.what(), "has ended without joining")) << error.what();
    }
  });
}

TEST_P(Failures, AMessageToARankThatEndedFails) {
  run_ranks(ranks(), [&](Communicator& comm) {
    if (comm.rank() != 0) return;
    std::vector<float> data(10);
    EXPECT_TRUE(contains(text_of<PeerError>([&] { comm.send(flat_view(data), last(), {}, {}).wait_host(); }), "has ended"));
  });
}

// What rank 0 and the others call, and what all must be told.
TEST_P(Failures, DifferentOperationsAreNamed) {
  std::atomic<int> told{0};
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      std::vector<float> data = values_of<float>(comm.rank(), 5000);
      const std::vector<float> before = data;
      const std::string text = text_of<ContractError>([&] {
        if (comm.rank() == last()) {
          comm.broadcast(flat_view(data), 0, {.name = "weights"}).wait_host();
        } else {
          all_reduce(comm, flat_view(data), {.name = "gradients"});
        }
      });
      // Over messages any two of the ranks may be the first to meet.
      EXPECT_TRUE(
          contains(text, (way() == Way::messages ? "" : "rank 0 ") + std::string("calls all_reduce 'gradients' of 5000 fp32")))
          << text;
      EXPECT_TRUE(contains(text, "rank " + std::to_string(last()) + " calls broadcast 'weights' of 5000 fp32 from 0")) << text;
      EXPECT_EQ(data, before);
      told.fetch_add(1);
      throw ContractError("mismatch seen");
    });
  };
  EXPECT_EQ(text_of<ContractError>(world), "mismatch seen");
  EXPECT_EQ(told.load(), ranks());
}

template <class First, class Last>
void expect_mismatch(Way way, int ranks, const First& first, const Last& last, const std::string& part) {
  run_ranks(ranks, way, [&](Communicator& comm) {
    const std::string text = text_of<ContractError>([&] {
      comm.rank() == comm.size() - 1 ? last(comm) : first(comm);
      if (way == Way::messages) comm.barrier();  // a rank may be done with its part before it shows
    });
    EXPECT_TRUE(contains(text, part)) << text;
  });
}

TEST_P(Failures, DifferentSizesDtypesAndRootsAreMismatches) {
  std::vector<std::vector<double>> buffers(static_cast<std::size_t>(ranks()), std::vector<double>(100));
  const auto view = [&](Communicator& comm, DType dtype, std::int64_t count) {
    return TensorView(buffers[static_cast<std::size_t>(comm.rank())].data(), dtype, {count});
  };
  const auto sum = [&](DType dtype, std::int64_t count) {
    return [=](Communicator& comm) { all_reduce(comm, view(comm, dtype, count), {}); };
  };
  expect_mismatch(way(), ranks(), sum(DType::f32, 100), sum(DType::f32, 99), "all_reduce of 99 fp32");
  expect_mismatch(way(), ranks(), sum(DType::f32, 50), sum(DType::i32, 50), "all_reduce of 50 int32");
  const auto cast = [&](int root) {
    return [=](Communicator& comm) { comm.broadcast(view(comm, DType::f64, 7), root, {}).wait_host(); };
  };
  expect_mismatch(way(), ranks(), cast(0), cast(1), "broadcast of 7 fp64 from 1");
  expect_mismatch(
      way(), ranks(), [](Communicator& comm) { comm.barrier(); }, sum(DType::f64, 1), "calls barrier");
}

TEST_P(Failures, AllToAllCountsMustAgreePairwise) {
  const auto exchange = [](std::int64_t expected_from_0) {
    return [=](Communicator& comm) {
      const auto n = static_cast<std::size_t>(comm.size());
      std::vector<std::int64_t> sends(n, 2), receives(n, 2);
      receives[0] = expected_from_0;
      std::vector<float> input(2 * n), output(static_cast<std::size_t>(total_of(receives)));
      comm.all_to_all(flat_view(input), sends, flat_view(output), receives, {}).wait_host();
    };
  };
  const std::string end = std::to_string(last());
  expect_mismatch(way(), ranks(), exchange(2), exchange(3), "rank 0 sends 2 elements to rank " + end + ", which expects 3");
}

TEST_P(Failures, WrongArgumentsAreRefusedByTheCall) {
  run_world({.ranks = 1}, [](Communicator& comm) {
    std::vector<float> data(10);
    const std::vector<std::int64_t> counts = {9}, two = {5, 5}, negative = {-1};
    const TensorView view = flat_view(data);
    EXPECT_THROW((void)comm.all_gather(view, view, counts, {}), ContractError);
    EXPECT_THROW((void)comm.all_gather(view, view, two, {}), ContractError);
    EXPECT_THROW((void)comm.reduce_scatter(view, view, negative, {}), ContractError);
    EXPECT_THROW((void)comm.broadcast(view, 1, {}), ContractError);
    EXPECT_THROW((void)comm.send(view, -1, {}, {}), ContractError);
    const std::vector<std::int64_t> six = {6};
    EXPECT_THROW((void)comm.all_to_all(view.flat(0, 6), six, view.flat(4, 6), six, {}), ContractError);
  });
}

TEST_P(Failures, ADroppedOperationIsReported) {
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      std::vector<float> data(100000, 1.0F);
      if (comm.rank() == last()) {
        { Work dropped = comm.all_reduce(flat_view(data), {.name = "bucket 7"}); }
        comm.barrier();
        return;
      }
      const std::string text = text_of<PeerError>([&] {
        all_reduce(comm, flat_view(data), {.name = "bucket 7"});
        comm.barrier();
      });
      EXPECT_TRUE(contains(text, "rank " + std::to_string(last()) + " dropped all_reduce 'bucket 7'")) << text;
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "dropped all_reduce 'bucket 7'"));
}

TEST_P(Failures, ADroppedOperationBehindAnotherIsNeverCarriedOut) {
  std::latch dropped(1);
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      std::vector<float> first(1000, 1.0F);
      if (comm.rank() == last()) {
        Work pending = comm.all_reduce(flat_view(first), {.name = "first"});
        {
          std::vector<float> gone(200000);
          Work second = comm.all_reduce(flat_view(gone), {.name = "second"});
        }
        dropped.count_down();
        pending.wait_host();
        return;
      }
      dropped.wait();
      const std::string text = text_of<PeerError>([&] {
        all_reduce(comm, flat_view(first), {.name = "first"});
        std::vector<float> second(200000);
        all_reduce(comm, flat_view(second), {.name = "second"});
      });
      EXPECT_TRUE(contains(text, "dropped all_reduce 'second'")) << text;
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "dropped all_reduce 'second'"));
}

TEST_P(Failures, ADroppedOperationIsReportedAtTheEndOfTheBody) {
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      std::vector<float> data(10);
      if (comm.rank() == 0) (void)comm.recv(flat_view(data), last(), {}, {.name = "lost"});
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "dropped recv 'lost'"));
}

TEST_P(Failures, BuffersOfAFailingRankAreNotTouchedAfterItsBodyUnwinds) {
  // Rank 0 gives up while its operation is pending; the buffer is gone when the last rank arrives. The sanitizers judge this one.
  std::latch gone(1);
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      std::vector<float> data(200000, 1.0F);
      if (comm.rank() == 0) {
        struct CountDown {
          std::latch& latch;
          ~CountDown() { latch.count_down(); }
        } at_end{gone};
        std::vector<float> own(200000, 1.0F);
        Work pending = comm.all_reduce(flat_view(own), {});
        throw IoError("power lost");
      }
      if (comm.rank() == last()) gone.wait();
      EXPECT_TRUE(contains(text_of<PeerError>([&] { all_reduce(comm, flat_view(data), {}); }), "power lost"));
      // Over messages, parts that had come before may be summed already.
      EXPECT_TRUE(way() == Way::messages || data == std::vector<float>(200000, 1.0F));
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "power lost");
}

TEST_P(Failures, OneFailureReachesRanksInOtherGroups) {
  std::atomic<int> told{0};
  std::latch split{ranks()};
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      const std::unique_ptr<Communicator> part = comm.split(comm.rank() == 0 ? 0 : 1, 0);
      split.arrive_and_wait();  // not over messages: a rank that is still splitting would be told there
      if (comm.rank() == 0) throw IoError("alone");
      std::vector<float> data(10);
      // Nobody sends this: the wait is inside a group that the failing rank does not belong to.
      const std::string text = text_of<PeerError>([&] { part->recv(flat_view(data), part->rank(), {}, {}).wait_host(); });
      EXPECT_TRUE(contains(text, "rank 0 failed: alone")) << text;
      told.fetch_add(1);
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "alone");
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(Failures, PartsOfASplitNameWorldRanks) {
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      const std::unique_ptr<Communicator> part = comm.split(0, -comm.rank());  // reversed
      if (comm.rank() == last()) throw IoError("world's last, part's first");
      try {
        part->barrier();
      } catch (const PeerError& error) {
        EXPECT_EQ(error.rank(), last());
        throw;
      }
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "world's last, part's first");
}

TEST_P(Failures, ANewWorldRunsAfterAFailedOne) {
  EXPECT_THROW(run_ranks(ranks(),
                         [](Communicator& comm) {
                           if (comm.rank() == 0) throw IoError("first world");
                           comm.barrier();
                         }),
               IoError);
  run_ranks(ranks(), [](Communicator& comm) { EXPECT_EQ(all_reduce_sum(comm, 1.0), comm.size()); });
}

TEST_P(Failures, TheFirstOfSeveralFailuresIsRethrown) {
  const auto world = [&] {
    run_ranks(ranks(), [&](Communicator& comm) {
      if (comm.rank() == last()) throw IoError("cause");
      try {
        comm.barrier();
      } catch (const PeerError&) {
        throw InputError("consequence");
      }
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "cause");
}

}  // namespace
}  // namespace tandem::comm_test
