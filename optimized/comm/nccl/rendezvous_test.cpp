// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/rendezvous.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <string>
#include <thread>

#include "core/error.h"
#include "optimized/comm/comm_test_support.h"
#include "optimized/comm/mpi/sockets.h"
#include "optimized/comm/nccl/job_environment.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using comm_test::contains;
using comm_test::text_of;

// A port that is free now.
std::uint16_t free_port() {
  const auto [socket, port] = sockets::listen_anywhere(1);
  ::close(socket);
  return port;
}

RendezvousOptions options_of(int rank, int ranks, std::uint16_t port, std::chrono::milliseconds deadline = 10000ms) {
  return {.host = "127.0.0.1",
          .port = port,
          .rank = rank,
          .ranks = ranks,
          .generation = "run 1, restart 0",
          .line = "line of " + std::to_string(rank),
          .deadline = deadline};
}

TEST(Rendezvous, AllProcessesGetEverybodysLineInWhateverOrderTheyCome) {
  const std::uint16_t port = free_port();
  std::vector<RendezvousResult> results(4);
  {
    std::vector<std::jthread> threads;
    for (const int rank : {3, 1, 0, 2}) {
      threads.emplace_back([&, rank] { results[static_cast<std::size_t>(rank)] = meet(options_of(rank, 4, port)); });
      if (rank == 1) std::this_thread::sleep_for(150ms);  // so that these two come before anybody listens
    }
  }
  for (const RendezvousResult& result : results) {
    EXPECT_EQ(result.lines, (std::vector<std::string>{"line of 0", "line of 1", "line of 2", "line of 3"}));
    EXPECT_EQ(result.token, results[0].token);
  }
  // The port can be used again at once.
  RendezvousResult again;
  std::jthread other([&] { again = meet(options_of(1, 2, port)); });
  const RendezvousResult own = meet(options_of(0, 2, port));
  other.join();
  EXPECT_EQ(again.token, own.token);
  EXPECT_NE(own.token, results[0].token);
}

TEST(Rendezvous, MissingRanksAreNamedOnAllThatAreThere) {
  const std::uint16_t port = free_port();
  std::string text_of_other;
  std::jthread other(
      [&] { text_of_other = text_of<TimeoutError>([&] { static_cast<void>(meet(options_of(2, 4, port, 300ms))); }); });
  const std::string text = text_of<TimeoutError>([&] { static_cast<void>(meet(options_of(0, 4, port, 300ms))); });
  other.join();
  EXPECT_TRUE(contains(text, "rendezvous at 127.0.0.1:" + std::to_string(port) + ": ranks 1, 3 of 4 did not come within 300 ms"))
      << text;
  EXPECT_EQ(text_of_other, text);
}

TEST(Rendezvous, WhoIsOfAnotherStartOrHasATakenPlaceIsTurnedAwayAndTheOthersGoOn) {
  const std::uint16_t port = free_port();
  RendezvousResult host;
  std::jthread rank_0([&] { host = meet(options_of(0, 3, port)); });
  RendezvousOptions stale = options_of(1, 3, port);
  stale.generation = "run 1, restart 7";
  EXPECT_TRUE(contains(text_of<InputError>([&] { static_cast<void>(meet(stale)); }),
                       "rank 1 was turned away: it is of 'run 1, restart 7', the others of 'run 1, restart 0'"));
  EXPECT_TRUE(
      contains(text_of<InputError>([&] { static_cast<void>(meet(options_of(1, 2, port))); }), "with 2 ranks, the others with 3"));
  // Of two that come as rank 1 the second is turned away.
  std::atomic<int> let_in{0}, turned_away{0};
  const auto come_as_rank_1 = [&] {
    try {
      static_cast<void>(meet(options_of(1, 3, port)));
      let_in.fetch_add(1);
    } catch (const InputError& error) {
      EXPECT_TRUE(contains(error.what(), "rank 1 is there already")) << error.what();
      turned_away.fetch_add(1);
    }
  };
  std::jthread one(come_as_rank_1), other(come_as_rank_1);
  while (turned_away == 0) std::this_thread::yield();
  static_cast<void>(meet(options_of(2, 3, port)));
  rank_0.join();
  one.join();
  other.join();
  EXPECT_EQ(let_in, 1);
  EXPECT_EQ(turned_away, 1);
  EXPECT_EQ(host.lines.size(), 3U);
}

