// SPDX-License-Identifier: Apache-2.0
#include "core/io/file_operations.h"

#include <string>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// A file system that cannot swap two names.
class WithoutExchange final : public WrappedFiles {
 public:
  bool exchange(const fs::path&, const fs::path&) override { return false; }
};

TEST(FileOperations, ANewFileMustBeNew) {
  const TestFolder folder;
  write_new_file(system_files(), folder / "file", bytes_of("first"));
  EXPECT_EQ(TestFolder::read(folder / "file"), "first");
  EXPECT_NE(message_of<IoError>([&] { write_new_file(system_files(), folder / "file", bytes_of("second")); }).find("File exists"),
            std::string::npos);
  EXPECT_EQ(TestFolder::read(folder / "file"), "first");
}

TEST(FileOperations, AReplacedFileIsTheOldOneOrTheNewOne) {
  const TestFolder folder;
  replace_file(system_files(), folder / "file", bytes_of("old"));
  {
    const FileSizeLimit limit(2);
    EXPECT_THROW(replace_file(system_files(), folder / "file", bytes_of("newer")), IoError);
  }
  EXPECT_EQ(TestFolder::read(folder / "file"), "old");
  EXPECT_EQ(folder.num_files(), 1U);
  replace_file(system_files(), folder / "file", bytes_of("newer"));
  EXPECT_EQ(TestFolder::read(folder / "file"), "newer");
}

TEST(FileOperations, MakesAllFoldersAndRefusesAFileAmongThem) {
  const TestFolder folder;
  make_folders(system_files(), folder / "a/b/c");
  make_folders(system_files(), folder / "a/b/c");
  EXPECT_TRUE(fs::is_directory(folder / "a/b/c"));
  (void)folder.write("file", "");
  EXPECT_THROW(make_folders(system_files(), folder / "file/below"), IoError);
}

TEST(FileOperations, AFolderTakesTheNameOfAnother) {
  WithoutExchange without;
  for (FileOperations* files : {&system_files(), static_cast<FileOperations*>(&without)}) {
    const TestFolder folder;
    make_folders(*files, folder / "new");
    (void)folder.write("new/which", "first");
    EXPECT_EQ(replace_folder(*files, folder / "new", folder / "named"), fs::path());
    make_folders(*files, folder / "new");
    (void)folder.write("new/which", "second");

    const fs::path old = replace_folder(*files, folder / "new", folder / "named");

    EXPECT_EQ(TestFolder::read(folder / "named/which"), "second");
    EXPECT_EQ(TestFolder::read(old / "which"), "first");
    files->remove(old);
    EXPECT_EQ(folder.num_files(), 1U);
  }
}

}  // namespace
}  // namespace tandem
