// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/job_control.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "core/error.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

// The processes of a job, as objects of this one.
class Job {
 public:
  explicit Job(int processes) {
    std::vector<ProcessAddress> addresses;
    for (int rank = 0; rank < processes; ++rank) {
      lifelines_.push_back(std::make_unique<Lifeline>(rank, processes));
      controls_.push_back(std::make_unique<JobControl>(*lifelines_.back()));
      addresses.push_back(ProcessAddress::from_line(lifelines_.back()->here().to_line()));
    }
    on_all([&](int rank) {
      lifelines_[index(rank)]->connect(addresses, 4711, std::chrono::steady_clock::now() + 10s, *controls_[index(rank)]);
    });
  }

  [[nodiscard]] JobControl& operator[](int rank) { return *controls_[index(rank)]; }
  /// As the operating system does when a process dies: its sockets close.
  void kill(int rank) { lifelines_[index(rank)].reset(); }
  [[nodiscard]] Lifeline& lifeline(int rank) { return *lifelines_[index(rank)]; }

  template <class Body>
  void on_all(const Body& body) {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < static_cast<int>(lifelines_.size()); ++rank) {
      if (lifelines_[index(rank)]) threads.emplace_back([&body, rank] { body(rank); });
    }
  }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  // A lifeline tells its control, so it goes first.
  std::vector<std::unique_ptr<JobControl>> controls_;
  std::vector<std::unique_ptr<Lifeline>> lifelines_;
};

// The first failure that a hook was told, to be waited for. Lives longer than the job.
struct Heard {
  std::promise<Failure> failure;
  std::future<Failure> future = failure.get_future();
  bool told = false;
  [[nodiscard]] JobControl::Hooks hooks(std::string report = {}) {
    return {[this](const Failure& heard) {
              if (!std::exchange(told, true)) failure.set_value(heard);
            },
            {},
            [report] { return report; }};
  }
};

TEST(ProcessAddress, ComesBackFromItsLine) {
  const ProcessAddress address{"node-7", {"10.0.0.7", "192.168.1.7"}, 40001, 1234};

  const ProcessAddress back = ProcessAddress::from_line(address.to_line());

  EXPECT_EQ(back.addresses, address.addresses);
  EXPECT_EQ(back.port, 40001);
  EXPECT_EQ(back.describe(3), "rank 3 (pid 1234 on host node-7)");
  EXPECT_THROW(static_cast<void>(ProcessAddress::from_line("node-7 port")), ContractError);
}

TEST(Lifeline, TurnsAwayWhoDoesNotKnowTheToken) {
  struct Silent : Lifeline::Listener {
    void heard(int, const Notice&) override {}
    void lost(int) override {}
  } silent;
  Lifeline first(0, 2), second(1, 2);
  const std::vector<ProcessAddress> both = {first.here(), second.here()};
  second.connect(both, 1, std::chrono::steady_clock::now() + 1s, silent);

  EXPECT_THROW(first.connect(both, 2, std::chrono::steady_clock::now() + 50ms, silent), IoError);
}

TEST(JobControl, WorldsHaveTheGenerationOfRankZeroInEveryProcess) {
  Job job(3);
  std::vector<std::uint64_t> generations(3);

  for (const std::uint64_t expected : {100, 200}) {
    job.on_all([&](int rank) {
      generations[static_cast<std::size_t>(rank)] = job[rank].begin(2, expected + static_cast<std::uint64_t>(rank), 5000ms);
      EXPECT_FALSE(job[rank].end({}));
    });
    EXPECT_EQ(generations, std::vector<std::uint64_t>(3, expected));
  }
}

TEST(JobControl, ProcessesThatMakeDifferentWorldsAreTold) {
  Job job(2);

  job.on_all([&](int rank) {
    try {
      static_cast<void>(job[rank].begin(rank + 1, 1, 5000ms));
      ADD_FAILURE() << "no error";
    } catch (const ContractError& error) {
      EXPECT_NE(std::string(error.what()).find("do all of them run the same command?"), std::string::npos) << error.what();
    }
  });
}

