// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/run_guardian.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "optimized/recovery/process_launcher.h"

namespace tandem {
namespace {

constexpr int kEscaped = 77;
constexpr char kReady = 'r';
constexpr std::chrono::seconds kTooLong{20};

bool as_it_is() { return true; }

// As in some containers.
bool without_close_range() {
  std::array<sock_filter, 4> program = {sock_filter{BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
                                        sock_filter{BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_close_range},
                                        sock_filter{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM},
                                        sock_filter{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
  const sock_fprog filter = {program.size(), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// What is asked for from now on throws std::bad_alloc.
bool without_memory() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return false;  // they end the program where there is none
#else
  std::array<volatile char, 1 << 18> stack{};  // so that it has grown
  for (volatile char& byte : stack) byte = 1;
  const rlimit none = {0, 0};
  if (setrlimit(RLIMIT_AS, &none) != 0) return false;
  void* volatile taken = nullptr;
  const auto take_all = [&](std::size_t size) {
    do taken = std::malloc(size);
    while (taken != nullptr);
  };
  constexpr std::size_t kLarge = 1 << 16, kStep = 16;
  for (std::size_t size = kLarge; size > 0; size -= kStep) take_all(size);
  return true;
#endif
}

// Of supervisors that are killed; their guardians are this process's children then.
class Guardian : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    ASSERT_EQ(pipe2(output_.data(), O_CLOEXEC), 0);
    mark_ = fmt::format("TANDEM_RUN={}-{}", getpid(), testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override {
    kill_marked_processes(mark_);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    for (const int end : output_) {
      if (end >= 0) close(end);
    }
  }

  // Forks a supervisor that makes a guardian, and kills it. False: it could not be prepared, and there is no guardian.
  bool kill_a_supervisor(const std::function<bool()>& prepare, double patience_seconds) {
    const pid_t supervisor = fork();
    if (supervisor == 0) {
      try {
        if (!prepare()) _exit(0);
        const RunGuardian guardian(mark_, patience_seconds, {});
        static_cast<void>(!write(output_[1], &kReady, 1));
        pause();
      } catch (...) {
        _exit(kEscaped);  // the guardian, and it goes on as a supervisor
      }
      _exit(0);
    }
    close(std::exchange(output_[1], -1));
    char word = 0;
    const bool is_ready = read(output_[0], &word, 1) == 1;
    kill(supervisor, SIGKILL);
    int status = 0;
    EXPECT_EQ(waitpid(supervisor, &status, 0), supervisor);
    EXPECT_EQ(WIFSIGNALED(status), is_ready) << "it made no guardian";
    return is_ready;
  }
  // Exit status of the guardian; nothing: it goes on.
  static std::optional<int> end_of_guardian() {
    const auto begin = std::chrono::steady_clock::now();
    for (; std::chrono::steady_clock::now() - begin < kTooLong; std::this_thread::yield()) {
      int status = 0;
      if (waitpid(-1, &status, WNOHANG) > 0) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    return std::nullopt;
  }

  std::array<int, 2> output_{-1, -1};  // that a supervisor and its guardian have
  std::string mark_;
};

struct Circumstance {
  const char* name;
  bool (*prepare)();
};
class GuardianAnywhere : public Guardian, public testing::WithParamInterface<Circumstance> {};
INSTANTIATE_TEST_SUITE_P(Systems, GuardianAnywhere,
                         testing::Values(Circumstance{"WithCloseRange", as_it_is},
                                         Circumstance{"WithoutCloseRange", without_close_range}),
                         [](const auto& circumstance) { return circumstance.param.name; });

TEST_P(GuardianAnywhere, EndsWhenItsSupervisorIsGoneAndKeepsNoneOfItsFilesBeforeThat) {
  const pid_t worker = fork();
  if (worker == 0) {
    std::array<char*, 2> environment = {mark_.data(), nullptr};
    execle("/bin/sleep", "sleep", "1000", static_cast<char*>(nullptr), environment.data());
    _exit(1);
  }
  while (marked_processes(mark_).empty()) std::this_thread::yield();
  constexpr double kForEver = 1e6;
  const bool is_prepared = kill_a_supervisor(GetParam().prepare, kForEver);

  // The guardian waits for the worker, and nobody who reads what the supervisor said waits for the guardian.
  pollfd seen = {output_[0], POLLIN, 0};
  const int ready = poll(&seen, 1, static_cast<int>(std::chrono::milliseconds(kTooLong).count()));
  kill(worker, SIGKILL);
  waitpid(worker, nullptr, 0);
  if (!is_prepared) GTEST_SKIP() << "no call can be refused here";
  EXPECT_EQ(end_of_guardian(), 0);
  EXPECT_EQ(ready, 1);
  EXPECT_EQ(seen.revents, POLLHUP);
}

TEST_F(Guardian, NeverGoesOnAsASupervisorWhateverIsThrownInIt) {
  const bool is_prepared = kill_a_supervisor(without_memory, 0);

  if (!is_prepared) GTEST_SKIP() << "memory cannot be refused here";
  EXPECT_EQ(end_of_guardian(), 0);
}

}  // namespace
}  // namespace tandem
