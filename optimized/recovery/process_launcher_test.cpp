// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/process_launcher.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/recovery/run_guardian.h"

namespace tandem {
namespace {

// Starts shell scripts; what they write to standard error is read here.
class ProcessLaunch : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(pipe(errors_.data()), 0);
    mark_ = fmt::format("TANDEM_RUN={}-{}", getpid(), ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override {
    kill_marked_processes(mark_);
    for (const int end : errors_) close(end);
  }

  std::unique_ptr<Worker> start(const std::string& script, int stop_signal = SIGTERM) {
    ProcessLauncherOptions options;
    options.command = [&](const Attempt& attempt) {
      return std::vector<std::string>{"sh", "-c", script, "sh", std::to_string(attempt.number)};
    };
    options.mark = mark_;
    options.environment = {"PATH=never", "TANDEM_TEST_VALUE=given"};
    options.stop_signal = stop_signal;
    options.shared_files = shared_files_;
    options.errors = errors_[1];
    Attempt attempt;
    attempt.number = 7;
    return ProcessLauncher(options).start(attempt);
  }
  // The next line of what was copied.
  std::string line() {
    std::string text;
    for (char c = 0; read(errors_[0], &c, 1) == 1 && c != '\n';) text.push_back(c);
    return text;
  }
  static WorkerEnd end_of(Worker& worker) {
    for (;; std::this_thread::yield()) {
      if (const auto end = worker.poll()) return *end;
    }
  }

  std::array<int, 2> errors_{};
  std::string mark_, shared_files_;
};

TEST_F(ProcessLaunch, KeepsWhatTheProgramSaidLastWhateverItsLauncherAdds) {
  const auto worker = start(
      "echo \"first $1 $TANDEM_TEST_VALUE $TANDEM_RUN\" >&2; echo 'tandem: it broke' >&2; "
      "printf -- '----\nthe launcher says more' >&2; exit 4");

  const WorkerEnd end = end_of(*worker);

  EXPECT_EQ(end.status, 4);
  EXPECT_EQ(end.signal, 0);
  EXPECT_EQ(end.what, "it broke");
  EXPECT_TRUE(end.said);
  EXPECT_EQ(line(), "first 7 given " + mark_.substr(mark_.find('=') + 1));
  EXPECT_EQ(line(), "tandem: it broke");
}

TEST_F(ProcessLaunch, TellsSignalsFromStatuses) {
  const WorkerEnd killed = end_of(*start("echo said >&2; kill -9 $$"));
  EXPECT_EQ(killed.signal, SIGKILL);
  EXPECT_EQ(killed.what, "the workers were killed by signal 9 (Killed)");
  EXPECT_FALSE(killed.said);

  const WorkerEnd good = end_of(*start("exit 0"));
  EXPECT_EQ(good.status, 0);
  EXPECT_EQ(good.signal, 0);
  EXPECT_EQ(good.what, "");

  EXPECT_EQ(end_of(*start("echo other >&2; echo '---' >&2; exit 3")).what, "other");
  const WorkerEnd silent = end_of(*start("exit 3"));
  EXPECT_EQ(silent.what, "ended with status 3");
  EXPECT_FALSE(silent.said);
}

TEST_F(ProcessLaunch, AsksToStopWithTheSignalOfItsOptions) {
  const auto worker = start("trap 'exit 130' USR1; echo ready >&2; while :; do sleep 0.01; done", SIGUSR1);
  ASSERT_EQ(line(), "ready");
  EXPECT_FALSE(worker->poll());

  worker->terminate();

  EXPECT_EQ(end_of(*worker).status, 130);
}

TEST_F(ProcessLaunch, KillLeavesNothingBehindInOtherSessionsEither) {
  const auto worker = start(
      "setsid sleep 1000 & setsid sh -c 'sleep 1000 & wait' & sleep 1000 & "
      "trap '' TERM; echo ready >&2; wait");
  ASSERT_EQ(line(), "ready");
  EXPECT_FALSE(marked_processes(mark_).empty());

  worker->kill();

  EXPECT_TRUE(marked_processes(mark_).empty());
  ASSERT_TRUE(worker->poll());
  EXPECT_EQ(worker->poll()->signal, SIGKILL);
}

TEST_F(ProcessLaunch, SharedMemoryOfTheKilledIsRemoved) {
  const std::string file = fmt::format("{}shared-{}", ::testing::TempDir(), getpid());
  shared_files_ = file;
  const auto worker =
      start(fmt::format("exec python3 -c \"import mmap, sys, time; f = open('{0}', 'w+b'); f.write(bytes(4096)); "
                        "f.flush(); m = mmap.mmap(f.fileno(), 4096); print('ready', file=sys.stderr, flush=True); "
                        "time.sleep(1000)\"",
                        file));
  ASSERT_EQ(line(), "ready");

  worker->kill();

  EXPECT_NE(access(file.c_str(), F_OK), 0);
}

TEST_F(ProcessLaunch, WhatAWorkerThatEndedLeavesIsKilledToo) {
  const auto worker = start("setsid sleep 1000 & echo ready >&2; exit 5");
  EXPECT_EQ(end_of(*worker).status, 5);

  worker->kill();

  EXPECT_TRUE(marked_processes(mark_).empty());
  EXPECT_EQ(worker->poll()->status, 5);
}

TEST_F(ProcessLaunch, AWorkerThatIsNoLongerWantedIsKilled) {
  start("sleep 1000").reset();

  EXPECT_TRUE(marked_processes(mark_).empty());
}

TEST_F(ProcessLaunch, AsksToStopWhenTheSupervisorIsKilled) {
  const pid_t supervisor = fork();
  if (supervisor == 0) {
    const auto worker = start("trap 'echo asked >&2; exit 0' USR1; echo ready >&2; while :; do sleep 0.01; done", SIGUSR1);
    pause();
    _exit(0);
  }
  ASSERT_EQ(line(), "ready");  // copied by the supervisor: it watches
  const bool runs = !marked_processes(mark_).empty();

  kill(supervisor, SIGKILL);
  waitpid(supervisor, nullptr, 0);

  const auto begin = std::chrono::steady_clock::now();
  while (!marked_processes(mark_).empty() && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20))
    std::this_thread::yield();
  EXPECT_TRUE(runs);
  EXPECT_TRUE(marked_processes(mark_).empty());
}

// A supervisor of two workers, one of which has hung: it does not hear, or is stopped.
TEST_F(ProcessLaunch, TheGuardianEndsWorkersThatAKilledSupervisorHasLeft) {
  for (const char* const deaf : {"trap '' USR1; echo ready >&2; while :; do sleep 0.01; done", "echo ready >&2; kill -STOP $$"}) {
    mark_ += "+";  // the guardian before may still look whether all of its are gone
    const pid_t supervisor = fork();
    if (supervisor == 0) {
      const RunGuardian guardian(mark_, 0.3, {});
      const auto worker = start(deaf, SIGUSR1);
      pause();
      _exit(0);
    }
    EXPECT_EQ(line(), "ready");
    EXPECT_FALSE(marked_processes(mark_).empty());

    kill(supervisor, SIGKILL);
    waitpid(supervisor, nullptr, 0);

    const auto begin = std::chrono::steady_clock::now();
    while (!marked_processes(mark_).empty() && std::chrono::steady_clock::now() - begin < std::chrono::seconds(20))
      std::this_thread::yield();
    EXPECT_TRUE(marked_processes(mark_).empty()) << deaf;
    kill_marked_processes(mark_);
  }
}

TEST_F(ProcessLaunch, TheGuardianOfASupervisorThatEndsLeavesOthersAlone) {
  const auto worker = start("echo ready >&2; sleep 1000");
  ASSERT_EQ(line(), "ready");

  std::make_unique<RunGuardian>(mark_, 0.0, "").reset();

  EXPECT_FALSE(marked_processes(mark_).empty());
}

TEST(ProcessLauncher, NamesAProgramThatIsNotThere) {
  ProcessLauncherOptions options;
  options.command = [](const Attempt&) { return std::vector<std::string>{"/nowhere/mpirun", "-n", "2"}; };
  try {
    static_cast<void>(ProcessLauncher(options).start({}));
    FAIL() << "started";
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "/nowhere/mpirun: cannot be started: No such file or directory");
  }
}

}  // namespace
}  // namespace tandem