TEST(JobControl, DeathOfAnyProcessReachesAllOthersWithItsName) {
  for (const int victim : {0, 2}) {
    std::vector<Heard> heard(3);
    Job job(3);
    job.on_all([&](int rank) { static_cast<void>(job[rank].begin(3, 1, 5000ms)); });
    for (int rank = 0; rank < 3; ++rank) job[rank].watch(heard[static_cast<std::size_t>(rank)].hooks());

    job.kill(victim);

    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const Failure failure = heard[static_cast<std::size_t>(rank)].future.get();
      EXPECT_EQ(failure.rank, victim);
      EXPECT_EQ(failure.message, job.lifeline(rank).at(victim).describe(victim) + " died");
      const auto outcome = job[rank].end(failure);
      ASSERT_TRUE(outcome);
      EXPECT_EQ(outcome->rank, victim);
      EXPECT_THROW(job[rank].require_whole(), PeerError);
      EXPECT_THROW(static_cast<void>(job[rank].begin(3, 2, 5000ms)), PeerError);
    }
  }
}

TEST(JobControl, FailureOfOneRankBecomesTheOutcomeEverywhere) {
  std::vector<Heard> heard(3);
  Job job(3);
  const Failure failure{Failure::Kind::contract, 1, "rank 1 failed: counts\ndiffer"};
  std::vector<std::optional<Failure>> outcomes(3);

  job.on_all([&](int rank) {
    // Rank 2 has no part in this world and hears of its end all the same.
    static_cast<void>(job[rank].begin(2, 1, 5000ms));
    job[rank].watch(heard[static_cast<std::size_t>(rank)].hooks());
    std::optional<Failure> own;
    if (rank == 1) job[rank].fail(failure);
    if (rank == 1) own = failure;
    if (rank == 0) own = heard[0].future.get();
    outcomes[static_cast<std::size_t>(rank)] = job[rank].end(own);
  });

  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome);
    EXPECT_EQ(outcome->kind, Failure::Kind::contract);
    EXPECT_EQ(outcome->rank, 1);
    EXPECT_EQ(outcome->message, failure.message);
  }
  // The job is whole: the next world is a new start.
  job.on_all([&](int rank) {
    EXPECT_EQ(job[rank].begin(3, 7, 5000ms), 7);
    EXPECT_FALSE(job[rank].end({}));
  });
}

TEST(JobControl, OfTwoOriginsTheLowestRankCountsInEveryProcess) {
  Job job(3);
  std::vector<std::optional<Failure>> outcomes(3);

  job.on_all([&](int rank) {
    static_cast<void>(job[rank].begin(3, 1, 5000ms));
    // Each heard of itself first; rank 0 heard of rank 2.
    const int origin = rank == 0 ? 2 : rank;
    outcomes[static_cast<std::size_t>(rank)] = job[rank].end(Failure{Failure::Kind::peer, origin, std::to_string(origin)});
  });

  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.value().rank, 1);
}

TEST(JobControl, EveryProcessSaysWhatItDoes) {
  std::vector<Heard> heard(3);
  Job job(3);
  job.on_all([&](int rank) { static_cast<void>(job[rank].begin(3, 1, 5000ms)); });
  for (int rank = 0; rank < 3; ++rank)
    job[rank].watch(heard[static_cast<std::size_t>(rank)].hooks("did " + std::to_string(rank)));

  const auto answers = job[1].ask_all(5000ms);

  ASSERT_EQ(answers.size(), 3U);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(answers[static_cast<std::size_t>(rank)], "did " + std::to_string(rank));
}

