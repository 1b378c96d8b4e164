// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/run_guardian.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/recovery/process_launcher.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kPause{20};
constexpr char kAllIsWell = 'w';
constexpr long kMostFiles = 1 << 16;

// Only the pipe is left of what the supervisor has open: its lock must be free when it is gone, and who reads its output must not
// wait for this process.
int take_leave(const std::array<int, 2>& ends) {
  constexpr int kPlace = 3;
  close(ends[1]);  // else nobody would ever see its end
  setsid();
  prctl(PR_SET_NAME, "tandem-guardian");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE}) std::signal(signal, SIG_IGN);
  dup2(ends[0], kPlace);
  if (close_range(kPlace + 1, ~0U, 0) != 0) {  // of Linux 5.9; some containers refuse it
    const long most = std::min(sysconf(_SC_OPEN_MAX), kMostFiles);
    for (int file = kPlace + 1; file < most; ++file) close(file);
  }
  const int nothing = open("/dev/null", O_RDWR);
  for (int file = 0; file < kPlace; ++file) dup2(nothing, file);
  close(nothing);
  return kPlace;
}

bool ends_well(int pipe) {
  char word = 0;
  ssize_t size = 0;
  do size = read(pipe, &word, 1);
  while (size < 0 && errno == EINTR);
  return size == 1 && word == kAllIsWell;
}

void guard(const std::array<int, 2>& ends, const std::string& mark, double patience_seconds, const std::string& shared_files) {
  if (ends_well(take_leave(ends))) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience_seconds);
  while (std::chrono::steady_clock::now() < end) {
    if (marked_processes(mark).empty()) return;
    std::this_thread::sleep_for(kPause);
  }
  kill_marked_processes(mark, 0, shared_files);
}

}  // namespace

RunGuardian::RunGuardian(const std::string& mark, double patience_seconds, const std::string& shared_files) {
  TANDEM_CHECK(!mark.empty(), "a guardian that would know no worker");
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw IoError(fmt::format("no pipe to a guardian: {}", std::strerror(errno)));
  process_ = fork();
  const int reason = errno;
  if (process_ == 0) {
    try {
      guard(ends, mark, patience_seconds, shared_files);
    } catch (...) {  // what cannot be killed is not helped by waiting here, and this process must not go on as its supervisor
    }
    _exit(0);
  }
  close(ends[0]);
  pipe_ = ends[1];
  if (process_ < 0) {
    close(pipe_);
    throw IoError(fmt::format("no process for a guardian: {}", std::strerror(reason)));
  }
}

RunGuardian::~RunGuardian() {
  // Where nobody reads any more, somebody has killed the guardian.
  struct sigaction ignored {
  }, before{};
  ignored.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignored, &before);
  static_cast<void>(!write(pipe_, &kAllIsWell, 1));
  sigaction(SIGPIPE, &before, nullptr);
  close(pipe_);
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) continue;
}

}  // namespace tandem
