// SPDX-License-Identifier: Apache-2.0
#include "cli/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/recovery/process_launcher.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kPause{20};

class Patience {
 public:
  explicit Patience(double seconds) : end_(std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds)) {}
  [[nodiscard]] bool is_over() const { return std::chrono::steady_clock::now() >= end_; }

 private:
  std::chrono::time_point<std::chrono::steady_clock, std::chrono::duration<double>> end_;
};

// By errno.
IoError not_writable(const std::filesystem::path& file) {
  return IoError(fmt::format("cannot write {}: {}; make room there, or name another --out", file.string(), std::strerror(errno)));
}

}  // namespace

RunFolder::RunFolder(const std::filesystem::path& folder, double patience_seconds, const std::atomic<bool>& stop,
                     const std::function<void(const std::string&)>& note)
    : file_(folder / "run.lock") {
  lock_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) throw not_writable(file_);
  const Patience patience(patience_seconds);
  bool is_told = false;
  while (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    if (patience.is_over() || stop) {
      ::close(lock_);
      throw InputError(
          fmt::format("--out {}: another supervisor runs there; wait for its end or use another folder", folder.string()));
    }
    if (!is_told) note(fmt::format("another supervisor has {}; waiting for {:.3g} s", folder.string(), patience_seconds));
    is_told = true;
    std::this_thread::sleep_for(kPause);
  }
  std::array<char, 64> text{};
  const ssize_t size = ::pread(lock_, text.data(), text.size() - 1, 0);
  if (size > 0) static_cast<void>(std::sscanf(text.data(), "ranks %d", &first_ranks_));
}

RunFolder::~RunFolder() { ::close(lock_); }

void RunFolder::begin_with(int ranks) {
  first_ranks_ = ranks;
  const std::string text = fmt::format("ranks {}\n", ranks);
  if (::pwrite(lock_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) || ::fsync(lock_) != 0)
    throw not_writable(file_);
}

void end_orphans(const std::string& mark, double patience_seconds, const std::function<void(const std::string&)>& note) {
  const Patience patience(patience_seconds);
  bool is_told = false;
  while (!marked_processes(mark).empty()) {
    if (!is_told)
      note(fmt::format("workers of a supervisor that is gone are still saving; waiting for {:.3g} s", patience_seconds));
    is_told = true;
    if (patience.is_over()) {
      note("they do not end: killed");
      kill_marked_processes(mark);
      return;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace tandem
