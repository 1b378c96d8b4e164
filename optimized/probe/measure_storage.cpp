// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cpu/huge_buffer.h"
#include "optimized/probe/measure.h"

namespace tandem::probing {
namespace {

constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;
constexpr int kBlocksOfSync = 4;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;

// A file that is gone with this object.
class ScratchFile {
 public:
  explicit ScratchFile(std::string path) : path_(std::move(path)) { open_with(O_RDWR | O_CREAT | O_EXCL); }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    ::unlink(path_.c_str());
  }

  // False where the file system has no direct reads.
  [[nodiscard]] bool reopen_direct() {
    const int direct = ::open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (direct < 0) return false;
    ::close(descriptor_);
    descriptor_ = direct;
    return true;
  }
  void write(const void* data, std::int64_t bytes) {
    for (std::int64_t done = 0; done < bytes;) {
      const ssize_t written = ::write(descriptor_, static_cast<const char*>(data) + done, static_cast<std::size_t>(bytes - done));
      if (written < 0 && errno != EINTR) fail("write");
      done += std::max<ssize_t>(written, 0);
    }
  }
  [[nodiscard]] std::int64_t read_at(void* data, std::int64_t bytes, std::int64_t offset) {
    const ssize_t got = ::pread(descriptor_, data, static_cast<std::size_t>(bytes), offset);
    if (got < 0) fail("read");
    return got;
  }
  void sync() {
    if (::fsync(descriptor_) != 0) fail("sync");
  }
  // Asks the system to forget what it keeps of the file in memory.
  void forget() { ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED); }

 private:
  void open_with(int flags) {
    descriptor_ = ::open(path_.c_str(), flags | O_CLOEXEC, 0600);
    if (descriptor_ < 0) fail("create");
  }
  [[noreturn]] void fail(const char* action) const {
    throw IoError(fmt::format("cannot {} {}: {}", action, path_, std::strerror(errno)));
  }

  std::string path_;
  int descriptor_ = -1;
};

}  // namespace

StorageSample measure_storage(const std::string& folder, double seconds) {
  StorageSample sample;
  ScratchFile file(fmt::format("{}/tandem-probe-{}-{:x}", folder, ::getpid(), std::random_device()()));
  // Aligned, as direct reads need; not all alike, for storage that packs.
  cpu::HugeBuffer block(kBlockBytes / 4, 0.0F);
  std::minstd_rand random(1);
  for (float& value : block.span()) value = static_cast<float>(random());
  // What is only in memory is not written: every 16 MiB are made durable before there are more.
  std::int64_t bytes = 0;
  const double begin = now_seconds();
  while (bytes < kMostBytes && (bytes == 0 || now_seconds() - begin < seconds / 3)) {
    for (int i = 0; i < kBlocksOfSync; ++i) file.write(block.data(), kBlockBytes);
    file.sync();
    bytes += kBlocksOfSync * kBlockBytes;
  }
  sample.write_bytes_per_second = static_cast<double>(bytes) / (now_seconds() - begin);
  file.forget();
  sample.direct = file.reopen_direct();
  std::int64_t read = 0;
  const double start = now_seconds();
  while (read < bytes && (read == 0 || now_seconds() - start < seconds / 3)) {
    const std::int64_t got = file.read_at(block.data(), kBlockBytes, read);
    if (got == 0) break;
    read += got;
  }
  sample.read_bytes_per_second = static_cast<double>(read) / (now_seconds() - start);
  return sample;
}

}  // namespace tandem::probing