TEST(JobControl, WhoDoesNotAnswerAfterADeadlineBreaksTheJob) {
  std::vector<Heard> heard(3);
  Job job(3);
  job.on_all([&](int rank) { static_cast<void>(job[rank].begin(3, 1, 5000ms)); });
  job[2].watch(heard[2].hooks());
  // As a stopped process: the connection stands, nobody listens.
  std::promise<void> go_on;
  const std::shared_future<void> released = go_on.get_future().share();
  job[1].watch({{}, {}, [released] {
                  released.wait();
                  return std::string();
                }});

  const auto outcome = job[0].end(Failure{Failure::Kind::timeout, 0, "rank 1 has not arrived"});
  go_on.set_value();

  ASSERT_TRUE(outcome);
  EXPECT_EQ(outcome->kind, Failure::Kind::timeout);
  EXPECT_TRUE(outcome->message.starts_with("rank 1 has not arrived; rank 1 (pid ")) << outcome->message;
  EXPECT_THROW(job[0].require_whole(), TimeoutError);
  // The others name the same cause.
  EXPECT_EQ(heard[2].future.get().message, outcome->message);
  EXPECT_THROW(job[2].require_whole(), TimeoutError);
}

TEST(JobControl, WhoAnswersButDoesNotComeAfterAFailureBreaksTheJob) {
  std::vector<Heard> heard(2);
  Job job(2);
  job.on_all([&](int rank) { static_cast<void>(job[rank].begin(2, 1, 5000ms)); });
  job[1].watch(heard[1].hooks("is at work"));

  const auto outcome = job[0].end(Failure{Failure::Kind::timeout, 0, "rank 1 has not arrived"}, {}, 100ms);

  ASSERT_TRUE(outcome);
  EXPECT_EQ(outcome->rank, 1);
  EXPECT_NE(outcome->message.find("answers, but its work has not ended 0.1 s later"), std::string::npos) << outcome->message;
  EXPECT_EQ(heard[1].future.get().message, outcome->message);
}

TEST(JobControl, LeavesTogetherAndNobodyCallsThatADeath) {
  Job job(3);
  std::vector<int> whole(3);

  job.on_all([&](int rank) { whole[static_cast<std::size_t>(rank)] = job[rank].leave(0, 5000ms) ? 1 : 0; });
  job.kill(2);
  static_cast<void>(job[0].ask_all(50ms));

  EXPECT_EQ(whole, std::vector<int>(3, 1));
  EXPECT_FALSE(job[0].broken());
}

TEST(JobControl, WhoLeavesEarlyIsNamedByThoseWhoGoOn) {
  Job job(2);
  std::jthread leaving([&] { EXPECT_FALSE(job[1].leave(4, 50ms)); });

  try {
    static_cast<void>(job[0].begin(2, 1, 5000ms));
    ADD_FAILURE() << "no error";
  } catch (const PeerError& error) {
    EXPECT_EQ(error.rank(), 1);
    EXPECT_NE(std::string(error.what()).find("left the job with exit status 4"), std::string::npos) << error.what();
  }
}

TEST(JobControl, LettersOfAWorldArriveInOrderAndNotInTheNext) {
  std::vector<std::string> heard;
  std::promise<void> last;
  Job job(2);
  job.on_all([&](int rank) { job[rank].begin(2, 1, 10000ms); });
  // Two before anybody listens, one after.
  job[0].tell(1, "first");
  job[0].tell(1, "second");
  JobControl::Hooks hooks;
  hooks.told = [&](int from, const std::string& letter) {
    EXPECT_EQ(from, 0);
    heard.push_back(letter);
    if (letter == "third") last.set_value();
  };
  job[1].watch(hooks);
  job[0].tell(1, "third");
  ASSERT_EQ(last.get_future().wait_for(10s), std::future_status::ready);
  EXPECT_EQ(heard, (std::vector<std::string>{"first", "second", "third"}));
  job[1].watch({});
  job[0].tell(1, "of a world that is over");
  job.on_all([&](int rank) { EXPECT_FALSE(job[rank].end({}).has_value()); });
  job.on_all([&](int rank) { job[rank].begin(2, 2, 10000ms); });
  job[1].watch(hooks);
  last = std::promise<void>();
  job[0].tell(1, "third");
  ASSERT_EQ(last.get_future().wait_for(10s), std::future_status::ready);
  EXPECT_EQ(heard.size(), 4U);
  job.on_all([&](int rank) { EXPECT_FALSE(job[rank].end({}).has_value()); });
}

}  // namespace
}  // namespace tandem
