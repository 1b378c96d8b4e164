// SPDX-License-Identifier: Apache-2.0
#include "core/io/append_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/file_operations.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Open for appending and for a look at what is there; closed at the end of the scope.
class AppendedFile {
 public:
  explicit AppendedFile(const fs::path& file)
      : file_(file), descriptor_(::open(file.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) refuse("open", errno);
  }
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;
  ~AppendedFile() { ::close(descriptor_); }

  [[nodiscard]] bool is_empty() const { return ::lseek(descriptor_, 0, SEEK_END) <= 0; }
  [[nodiscard]] bool ends_with_line() const {
    const off_t size = ::lseek(descriptor_, 0, SEEK_END);
    char last = '\n';
    return size <= 0 || ::pread(descriptor_, &last, 1, size - 1) != 1 || last == '\n';
  }
  void append(const std::string& text) {
    ssize_t written = 0;
    do {
      written = ::write(descriptor_, text.data(), text.size());
    } while (written < 0 && errno == EINTR);
    if (written < 0) refuse("write", errno);
    // Not followed by the rest: another process may have written in between.
    if (static_cast<std::size_t>(written) != text.size()) refuse("write", ENOSPC);
    if (::fsync(descriptor_) != 0) refuse("flush", errno);
  }

 private:
  [[noreturn]] void refuse(std::string_view action, int error_number) const {
    throw IoError(fmt::format("cannot {} {}: {}", action, file_.string(), std::generic_category().message(error_number)));
  }

  fs::path file_;
  int descriptor_;
};

}  // namespace

void append_line(const fs::path& file, std::string_view line) {
  AppendedFile appended(file);
  const bool is_new = appended.is_empty();
  appended.append(fmt::format("{}{}\n", appended.ends_with_line() ? "" : "\n", line));
  if (is_new) system_files().sync_folder(file.has_parent_path() ? file.parent_path() : fs::path("."));
}

}  // namespace tandem
