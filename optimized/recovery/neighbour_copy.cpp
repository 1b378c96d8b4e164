// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/neighbour_copy.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/storage/file_copy.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMessageBytes = std::int64_t{4} << 20;

[[noreturn]] void refuse_in_memory(std::string_view action, const fs::path& file, int reason) {
  throw IoError(fmt::format("cannot {} {}: {}", action, file.string(), std::generic_category().message(reason)));
}

// A file that arrives.
class IncomingCopy {
 public:
  IncomingCopy(FileOperations& files, const fs::path& folder, int source, CheckpointFile file)
      : files_(files), path_(folder / file.name), source_(source), file_(std::move(file)) {
    attempt([&] { descriptor_ = files_.create(path_); });
  }
  [[nodiscard]] const CheckpointFile& file() const { return file_; }

  [[nodiscard]] Work receive(Communicator& world, std::int64_t at, const Envelope& envelope) {
    buffer_.resize(static_cast<std::size_t>(std::min(kMessageBytes, file_.bytes - at)));
    return world.recv(view_of(buffer_, {std::ssize(buffer_)}), source_, envelope, {.name = "copy of a neighbour"});
  }
  void write_received() {
    const std::span<const std::byte> bytes = std::as_bytes(std::span(buffer_));
    hasher_.update(bytes);
    if (descriptor_ >= 0) attempt([&] { files_.write(descriptor_, path_, bytes); });
  }
  void finish() {
    if (hasher_.digest() != file_.hash && error_.empty()) {
      error_ = fmt::format("{} has arrived with other bytes than rank {} has sent", file_.name, source_);
    }
    close();
  }
  // Planted: what has the neighbour's name is what this rank has anyway.
  void finish_with(const fs::path& own) {
    const int unused = std::exchange(descriptor_, -1);
    if (unused >= 0) attempt([&] { files_.close(unused, path_); });
    std::error_code ignored;
    fs::copy_file(own, path_, fs::copy_options::overwrite_existing, ignored);
  }
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  void close() {
    const int descriptor = std::exchange(descriptor_, -1);
    if (descriptor >= 0) attempt([&] { files_.close(descriptor, path_); });
  }
  void attempt(const std::function<void()>& work) {
    try {
      work();
    } catch (const IoError& error) {
      if (error_.empty()) error_ = error.what();
    }
  }

  FileOperations& files_;
  fs::path path_;
  int source_;
  CheckpointFile file_;
  int descriptor_ = -1;
  std::vector<std::uint8_t> buffer_;
  Hasher128 hasher_;
  std::string error_;
};

// One file to `keeper`, and those that arrive: a piece of each at a time, all under way at once, so that nobody waits in a ring.
// Returns what was sent.
std::int64_t exchange_files(Communicator& world, const fs::path& folder, const CheckpointFile* own, int keeper,
                            std::vector<IncomingCopy>& incoming, std::int64_t step) {
  std::optional<FileReader> reader;
  if (own != nullptr) reader.emplace(folder / own->name);
  const std::int64_t own_bytes = own != nullptr ? own->bytes : 0;
  std::int64_t most = own_bytes;
  for (const IncomingCopy& copy : incoming) most = std::max(most, copy.file().bytes);
  std::vector<std::uint8_t> buffer;
  for (std::int64_t at = 0; at < most; at += kMessageBytes) {
    const Envelope envelope{.step = step, .micro_batch = static_cast<int>(at / kMessageBytes)};
    std::vector<std::pair<IncomingCopy*, Work>> arriving;
    for (IncomingCopy& copy : incoming) {
      if (at < copy.file().bytes) arriving.emplace_back(&copy, copy.receive(world, at, envelope));
    }
    Work sending;
    if (at < own_bytes) {
      buffer.resize(static_cast<std::size_t>(std::min(kMessageBytes, own_bytes - at)));
      reader->read(at, std::as_writable_bytes(std::span(buffer)));
      sending = world.send(view_of(buffer, {std::ssize(buffer)}), keeper, envelope, {.name = "copy for a neighbour"});
    }
    for (auto& [copy, work] : arriving) {
      work.wait_host();
      copy->write_received();
    }
    sending.wait_host();
  }
  return own_bytes;
}

}  // namespace

int PageKeepingFiles::create(const fs::path& file) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse_in_memory("create", file, errno);
  return descriptor;
}

void PageKeepingFiles::sync(int, const fs::path&) {}

void PageKeepingFiles::close(int descriptor, const fs::path& file) {
  const off_t end = ::lseek(descriptor, 0, SEEK_CUR);
  const bool is_cut = end >= 0 && ::ftruncate(descriptor, end) == 0;
  const int reason = errno;
  WrappedFiles::close(descriptor, file);
  if (!is_cut) refuse_in_memory("cut", file, reason);
}

void PageKeepingFiles::sync_folder(const fs::path&) {}
void PageKeepingFiles::remove(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) WrappedFiles::remove(path);
}

int keeper_of(int rank, int ranks, int ranks_per_node) {
  const int nodes = (ranks + ranks_per_node - 1) / ranks_per_node;
  const int first = (rank / ranks_per_node + 1) % nodes * ranks_per_node;
  return first + rank % ranks_per_node % std::min(ranks_per_node, ranks - first);
}

NeighbourCopy copy_to_neighbours(Communicator& world, FileOperations& files, const fs::path& folder,
                                 const std::vector<std::vector<CheckpointFile>>& files_by_rank, int ranks_per_node,
                                 std::int64_t step, const PitfallSet& pitfalls) {
  const auto files_of = [&](int rank) -> const std::vector<CheckpointFile>& {
    return files_by_rank[static_cast<std::size_t>(rank)];
  };
  const std::vector<CheckpointFile>& own = files_of(world.rank());
  const int keeper = keeper_of(world.rank(), world.size(), ranks_per_node);
  NeighbourCopy result;
  for (std::size_t file = 0; file < 2; ++file) {  // shard and residuals
    std::vector<IncomingCopy> incoming;
    for (int rank = 0; rank < world.size(); ++rank) {
      if (keeper_of(rank, world.size(), ranks_per_node) != world.rank() || file >= files_of(rank).size()) continue;
      incoming.emplace_back(files, folder, rank, files_of(rank)[file]);
    }
    const CheckpointFile* const mine = file < own.size() ? &own[file] : nullptr;
    result.sent_bytes += exchange_files(world, folder, mine, keeper, incoming, step);
    for (IncomingCopy& copy : incoming) {
      const bool is_planted = pitfalls.on(Pitfall::neighbour_keeps_own_shard) && mine != nullptr;
      is_planted ? copy.finish_with(folder / mine->name) : copy.finish();
      if (result.error.empty()) result.error = copy.error();
    }
  }
  return result;
}

}  // namespace tandem
