// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/process_launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { close(); }
  void close() {
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }
  [[nodiscard]] int get() const noexcept { return number_; }

 private:
  int number_;
};

struct Pipe {
  Descriptor read, write;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw IoError(fmt::format("no pipe to a worker: {}", std::strerror(errno)));
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // nobody reads what the run says any more; it goes on
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

// The line that says why: the program's own last one if there is any, since a launcher adds paragraphs of its own.
class LastLine {
 public:
  void add(std::string_view text) {
    for (const char c : text) {
      if (c == '\n') {
        take();
      } else if (line_.size() < kLongest) {
        line_.push_back(c);
      }
    }
  }
  [[nodiscard]] std::string get() {
    take();
    return own_.empty() ? other_ : own_;
  }

 private:
  static constexpr std::size_t kLongest = 1000;
  static constexpr std::string_view kOwn = "tandem: ";

  void take() {
    const std::string line = std::exchange(line_, {});
    if (line.starts_with(kOwn)) {
      own_ = line.substr(kOwn.size());
    } else if (std::any_of(line.begin(), line.end(), [](unsigned char c) { return std::isalpha(c) != 0; })) {
      other_ = line;
    }
  }

  std::string line_, own_, other_;
};

// Copies the standard error of a worker to ours and keeps the last line.
class ErrorCopy {
 public:
  ErrorCopy(Descriptor from, int to) : from_(std::move(from)), to_(to), wake_(eventfd(0, EFD_CLOEXEC)) {
    fcntl(from_.get(), F_SETFL, O_NONBLOCK);
    thread_ = std::jthread([this] { run(); });
  }
  ~ErrorCopy() { finish(); }
  ErrorCopy(const ErrorCopy&) = delete;
  ErrorCopy& operator=(const ErrorCopy&) = delete;

  // What has been written so far is copied; processes that keep the pipe open are not waited for.
  std::string finish() {
    if (thread_.joinable()) {
      const std::uint64_t one = 1;
      static_cast<void>(::write(wake_.get(), &one, sizeof(one)));
      thread_.join();
    }
    return last_.get();
  }

 private:
  void run() {
    std::array<pollfd, 2> files{pollfd{from_.get(), POLLIN, 0}, pollfd{wake_.get(), POLLIN, 0}};
    for (bool more = true; more;) {
      if (::poll(files.data(), files.size(), -1) < 0 && errno != EINTR) return;
      const bool asked = files[1].revents != 0;
      more = copy() && !asked;
    }
  }

  // All that is there; false at its end.
  bool copy() {
    std::array<char, 4096> part{};
    while (true) {
      const ssize_t size = ::read(from_.get(), part.data(), part.size());
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) return size < 0 && errno == EAGAIN;
      const std::string_view text(part.data(), static_cast<std::size_t>(size));
      write_all(to_, text);
      last_.add(text);
    }
  }

  Descriptor from_;
  int to_;
  Descriptor wake_;
  LastLine last_;  // of the thread until it has been joined
  std::jthread thread_;
};

// State and session of /proc/PID/stat; the name before them may hold anything, parentheses too.
struct ProcessStat {
  char state = 'Z';
  pid_t session = 0;
};
std::optional<ProcessStat> read_stat(const std::filesystem::path& folder) {
  std::ifstream file(folder / "stat");
  std::string text;
  std::getline(file, text, '\0');  // all of it; where the process ends meanwhile this reads nothing, and an iterator would throw
  const std::size_t behind = text.rfind(')');
  if (behind == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(behind + 1));
  ProcessStat stat;
  pid_t parent = 0, group = 0;
  fields >> stat.state >> parent >> group >> stat.session;
  return fields ? std::optional(stat) : std::nullopt;
}

bool has_mark(const std::filesystem::path& folder, const std::string& mark) {
  if (mark.empty()) return false;
  std::ifstream file(folder / "environ", std::ios::binary);
  for (std::string variable; std::getline(file, variable, '\0');) {
    if (variable == mark) return true;
  }
  return false;
}

