// SPDX-License-Identifier: Apache-2.0
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "core/error.h"
#include "harness/report/chart.h"

namespace tandem {
namespace {

[[noreturn]] void fail(const char* what, int error) {
  throw IoError(fmt::format("drawing a chart: {}: {}", what, std::strerror(error)));
}

// A file without a name, gone with its descriptor. The whole script lies there before gnuplot starts and all it writes is read
// after it has ended, so neither of the two can wait for the other.
class NamelessFile {
 public:
  NamelessFile() : descriptor_(memfd_create("chart", MFD_CLOEXEC)) {
    if (descriptor_ < 0) fail("memfd_create", errno);
  }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;
  ~NamelessFile() { close(descriptor_); }

  void fill(const std::string& text) const {
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t written = write(descriptor_, text.data() + done, text.size() - done);
      if (written < 0) fail("write", errno);
      done += static_cast<std::size_t>(written);
    }
    lseek(descriptor_, 0, SEEK_SET);
  }

  [[nodiscard]] std::string text() const {
    std::string all;
    std::array<char, 1 << 16> part{};
    for (;;) {
      const ssize_t count = pread(descriptor_, part.data(), part.size(), static_cast<off_t>(all.size()));
      if (count < 0) fail("read", errno);
      if (count == 0) return all;
      all.append(part.data(), static_cast<std::size_t>(count));
    }
  }

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

// -d: neither the user's nor the machine's settings, so that a chart depends on its script alone.
int run(const NamelessFile& in, const NamelessFile& out, const NamelessFile& errors) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.descriptor(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out.descriptor(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.descriptor(), STDERR_FILENO);
  std::string program = "gnuplot", option = "-d";
  const std::array<char*, 3> words = {program.data(), option.data(), nullptr};
  pid_t process = 0;
  const int error = posix_spawnp(&process, program.c_str(), &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error == ENOENT) {
    throw InputError("charts are drawn by gnuplot, which is not here; on Debian: apt-get install gnuplot-nox (ci/setup.sh does)");
  }
  if (error != 0) fail("starting gnuplot", error);
  int status = 0;
  while (waitpid(process, &status, 0) < 0) {
    if (errno != EINTR) fail("waiting for gnuplot", errno);
  }
  return status;
}

// The line that says what is wrong; around it gnuplot repeats the script.
std::string complaint(const std::string& errors) {
  const std::size_t at = errors.find("line ");
  const std::size_t begin = at == std::string::npos ? 0 : at;
  return errors.substr(begin, errors.find('\n', begin) - begin);
}

}  // namespace

std::string run_gnuplot(const std::string& script, ChartFormat format) {
  const NamelessFile in, out, errors;
  in.fill(script);
  const int status = run(in, out, errors);
  const std::string said = errors.text();
  if (said.find("unknown or ambiguous terminal type") != std::string::npos) {
    throw InputError(fmt::format("this gnuplot cannot write {}; Debian's gnuplot-nox can",
                                 format == ChartFormat::pdf   ? "PDF (terminal pdfcairo)"
                                 : format == ChartFormat::png ? "PNG (terminal pngcairo)"
                                                              : "SVG"));
  }
  std::string drawn = out.text();
  if (status != 0 || drawn.empty()) throw IoError(fmt::format("gnuplot failed: {}", complaint(said)));
  return drawn;
}

}  // namespace tandem
