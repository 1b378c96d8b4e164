// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/io/file_operations.h"

namespace tandem {

/// For tests: the operating system's, of which a test overrides what is to be otherwise.
class TestFiles : public FileOperations {
 public:
  [[nodiscard]] int create(const std::filesystem::path& file) override { return system_files().create(file); }
  void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes) override {
    system_files().write(descriptor, file, bytes);
  }
  void sync(int descriptor, const std::filesystem::path& file) override { system_files().sync(descriptor, file); }
  void close(int descriptor, const std::filesystem::path& file) override { system_files().close(descriptor, file); }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override { system_files().rename(from, to); }
  [[nodiscard]] bool exchange(const std::filesystem::path& one, const std::filesystem::path& other) override {
    return system_files().exchange(one, other);
  }
  void sync_folder(const std::filesystem::path& folder) override { system_files().sync_folder(folder); }
  void make_folder(const std::filesystem::path& folder) override { system_files().make_folder(folder); }
  void remove(const std::filesystem::path& path) override { system_files().remove(path); }
};

}  // namespace tandem