std::vector<pid_t> find_processes(const std::string& mark, pid_t session) {
  std::vector<pid_t> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    pid_t process = 0;
    const auto [end, problem] = std::from_chars(name.data(), name.data() + name.size(), process);
    if (problem != std::errc() || end != name.data() + name.size() || process == getpid()) continue;
    const std::optional<ProcessStat> stat = read_stat(entry.path());
    if (!stat || stat->state == 'Z' || stat->state == 'X') continue;
    if ((session != 0 && stat->session == session) || has_mark(entry.path(), mark)) found.push_back(process);
  }
  return found;
}

// Paths of the files that the processes have mapped which begin with `prefix`.
std::set<std::string> mapped_files(const std::vector<pid_t>& processes, const std::string& prefix) {
  std::set<std::string> found;
  if (prefix.empty()) return found;
  for (const pid_t process : processes) {
    std::ifstream file(fmt::format("/proc/{}/maps", process));
    for (std::string line; std::getline(file, line);) {
      const std::size_t at = line.find(" " + prefix);
      if (at != std::string::npos) found.insert(line.substr(at + 1));
    }
  }
  return found;
}

void remove_files(const std::set<std::string>& files) {
  for (const std::string& file : files) ::unlink(file.c_str());
}

// NAME=VALUE pairs of this process with those of `more`; what `defaults` says holds where the name is not set.
std::vector<std::string> make_environment(const std::string& mark, const std::vector<std::string>& defaults) {
  std::vector<std::string> variables;
  const auto is_set = [&](const std::string& assignment) {
    const std::string name = assignment.substr(0, assignment.find('=') + 1);
    return std::any_of(variables.begin(), variables.end(), [&](const std::string& one) { return one.starts_with(name); });
  };
  if (!mark.empty()) variables.push_back(mark);
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (mark.empty() || !is_set(*entry) || !std::string_view(*entry).starts_with(mark.substr(0, mark.find('=') + 1)))
      variables.emplace_back(*entry);
  }
  for (const std::string& assignment : defaults) {
    if (!is_set(assignment)) variables.push_back(assignment);
  }
  return variables;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// In the child, between fork and exec: system calls only.
[[noreturn]] void become(char** arguments, char** environment, int errors, int report, pid_t parent, int stop_signal) {
  setsid();
  prctl(PR_SET_PDEATHSIG, stop_signal);
  if (getppid() != parent) _exit(127);  // it died before it could have been heard of
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int nothing = open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, 0);
  dup2(errors, 2);
  execvpe(arguments[0], arguments, environment);
  const int reason = errno;
  static_cast<void>(!::write(report, &reason, sizeof(reason)));
  _exit(127);
}

class ProcessWorker final : public Worker {
 public:
  ProcessWorker(pid_t process, Descriptor errors, const ProcessLauncherOptions& options)
      : process_(process),
        mark_(options.mark),
        shared_files_(options.shared_files),
        stop_signal_(options.stop_signal),
        copy_(std::move(errors), options.errors) {}
  ~ProcessWorker() override {
    try {
      kill();
    } catch (const Error&) {  // what cannot be killed cannot be waited for here either
    }
  }
  ProcessWorker(const ProcessWorker&) = delete;
  ProcessWorker& operator=(const ProcessWorker&) = delete;

  std::optional<WorkerEnd> poll() override {
    look(WNOHANG);
    return end_;
  }

  void terminate() override {
    if (!end_) ::kill(process_, stop_signal_);
  }

  void kill() override {
    if (gone_) return;
    const std::set<std::string> shared = mapped_files(find_processes(mark_, process_), shared_files_);
    if (!end_) ::kill(-process_, SIGKILL);
    kill_marked_processes(mark_, process_);
    remove_files(shared);
    look(0);
    waitpid(process_, nullptr, 0);
    gone_ = true;
  }

