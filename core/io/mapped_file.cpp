// SPDX-License-Identifier: Apache-2.0
#include "core/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/file_descriptor.h"

namespace tandem {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, std::string_view reason) {
  throw InputError(fmt::format("cannot read {}: {}", path.string(), reason));
}

std::string text_of(int error_number) { return std::generic_category().message(error_number); }

}  // namespace

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang before fstat() can refuse it.
  const FileDescriptor file(path_, O_RDONLY | O_NONBLOCK);
  if (file.value() < 0) refuse(path_, text_of(errno));
  struct stat status {};
  if (::fstat(file.value(), &status) != 0) refuse(path_, text_of(errno));
  if (S_ISDIR(status.st_mode)) refuse(path_, "it is a directory, a file is needed");
  if (!S_ISREG(status.st_mode)) refuse(path_, "it is not a regular file (a pipe or device cannot be mapped)");
  if (status.st_size == 0) return;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value(), 0);
  if (address == MAP_FAILED) refuse(path_, text_of(errno));
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, std::span<const std::byte>{})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    path_ = std::move(other.path_);
    bytes_ = std::exchange(other.bytes_, std::span<const std::byte>{});
  }
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() noexcept {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

}  // namespace tandem
