// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>

namespace tandem {

/// What a writer asks of the file system, one call for each request, so that a test can record the requests, refuse one, or end
/// the program between two. Safe to call from several threads for different files.
///
/// Every member throws IoError with path and the system's reason where it is refused.
class FileOperations {
 public:
  FileOperations() = default;
  FileOperations(const FileOperations&) = delete;
  FileOperations& operator=(const FileOperations&) = delete;
  virtual ~FileOperations() = default;

  /// A new file, which must not exist; returns its descriptor, open for writing.
  [[nodiscard]] virtual int create(const std::filesystem::path& file) = 0;
  /// All of `bytes`, behind what has been written. `file` is for messages.
  virtual void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes) = 0;
  /// Makes what has been written durable.
  virtual void sync(int descriptor, const std::filesystem::path& file) = 0;
  virtual void close(int descriptor, const std::filesystem::path& file) = 0;
  /// Atomic; replaces a file `to`, and an empty folder.
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Swaps two names atomically. False, and nothing done, where the file system cannot.
  [[nodiscard]] virtual bool exchange(const std::filesystem::path& one, const std::filesystem::path& other) = 0;
  /// Makes the names in `folder` durable. File systems that cannot sync a folder are passed over in silence.
  virtual void sync_folder(const std::filesystem::path& folder) = 0;
  /// One folder, whose parent exists. One that exists is left alone.
  virtual void make_folder(const std::filesystem::path& folder) = 0;
  /// A file, or a folder with all it holds; what does not exist is passed over.
  virtual void remove(const std::filesystem::path& path) = 0;
};

/// Those of the operating system.
[[nodiscard]] FileOperations& system_files();

/// Others', but for what a subclass overrides. Borrows them.
class WrappedFiles : public FileOperations {
 public:
  explicit WrappedFiles(FileOperations& inner = system_files()) : inner_(inner) {}

  [[nodiscard]] int create(const std::filesystem::path& file) override { return inner_.create(file); }
  void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes) override {
    inner_.write(descriptor, file, bytes);
  }
  void sync(int descriptor, const std::filesystem::path& file) override { inner_.sync(descriptor, file); }
  void close(int descriptor, const std::filesystem::path& file) override { inner_.close(descriptor, file); }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override { inner_.rename(from, to); }
  [[nodiscard]] bool exchange(const std::filesystem::path& one, const std::filesystem::path& other) override {
    return inner_.exchange(one, other);
  }
  void sync_folder(const std::filesystem::path& folder) override { inner_.sync_folder(folder); }
  void make_folder(const std::filesystem::path& folder) override { inner_.make_folder(folder); }
  void remove(const std::filesystem::path& path) override { inner_.remove(path); }

 private:
  FileOperations& inner_;
};

/// A new file with what `fill` hands to its argument, piece by piece; durable on return, its name is not. May leave a part where
/// it throws: IoError, and what `fill` throws.
using ByteWriter = std::function<void(std::span<const std::byte>)>;
void write_new_file(FileOperations& files, const std::filesystem::path& file, const std::function<void(const ByteWriter&)>& fill);
void write_new_file(FileOperations& files, const std::filesystem::path& file, std::span<const std::byte> bytes);

/// `bytes` as the file `path`: written beside it, made durable, renamed over it, the name made durable.
void replace_file(FileOperations& files, const std::filesystem::path& path, std::span<const std::byte> bytes);

/// The folder and those above it, as far as they do not exist, with durable names. Any number of threads and processes may do so.
void make_folders(FileOperations& files, const std::filesystem::path& folder);

/// Gives `whole` the name `target`, and makes the name durable. A folder that has the name makes way in the same moment or, on a
/// file system that cannot swap, just before. Returns where that one lies now, for the caller to remove; empty: there was none.
[[nodiscard]] std::filesystem::path replace_folder(FileOperations& files, const std::filesystem::path& whole,
                                                   const std::filesystem::path& target);

}  // namespace tandem