 private:
  // It is not reaped before kill(): as long as it is there, its number is no other session's.
  void look(int flags) {
    if (end_) return;
    siginfo_t info{};
    int failed = 0;
    do failed = waitid(P_PID, static_cast<id_t>(process_), &info, WEXITED | WNOWAIT | flags);
    while (failed != 0 && errno == EINTR);
    if (failed == 0 && info.si_pid == 0) return;
    WorkerEnd end;
    end.what = copy_.finish();
    end.said = !end.what.empty();
    end.status = info.si_status;
    if (info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED) {
      end.signal = info.si_status;
      end.status = 128 + end.signal;
      end.what = fmt::format("the workers were killed by signal {} ({})", end.signal, sigdescr_np(end.signal));
      end.said = false;
    }
    if (end.what.empty() && end.status != 0) end.what = fmt::format("ended with status {}", end.status);
    end_ = end;
  }

  pid_t process_;
  std::string mark_, shared_files_;
  int stop_signal_;
  ErrorCopy copy_;
  std::optional<WorkerEnd> end_;
  bool gone_ = false;
};

}  // namespace

std::unique_ptr<Worker> ProcessLauncher::start(const Attempt& attempt) {
  std::vector<std::string> arguments = options_.command(attempt);
  TANDEM_CHECK(!arguments.empty(), "a command without a program");
  std::vector<std::string> environment = make_environment(options_.mark, options_.environment);
  const std::vector<char*> argument_pointers = pointers(arguments), environment_pointers = pointers(environment);
  Pipe errors = make_pipe(), report = make_pipe();
  const pid_t parent = getpid();
  const pid_t process = fork();
  if (process < 0) throw IoError(fmt::format("no process for a worker: {}", std::strerror(errno)));
  if (process == 0) {
    become(const_cast<char**>(argument_pointers.data()), const_cast<char**>(environment_pointers.data()), errors.write.get(),
           report.write.get(), parent, options_.stop_signal);
  }
  errors.write.close();
  report.write.close();
  auto worker = std::make_unique<ProcessWorker>(process, std::move(errors.read), options_);
  int reason = 0;
  ssize_t size = 0;
  do size = ::read(report.read.get(), &reason, sizeof(reason));
  while (size < 0 && errno == EINTR);
  if (size == sizeof(reason)) throw InputError(fmt::format("{}: cannot be started: {}", arguments[0], std::strerror(reason)));
  return worker;
}

std::vector<int> ProcessLauncher::lost_ranks() { return options_.lost_ranks ? options_.lost_ranks() : std::vector<int>(); }

std::optional<std::int64_t> ProcessLauncher::newest_step() {
  return options_.newest_step ? options_.newest_step() : std::nullopt;
}

std::vector<pid_t> marked_processes(const std::string& mark) { return find_processes(mark, 0); }

void kill_marked_processes(const std::string& mark, pid_t session, const std::string& shared_files) {
  constexpr std::chrono::seconds kPatience{30};
  constexpr std::chrono::milliseconds kPause{5};
  const auto begin = std::chrono::steady_clock::now();
  const std::set<std::string> shared = mapped_files(find_processes(mark, session), shared_files);
  // Until none is found twice: one may have been starting another, or another program, and shows no environment just then.
  for (int clean = 0; clean < 2;) {
    const std::vector<pid_t> left = find_processes(mark, session);
    clean = left.empty() ? clean + 1 : 0;
    if (clean == 2) break;
    if (!left.empty() && std::chrono::steady_clock::now() - begin > kPatience)
      throw IoError(fmt::format("process {} of the run does not end though it was killed", left.front()));
    for (const pid_t process : left) ::kill(process, SIGKILL);
    std::this_thread::sleep_for(kPause);
  }
  remove_files(shared);
}

}  // namespace tandem
