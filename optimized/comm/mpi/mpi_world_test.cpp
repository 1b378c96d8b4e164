// SPDX-License-Identifier: Apache-2.0
// Runs under mpirun, with any number of processes; every process runs every test.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/mpi/mpi_job.h"
#include "optimized/comm/mpi/mpi_world.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

int processes() { return MpiJob::get().shape().processes; }
int process() { return MpiJob::get().shape().rank; }

WorldOptions world_of(int ranks) {
  WorldOptions options{.ranks = ranks, .deadline = 20000ms};
  options.settings.transport = "mpi";
  return options;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// What run_world throws, as text; empty: nothing.
template <class Expected>
std::string error_of(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  try {
    run_world(options, body);
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type: " << error.what();
    return error.what();
  }
  return {};
}

double sum_of_ranks(Communicator& comm) { return all_reduce_sum(comm, comm.rank()); }

TEST(MpiWorld, ManyWorldsOfDifferentSizesOneAfterTheOther) {
  std::uint64_t last = 0;
  for (int round = 0; round < 8; ++round) {
    const int ranks = 1 + round % processes();
    bool ran = false;

    run_world(world_of(ranks), [&](Communicator& comm) {
      ran = true;
      EXPECT_EQ(comm.size(), ranks);
      EXPECT_EQ(comm.rank(), process());
      EXPECT_EQ(sum_of_ranks(comm), ranks * (ranks - 1) / 2);
      EXPECT_GT(comm.generation(), last);
      last = comm.generation();
    });

    EXPECT_EQ(ran, process() < ranks);
  }
}

TEST(MpiWorld, SumsInRankOrderToTheLastBit) {
  run_world(world_of(processes()), [&](Communicator& comm) {
    const auto term = [](int rank) { return 0.1F * static_cast<float>(rank + 1) + 1e7F * static_cast<float>(rank % 2); };
    std::vector<float> values(100003, term(comm.rank()));

    all_reduce(comm, view_of(values, {std::ssize(values)}), {});

    float expected = term(0);
    for (int rank = 1; rank < comm.size(); ++rank) expected += term(rank);
    EXPECT_EQ(values, std::vector<float>(values.size(), expected));
  });
}

TEST(MpiWorld, PartsOfASplitTalkAmongThemselves) {
  run_world(world_of(processes()), [&](Communicator& comm) {
    const auto part = comm.split(comm.rank() % 2, -comm.rank());
    double expected = 0;
    for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) expected += rank;

    EXPECT_EQ(all_reduce_sum(*part, comm.rank()), expected);
    EXPECT_EQ(sum_of_ranks(comm), comm.size() * (comm.size() - 1) / 2);
  });
}

TEST(MpiWorld, BodyThatThrowsOnOneRankFailsEveryProcessWithItsName) {
  const int victim = processes() - 1;

  const auto body = [&](Communicator& comm) {
    if (comm.rank() == victim) throw IoError("no space left");
    comm.barrier();
  };

  if (process() == victim) {
    EXPECT_EQ(error_of<IoError>(world_of(processes()), body), "no space left");
  } else {
    EXPECT_EQ(error_of<PeerError>(world_of(processes()), body), "rank " + std::to_string(victim) + " failed: no space left");
  }
  // The job is whole.
  run_world(world_of(processes()), [](Communicator& comm) { comm.barrier(); });
  EXPECT_NO_THROW(require_whole_job());
}

TEST(MpiWorld, ProcessesBesideTheWorldHearOfItsFailure) {
  const std::string text = "of one rank alone";
  if (process() == 0) {
    EXPECT_EQ(error_of<IoError>(world_of(1), [&](Communicator&) { throw IoError(text); }), text);
  } else {
    EXPECT_EQ(error_of<PeerError>(world_of(1), [&](Communicator&) { ADD_FAILURE(); }), "rank 0 failed: " + text);
  }
}

TEST(MpiWorld, CallsThatDoNotMatchAreContractErrorsEverywhere) {
  if (processes() == 1) GTEST_SKIP() << "needs two processes";

  const std::string text = error_of<ContractError>(world_of(processes()), [](Communicator& comm) {
    std::vector<float> values(comm.rank() == 1 ? 9 : 8);
    all_reduce(comm, view_of(values, {std::ssize(values)}), {Purpose::gradient, "bucket 0"});
    comm.barrier();
  });

  EXPECT_TRUE(has(text, "'bucket 0' of 8 fp32") && has(text, "'bucket 0' of 9 fp32")) << text;
}

TEST(MpiWorld, AbortReachesThoseThatWait) {
  if (processes() == 1) GTEST_SKIP() << "needs two processes";

  const auto body = [](Communicator& comm) {
    if (comm.rank() == 1) comm.abort("the disk is on fire");
    comm.barrier();
  };

  EXPECT_TRUE(has(error_of<PeerError>(world_of(processes()), body), "rank 1 aborted: the disk is on fire"));
}

// A rank that is late is alive: the report says what it did last, and the job goes on.
TEST(MpiWorld, DeadlineNamesWhoIsMissingFromWhatAndWhatItDidLast) {
  if (processes() == 1) GTEST_SKIP() << "needs two processes";
  WorldOptions options = world_of(processes());
  options.deadline = 300ms;

  const std::string text = error_of<TimeoutError>(options, [&](Communicator& comm) {
    std::vector<float> values(8);
    all_reduce(comm, view_of(values, {8}), {Purpose::gradient, "bucket 0"});
    if (comm.rank() == 1) {
      // Until it hears that the others have given it up.
      try {
        std::vector<float> never(1);
        comm.recv(view_of(never, {1}), 0, {.step = 7}, {Purpose::activation, "activations"}).wait_host();
      } catch (const TimeoutError&) {
        throw;
      }
      return;
    }
    all_reduce(comm, view_of(values, {8}), {Purpose::gradient, "bucket 1"});
  });

  EXPECT_TRUE(has(text, "waited 300 ms in ")) << text;
  EXPECT_TRUE(has(text, "finished all_reduce 'bucket 0' of 8 fp32")) << text;
  EXPECT_NO_THROW(require_whole_job());
}

TEST(MpiWorld, AdversaryChangesNoValue) {
  WorldOptions options = world_of(processes());
  options.settings.adversary = AdversaryScript{.seed = 3};

  run_world(options, [&](Communicator& comm) {
    for (int i = 0; i < 5; ++i) EXPECT_EQ(sum_of_ranks(comm), comm.size() * (comm.size() - 1) / 2);
  });
}

TEST(MpiWorld, MoreRanksThanProcessesAreRefused) {
  const std::string text = error_of<InputError>(world_of(processes() + 1), [](Communicator&) {});

  EXPECT_TRUE(has(text, "start it with mpirun -n " + std::to_string(processes() + 1))) << text;
}

TEST(MpiWorld, BytesOfAllProcessesComeInOrder) {
  WorldSettings settings;
  settings.transport = "mpi";

  const auto parts = all_gather_bytes(settings, std::string(static_cast<std::size_t>(process()) * 10000, 'x'));

  ASSERT_EQ(static_cast<int>(parts.size()), processes());
  for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_EQ(parts[i], std::string(i * 10000, 'x'));
}

}  // namespace
}  // namespace tandem
