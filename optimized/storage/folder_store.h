// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/io/file_operations.h"
#include "optimized/storage/object_store.h"

namespace tandem {

/// The object KEY is the file ROOT/KEY. Written beside, in ROOT/.unfinished, made durable and then given its name, so that
/// several processes may share the folder. ROOT is made when first written to; a folder that holds no object any more is removed.
/// Unlike S3, a folder cannot have both "a" and "a/b": the second is refused with StoreError. Keys in ".unfinished/" are a
/// ContractError.
class FolderStore final : public ObjectStore {
 public:
  /// `files` must outlive the store.
  explicit FolderStore(const std::filesystem::path& root, FileOperations& files = system_files());

  void put(const std::string& key, std::span<const std::byte> bytes) override;
  bool put_if_absent(const std::string& key, std::span<const std::byte> bytes) override;
  void put_file(const std::string& key, const std::filesystem::path& file) override;
  [[nodiscard]] std::vector<std::byte> get(const std::string& key) const override;
  [[nodiscard]] std::vector<std::byte> get_range(const std::string& key, Interval range) const override;
  void get_file(const std::string& key, const std::filesystem::path& file) const override;
  [[nodiscard]] std::optional<ObjectInfo> find(const std::string& key) const override;
  [[nodiscard]] std::vector<ObjectInfo> list(const std::string& prefix) const override;
  void remove(const std::string& key) override;
  [[nodiscard]] std::string describe() const override;

 private:
  [[nodiscard]] std::filesystem::path path_of(const std::string& key) const;
  [[nodiscard]] std::filesystem::path unfinished() const;
  bool give_name(const std::filesystem::path& target, const std::function<bool()>& rename_or_link);
  void replace(const std::filesystem::path& written, const std::filesystem::path& target);
  [[noreturn]] void refuse(const char* action, const std::string& key, const std::string& reason) const;

  std::filesystem::path root_;
  FileOperations& files_;
};

}  // namespace tandem