TEST(Rendezvous, ATakenPortAndAnUnreachableHostAreNamed) {
  const auto [socket, port] = sockets::listen_anywhere(1);
  const std::string taken = text_of<IoError>([&, taken_port = port] { static_cast<void>(meet(options_of(0, 2, taken_port))); });
  ::close(socket);
  EXPECT_TRUE(contains(taken, "rank 0 cannot listen on port " + std::to_string(port) + ": Address already in use")) << taken;
  const std::string refused =
      text_of<IoError>([&, no_port = port] { static_cast<void>(meet(options_of(1, 2, no_port, 250ms))); });
  EXPECT_TRUE(
      contains(refused, "127.0.0.1:" + std::to_string(port) + ": rank 1 cannot reach rank 0 within 250 ms: Connection refused"))
      << refused;
  RendezvousOptions nowhere = options_of(1, 2, port, 50ms);
  nowhere.host = "no-such-host.invalid";
  const std::string unknown = text_of<IoError>([&] { static_cast<void>(meet(nowhere)); });
  EXPECT_TRUE(contains(unknown, "rendezvous at no-such-host.invalid:")) << unknown;
  EXPECT_TRUE(contains(unknown, "the host name is not known")) << unknown;
}

JobEnvironment environment_of(const std::map<std::string, std::string>& variables) {
  return read_job_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(JobEnvironment, ReadsWhatEachLauncherSets) {
  using Launcher = JobEnvironment::Launcher;
  EXPECT_EQ(environment_of({}).launcher, Launcher::none);
  EXPECT_EQ(environment_of({{"OMPI_COMM_WORLD_SIZE", "4"}, {"RANK", "1"}}).launcher, Launcher::mpi);
  std::map<std::string, std::string> torch = {{"RANK", "3"},         {"WORLD_SIZE", "4"},      {"LOCAL_RANK", "1"},
                                              {"MASTER_ADDR", "n0"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "a"}};
  JobEnvironment job = environment_of(torch);
  EXPECT_EQ(job.launcher, Launcher::torchrun);
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.processes, 4);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.host, "n0");
  EXPECT_EQ(job.port, 29500);
  EXPECT_EQ(job.generation, "run a, restart 0");
  torch["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  torch["TORCHELASTIC_RESTART_COUNT"] = "2";
  job = environment_of(torch);
  EXPECT_EQ(job.port, 29501);
  EXPECT_EQ(job.generation, "run a, restart 2");
  job = environment_of({{"SLURM_PROCID", "5"},
                        {"SLURM_NTASKS", "8"},
                        {"SLURM_LOCALID", "1"},
                        {"SLURM_NODELIST", "gpu[07-08,11]"},
                        {"SLURM_JOB_ID", "123456"},
                        {"SLURM_STEP_ID", "2"},
                        {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}});
  EXPECT_EQ(job.launcher, Launcher::slurm);
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.host, "gpu07");
  EXPECT_GE(job.port, 20000);
  EXPECT_LT(job.port, 30000);
}

TEST(JobEnvironment, NamesTheVariableThatIsMissingOrWrong) {
  EXPECT_EQ(text_of<InputError>([] {
              static_cast<void>(environment_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}}));
            }),
            "environment variable MASTER_ADDR is not set, though RANK is");
  EXPECT_EQ(text_of<InputError>([] {
              static_cast<void>(environment_of({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}));
            }),
            "environment variable RANK=1x: must be a number from 0 to 16777216");
  EXPECT_EQ(text_of<InputError>([] {
              static_cast<void>(environment_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}));
            }),
            "environment variable RANK=2: of 2 processes");
}

}  // namespace
}  // namespace tandem
