// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <latch>

#include "core/error.h"
#include "core/timeline.h"
#include "optimized/comm/comm_test_support.h"
#include "optimized/comm/nccl/nccl_fake_test_support.h"

namespace tandem::nccl_test {
namespace {

using namespace std::chrono_literals;
using comm_test::contains;
using comm_test::text_of;

// So many floats on a rank's device, all of one value.
class Floats {
 public:
  Floats(Memory& lane, std::int64_t count, float value = 1.0F) : lane_(lane), count_(count), address_(lane.reserve(count * 4)) {
    const std::vector<float> values(static_cast<std::size_t>(count), value);
    lane.write(values.data(), address_, count * 4);
  }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  ~Floats() { lane_.give_back(address_, count_ * 4); }
  [[nodiscard]] TensorView view() const { return {address_, DType::f32, {count_}}; }
  [[nodiscard]] float first() const {
    float value = 0;
    lane_.read(address_, &value, 4);
    return value;
  }

 private:
  Memory& lane_;
  std::int64_t count_;
  void* address_;
};

TEST(NcclFailures, AMissingRankIsNamedByTheDeadlineAndTheStreamsComeFree) {
  const FakeNccl nccl;
  std::latch others_know(2);
  std::latch all_run(3);
  // The first bucket must be in time on a machine with other work, too.
  run_fake_world({.ranks = 3, .deadline = 500ms}, [&](Communicator& comm, Memory& lane) {
    const Floats data(lane, 10);
    all_run.arrive_and_wait();
    comm.all_reduce(data.view(), {.name = "bucket 1"}).wait_host();
    if (comm.rank() == 2) return others_know.wait();
    // On the device's tensors wait_host() returns at once: who reads the result waits, until NCCL has been told to end.
    comm.all_reduce(data.view(), {.name = "bucket 2"}).wait_host();
    static_cast<void>(data.first());
    const std::string text = text_of<TimeoutError>([&] { comm.barrier(); });
    EXPECT_TRUE(
        contains(text, "waited 500 ms in all_reduce 'bucket 2' of 10 fp32 for rank 2: rank 2 finished all_reduce 'bucket 1'"))
        << text;
    others_know.count_down();
  });
  EXPECT_GE(nccl.counts().aborts, 3);
  EXPECT_EQ(nccl.counts().destroys, 0);
}

TEST(NcclFailures, AThrowingRankIsNamedOnAllOthersAndTheNextWorldIsWell) {
  const FakeNccl nccl;
  std::atomic<int> told{0};
  const auto world = [&] {
    run_fake_world({.ranks = 3}, [&](Communicator& comm, Memory& lane) {
      const Floats data(lane, 10);
      if (comm.rank() == 1) {
        comm.barrier();
        throw IoError("disk is full");
      }
      Work pending = comm.recv(data.view(), 1, {}, {});
      const auto two_barriers = [&] {
        comm.barrier();
        comm.barrier();
      };
      EXPECT_TRUE(contains(text_of<PeerError>(two_barriers), "rank 1 failed: disk is full"));
      EXPECT_TRUE(contains(text_of<PeerError>([&] { pending.wait_host(); }), "rank 1 failed: disk is full"));
      EXPECT_TRUE(contains(text_of<PeerError>([&] { static_cast<void>(comm.all_reduce(data.view(), {})); }), "rank 1 failed"));
      told.fetch_add(1);
    });
  };
  EXPECT_EQ(text_of<IoError>(world), "disk is full");
  EXPECT_EQ(told.load(), 2);
  run_fake_world({.ranks = 3, .generation = 2}, [](Communicator& comm, Memory& lane) {
    EXPECT_EQ(comm.generation(), 2U);
    const Floats data(lane, 10);
    comm.all_reduce(data.view(), {}).wait_host();
    EXPECT_EQ(data.first(), 3.0F);
  });
  EXPECT_EQ(nccl.counts().destroys, 3);
}

TEST(NcclFailures, AbortByOneRankEndsWhatTheOthersHaveOnTheirDevices) {
  const FakeNccl nccl;
  std::atomic<int> others_wait{0};
  run_fake_world({.ranks = 3}, [&](Communicator& comm, Memory& lane) {
    const Floats data(lane, 10);
    if (comm.rank() == 0) {
      while (others_wait < 2) std::this_thread::yield();
      return comm.abort("operator pressed stop");
    }
    comm.all_reduce(data.view(), {}).wait_host();
    others_wait.fetch_add(1);
    static_cast<void>(data.first());
    EXPECT_TRUE(contains(text_of<PeerError>([&] { comm.barrier(); }), "rank 0 aborted: operator pressed stop"));
  });
}

TEST(NcclFailures, AnErrorOfNcclNamesItsRankOnAll) {
  const FakeNccl nccl({.rank_with_error = 1, .error_after = 2});
  std::atomic<int> told{0};
  const auto world = [&] {
    run_fake_world({.ranks = 3}, [&](Communicator& comm, Memory& lane) {
      const Floats data(lane, 10);
      const std::string text = text_of<PeerError>([&] {
        for (int i = 0; i < 5; ++i) {
          comm.all_reduce(data.view(), {.name = "x"}).wait_host();
          comm.barrier();
        }
      });
      EXPECT_TRUE(contains(text, "rank 1 failed: NCCL: ")) << text;
      EXPECT_TRUE(contains(text, "fake system error")) << text;
      told.fetch_add(1);
    });
  };
  world();
  EXPECT_EQ(told.load(), 3);
}

TEST(NcclFailures, ACommunicatorThatDoesNotComeIntoBeingIsSaidSo) {
  const FakeNccl nccl({.rank_without_init = 0});
  run_fake_world({.ranks = 2}, [](Communicator& comm, Memory&) {
    EXPECT_TRUE(contains(text_of<PeerError>([&] { comm.barrier(); }), "rank 0 failed: NCCL: ")) << "on rank " << comm.rank();
  });
}

TEST(NcclFailures, AWorldWhoseRanksDoNothingEndsWell) {
  const FakeNccl nccl;
  for (int world = 0; world < 10; ++world) run_fake_world({.ranks = 3}, [](Communicator&, Memory&) {});
  EXPECT_EQ(nccl.counts().destroys, 30);
}

TEST(NcclFailures, ARankThatNeverComesToTheFirstOperationIsNamed) {
  const FakeNccl nccl;
  std::latch other_knows(1);
  run_fake_world({.ranks = 2, .deadline = 200ms}, [&](Communicator& comm, Memory&) {
    if (comm.rank() == 1) return other_knows.wait();
    const std::string text = text_of<TimeoutError>([&] { comm.barrier(); });
    EXPECT_TRUE(contains(text, "in barrier for rank 1")) << text;
    other_knows.count_down();
  });
}

TEST(NcclFailures, ARankThatEndedIsNamedBeforeTheDeadline) {
  const FakeNccl nccl;
  run_fake_world({.ranks = 3}, [](Communicator& comm, Memory& lane) {
    const Floats data(lane, 10);
    comm.barrier();
    if (comm.rank() == 2) return;
    const std::string text = text_of<PeerError>([&] { static_cast<void>(all_reduce_sum(comm, 1.0)); });
    EXPECT_TRUE(contains(text, "rank 2 has ended without joining")) << text;
  });
}

TEST(NcclFailures, CallsThatDoNotMatchAreNamedWhereNcclHangsAndWhereItDoesNot) {
  for (const bool carries_out : {false, true}) {
    const FakeNccl nccl({.carries_out_mismatches = carries_out});
    std::atomic<int> told{0};
    run_fake_world({.ranks = 3}, [&](Communicator& comm, Memory& lane) {
      const Floats data(lane, comm.rank() == 2 ? 8 : 10);
      const std::string text = text_of<ContractError>([&] {
        comm.all_reduce(data.view(), {.name = "gradients"}).wait_host();
        comm.barrier();
      });
      // Whoever looks names the first two that do not match, of those that have come so far.
      const std::string pair = " calls all_reduce 'gradients' of 10 fp32, rank 2 calls all_reduce 'gradients' of 8 fp32";
      EXPECT_TRUE(contains(text, "rank 0" + pair) || contains(text, "rank 1" + pair)) << text;
      told.fetch_add(1);
    });
    EXPECT_EQ(told.load(), 3);
  }
}

TEST(NcclFailures, ADroppedOperationIsReportedByTheNext) {
  const FakeNccl nccl;
  const auto world = [] {
    run_fake_world({.ranks = 2}, [](Communicator& comm, Memory& lane) {
      const Floats data(lane, 10);
      if (comm.rank() == 0) {
        static_cast<void>(comm.all_reduce(data.view(), {.name = "lost"}));
      } else {
        comm.all_reduce(data.view(), {.name = "lost"}).wait_host();
      }
      comm.barrier();
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "rank 0 dropped all_reduce 'lost' of 10 fp32 without waiting for it"));
}

TEST(NcclFailures, BuffersOfOneCallThatLieApartAreRefused) {
  const FakeNccl nccl;
  run_fake_world({.ranks = 1}, [](Communicator& comm, Memory& lane) {
    const Floats data(lane, 4);
    std::vector<float> host(4);
    EXPECT_THROW(static_cast<void>(comm.all_gather(data.view(), comm_test::flat_view(host), std::vector<std::int64_t>{4}, {})),
                 ContractError);
    std::vector<std::uint16_t> words(4);
    EXPECT_THROW(static_cast<void>(comm.all_reduce(comm_test::flat_view(words), {})), ContractError);
  });
}

TEST(NcclFailures, RegionsAreRegisteredInEveryCommunicatorAndGivenBack) {
  const FakeNccl nccl;
  run_fake_world({.ranks = 2}, [&](Communicator& comm, Memory& lane) {
    const Floats arena(lane, 100), second(lane, 10);
    comm.register_memory(arena.view().data(), 400);
    comm.register_memory(second.view().data(), 40);
    const std::unique_ptr<Communicator> part = comm.split(0, 0);
    part->barrier();
    comm.barrier();
    comm.deregister_memory(second.view().data());
    comm.barrier();
    comm.barrier();
    EXPECT_EQ(nccl.counts().registered, 8);
    EXPECT_EQ(nccl.counts().deregistered, 4);
    part->barrier();
  });
  EXPECT_EQ(nccl.counts().deregistered, 8);
}

TEST(NcclFailures, TransfersAreSpansOfTheTimelineInTheDevicesTime) {
  const FakeNccl nccl;
  run_fake_world({.ranks = 2}, [](Communicator& comm, Memory& lane) {
    Timeline timeline;
    comm.set_timeline(&timeline);
    const Floats data(lane, 10);
    const std::int64_t begin_ns = Timeline::now_ns();
    comm.all_reduce(data.view(), {.purpose = Purpose::gradient, .name = "bucket 0", .step = 7}).wait_host();
    comm.barrier();
    comm.set_timeline(nullptr);
    std::vector<Span> transfers;
    for (const Span& span : timeline.spans()) {
      if (span.activity == Activity::transfer && contains(span.name, "bucket 0")) transfers.push_back(span);
    }
    ASSERT_EQ(transfers.size(), 1U);
    EXPECT_EQ(transfers[0].bytes, 40);
    EXPECT_EQ(transfers[0].step, 7);
    EXPECT_EQ(transfers[0].lane, Lane::communication);
    EXPECT_GE(transfers[0].begin_ns, begin_ns);
    EXPECT_GE(transfers[0].end_ns, transfers[0].begin_ns);
  });
}

}  // namespace
}  // namespace tandem::nccl_test
